"""The processes of a job end together, whether torchrun or mp.spawn started them."""

import atexit
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # DDP would import it later, and then it would keep the group alive
import torch.multiprocessing as mp

from plumbing import agree, launch


def require_torchrun():
    """End this process if the launcher's variables are missing, or as soon as torchrun is gone."""
    agree.all_exit_if(launch.wrong_start())
    if unknown := unknown_address(os.environ["MASTER_ADDR"]):
        agree.all_exit_if(unknown if launch.on_one_machine() else None)
        print(f"WARNING: {unknown}", file=sys.stderr)  # a new machine may need longer to be known
    if launch.on_one_machine():
        stay_on_this_machine()
        warn_if_perhaps_one_of_several()
    if dist.is_torchelastic_launched():
        threading.Thread(target=end_with_launcher, args=(find_launcher(),), daemon=True).start()
        atexit.register(leave_last)


def warn_if_perhaps_one_of_several():
    warning = launch.perhaps_one_of_several()
    if warning and launch.number_here() == 0:
        print(warning, file=sys.stderr)


def unknown_address(host: str, seconds: float = 15) -> str | None:
    """Return why the ranks cannot meet at `host`, or None if it can be resolved in that time.

    PyTorch would try until the time-out, and say nothing.
    """
    if can_be_resolved(host, seconds):
        return None
    here = socket.gethostname()
    cure = f"Add it to /etc/hosts of {here}, or give the torchrun of rank 0 --local-addr=ADDRESS"
    return f"{here} does not know the name {host}, where the ranks meet (MASTER_ADDR). {cure}"


def can_be_resolved(host: str, seconds: float) -> bool:
    """Return whether `host` has an address, with a new attempt each second."""
    end = time.monotonic() + seconds

    def resolve():
        while time.monotonic() < end:
            with suppress(OSError, UnicodeError):
                return bool(socket.getaddrinfo(host, None))
            time.sleep(1)

    return bool(answer_within(seconds, resolve))


def answer_within(seconds: float, ask):
    """Return `ask()`, or None if it fails or takes longer, as with a name server that is dead."""
    found = []

    def keep():
        with suppress(OSError, UnicodeError):
            found.append(ask())

    thread = threading.Thread(target=keep, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None


def leave_last():
    """Keep a process that has failed, and with it its connections, for one second.

    Its partners fail when they lose the connection. torchrun names the process with the oldest time
    stamp as the root cause, and its time stamps are whole seconds.
    """
    if hasattr(sys, "last_value"):  # Python sets it to an exception that nobody caught
        time.sleep(1)


def end_with_launcher(launcher: int | None):
    """End this process as soon as torchrun, whose process id is `launcher`, is gone.

    A torchrun that is killed cannot end its processes, which would train on and write into the
    snapshot of the job that is started next.
    """
    while launcher in ancestors():
        time.sleep(1)
    print("ERROR: torchrun is gone, so this process ends. Start the job again", file=sys.stderr)
    os.kill(os.getpid(), signal.SIGTERM)


def find_launcher() -> int | None:
    """Return the process id of the torchrun that started this process, or None if it is gone.

    It need not be the parent, because a wrapper may be between the two. It is an ancestor that has
    loaded torch: whatever adopts the processes of a torchrun that was killed has not. torchrun
    starts each process, or its wrapper, as the first of a new session, so it is above that one.
    """
    found = ancestors()
    no_proc = not has_loaded_torch(os.getpid())  # then this system has no /proc
    # The session's number is 0 or 1 if torchrun is outside of this container. The ancestors end
    # with process 1 if all of them can be seen.
    first_of_session = os.getsid(0)
    if no_proc or first_of_session < 2 or found[-1] > 1:
        return os.getppid()
    place = found.index(first_of_session) + 1 if first_of_session in found else 0
    # A program that starts the processes without torchrun's command makes no session for them.
    return next(filter(has_loaded_torch, found[place:] + found[:place]), None)


def has_loaded_torch(process: int) -> bool:
    try:
        return "libtorch" in Path(f"/proc/{process}/maps").read_text()
    except PermissionError:  # a torchrun of a different user, perhaps, but not the system's init
        return process != 1
    except OSError:  # it has ended, or this is not Linux
        return False


def ancestors() -> list[int]:
    """Return the process ids of the parent, of its parent and so on, as far as they are known."""
    found = [os.getppid()]
    try:
        while found[-1] > 1:
            stat = Path(f"/proc/{found[-1]}/stat").read_text()
            found.append(int(stat.rpartition(")")[2].split()[1]))
    except OSError:
        pass
    return found


def stay_on_this_machine():
    """Let gloo use the loopback interface, which no other machine can reach."""
    names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if names:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", names[0])


@contextmanager
def local_job(processes: int):
    """Yield where the processes of mp.spawn meet: a file that only this user can open.

    When the block is left, for whatever reason, all of them are ended.
    """
    stay_on_this_machine()
    os.environ.pop("LOCAL_RANK", None)  # one that is left in a shell would be that of all of them
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // processes)))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, exit_by_signal)
    # mp.spawn would log each process that it ends because a different one has failed.
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder  # mp.spawn leaves files of its own for errors
        try:
            yield f"file://{folder}/store"
        except mp.ProcessExitedException as end:
            if end.exit_code != 2:
                raise
            sys.exit(2)  # the process has printed why
        finally:
            tempfile.tempdir = None
            end_children()


def take_signals_as_process_1():
    """Let SIGTERM end this process if it is number 1, as in a container that has no init.

    The kernel ignores SIGTERM for process 1 unless that process has a handler, so `docker stop`
    would wait for ten seconds and then kill it.
    """
    if os.getpid() == 1 and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, exit_by_signal)


def exit_by_signal(number, frame):
    sys.exit(128 + number)  # as a shell reports the end of a process by a signal


def end_children():
    """End the processes of mp.spawn within ten seconds. A second Ctrl-C does not interrupt this."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    children = mp.active_children()
    for child in children:  # all of them first, because they may wait for one another
        child.terminate()
    end = time.monotonic() + 10  # one may have a wandb run to finish
    for child in children:
        child.join(max(0, end - time.monotonic()))
        child.kill()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, exit_by_signal)
