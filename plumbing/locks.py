"""Locks, by which a file belongs to one job. The system releases them however a process ends."""

import fcntl
import os
import socket
import time
from pathlib import Path

import torch.distributed as dist

from plumbing import agree, launch

held = {}  # the open file of each lock that this process holds. A lock lasts as long as its file
without_locks = set()  # paths of locks on file systems that have none
TRIES_PER_SECOND = 5


def close_in_child():
    """Close the locks that a forked child inherits: it may outlive the process that owns them."""
    for file in held.values():
        file.close()
    held.clear()


os.register_at_fork(after_in_child=close_in_child)


def try_to_lock(path: str, owner: str) -> str | None:
    """Lock the file and write `owner` into it, or return what its other owner has written.

    A file that contains `owner` belongs to a different process of the same job, which shares the
    lock. Raises OSError where the file system has no locks.
    """
    if path in held:
        return None
    file = open(path, "a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        holder = Path(path).read_text() or "a job that has not written its name"
        return None if holder == owner else holder
    except OSError:
        file.close()
        raise
    held[path] = file
    file.truncate(0)
    print(owner, end="", file=file, flush=True)
    os.fsync(file.fileno())  # other machines read it
    return None


def name_of_owner() -> str:
    """Return a text by which people and other jobs know this process.

    The random number tells apart the processes of two containers that have one host name.
    """
    since = time.strftime("%F %T")
    return f"process {os.getpid()} of {socket.gethostname()}, since {since}, {os.urandom(4).hex()}"


def unlock(path: str):
    held.pop(path).close()


def all_own(path: str, busy: str, cure: str):
    """Lock the file at `path` until this process ends. If a different job holds it, end all ranks.

    Each machine takes the lock, because its disk may be its own. If the machines share the disk,
    one of them takes it for all. busy and cure: the beginning and the end of the message.
    """
    owner = agree.all_gather(name_of_owner())[0]
    first_here = dist.get_node_local_rank(launch.rank()) == 0
    # Rank 0 writes the snapshot, so it goes first, on whichever machine it is.
    for my_turn in (launch.rank() == 0, launch.rank() != 0 and first_here):
        all_wait_for_lock(path, owner, my_turn, busy, cure)


def all_wait_for_lock(path: str, owner: str, my_turn: bool, busy: str, cure: str):
    """Try until each rank whose turn it is has the lock, or end all ranks.

    The ranks meet after each try: none waits in a collective for longer than --timeout allows.
    """
    tries = 0
    while True:
        mine, patience = try_with_patience(path, owner) if my_turn else (None, 0)
        found = agree.all_gather((patience, mine))
        patience, other = max(found, key=lambda each: each[0])
        if other is None:
            return
        if tries >= TRIES_PER_SECOND * patience:
            problem = f"{busy} ({mine}). Wait until it has ended, or {cure}"
            agree.all_exit_if(problem if mine else None)
        if tries == 2 * TRIES_PER_SECOND and launch.rank() == 0:
            print(f"Waiting up to {patience} s for a job to end: {busy} ({other})")
        tries += 1
        time.sleep(1 / TRIES_PER_SECOND)


def try_with_patience(path: str, owner: str) -> tuple[str | None, int]:
    """Try to lock the file; return its other owner, if any, and how many seconds to wait for it."""
    if path in without_locks:
        return None, 0
    try:
        holder = try_to_lock(path, owner)
    except OSError as error:
        without_locks.add(path)
        print(f"WARNING: {path}: {error.strerror}. A second job that writes here is not noticed")
        return None, 0
    if holder is None:
        return None, 0
    # A job that is leaving needs seconds. After 90 s an NFS server releases the lock of a machine
    # that has vanished.
    return holder, 10 if f" of {socket.gethostname()}, " in holder else 100
