"""A snapshot has one owner: a second job with the same path is told who, and loses nothing."""

import errno
import fcntl
import os
import socket
from pathlib import Path

import pytest

from plumbing import locks

JOB = "process 1 of here, since 2026-11-29 12:00:00, 0f0f0f0f"


@pytest.fixture
def lock(tmp_path, monkeypatch):
    """The path of a lock file."""
    monkeypatch.setattr(locks, "held", {})
    return str(tmp_path / ".snapshot.pt.lock")


def held_by(owner, lock):
    """The file, which a different job of that name holds until it is closed."""
    file = open(lock, "w")
    file.write(owner)
    file.flush()
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


def test_the_holder_is_known_and_gone_with_its_lock(lock):
    """Its name stays in the file after its end, and keeps nobody out."""
    other = held_by("process 2 of there", lock)
    assert locks.try_to_lock(lock, JOB) == "process 2 of there"
    assert Path(lock).read_text() == "process 2 of there"
    other.truncate(0)  # its disk was full
    assert locks.try_to_lock(lock, JOB) == "a job that has not written its name"
    other.close()
    assert locks.try_to_lock(lock, JOB) is None
    assert Path(lock).read_text() == JOB
    assert locks.try_to_lock(lock, JOB) is None, "it is this process's own"
    with open(lock) as third, pytest.raises(BlockingIOError):
        fcntl.flock(third, fcntl.LOCK_EX | fcntl.LOCK_NB)
    locks.unlock(lock)
    held_by("the next", lock).close()


@pytest.mark.parametrize("host, seconds", [(socket.gethostname(), 10), ("there", 100)])
def test_how_long_a_job_that_is_leaving_is_waited_for(
    alone, lock, monkeypatch, capsys, host, seconds
):
    """An NFS server keeps the lock of a machine that has vanished for 90 s.

    A line says what is waited for, once, and not of a job that leaves within 2 s.
    """
    waited, printed_after = [], []

    def sleep(time):
        waited.append(time)
        if capsys.readouterr().out:
            printed_after.append(sum(waited))

    monkeypatch.setattr(locks.time, "sleep", sleep)
    holder = f"process 2 of {host}, since 2026-11-29 12:00:00, f0f0f0f0"
    with held_by(holder, lock), pytest.raises(SystemExit) as end:
        locks.all_wait_for_lock(lock, JOB, True, "a different job uses it", "do something else")
    assert end.value.code == 2
    line = f"a different job uses it ({holder}). Wait until it has ended, or do something else"
    assert capsys.readouterr().err == f"ERROR: {line}\n"
    assert sum(waited) == pytest.approx(seconds, abs=1)
    assert len(waited) > seconds, "each second the ranks meet, or --timeout would end them"
    assert printed_after == [pytest.approx(2, abs=0.5)]


def test_a_job_that_leaves_is_followed(alone, lock, monkeypatch, capsys):
    """Without a line, if that takes no 2 s."""
    waited = []
    other = held_by(f"process 2 of {socket.gethostname()}, since today", lock)
    monkeypatch.setattr(
        locks.time, "sleep", lambda time: waited.append(time) or len(waited) == 5 and other.close()
    )
    locks.all_wait_for_lock(lock, JOB, True, "a different job uses it", "do something else")
    assert len(waited) == 5 and Path(lock).read_text() == JOB
    assert capsys.readouterr() == ("", "")


def test_a_machine_of_the_same_job_may_have_it(lock):
    """On a disk that the machines share only one of them can."""
    with held_by(JOB, lock):
        assert locks.try_to_lock(lock, JOB) is None


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK])
def test_a_disk_without_locks_is_told(alone, lock, monkeypatch, capsys, number):
    """No such one is at hand, so that answer of the kernel is made here."""

    def flock(file, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    locks.all_wait_for_lock(lock, JOB, True, "a different job uses it", "do something else")
    warning = (
        f"WARNING: {lock}: {os.strerror(number)}. A second job that writes here is not noticed\n"
    )
    assert capsys.readouterr().out == warning
