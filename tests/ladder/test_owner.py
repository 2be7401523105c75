"""A snapshot has one owner: a second job with the same path is told who, and loses nothing."""

import errno
import fcntl
import os
import socket
from pathlib import Path

import pytest

import plumbing

JOB = "process 1 of here, since 2026-11-29 12:00:00, 0f0f0f0f"


@pytest.fixture
def lock(tmp_path, monkeypatch):
    """The path of a lock file, and no waiting."""
    monkeypatch.setattr(plumbing.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(plumbing, "locks", {})
    return str(tmp_path / ".snapshot.pt.lock")


def test_the_holder_is_known_and_gone_with_its_lock(lock):
    """Who has it stays in the file after its end, and keeps nobody out."""
    other = open(lock, "w")  # noqa: SIM115
    other.write("process 2 of there")
    other.flush()
    fcntl.flock(other, fcntl.LOCK_EX)
    assert plumbing.holder_of(lock, JOB) == "process 2 of there"
    other.truncate(0)  # its disk was full
    assert plumbing.holder_of(lock, JOB) == "it has not said who it is"
    other.close()
    assert plumbing.holder_of(lock, JOB) is None
    assert Path(lock).read_text() == JOB
    assert plumbing.holder_of(lock, JOB) is None, "it is this process's own"


@pytest.mark.parametrize("host, seconds", [(socket.gethostname(), 10), ("there", 100)])
def test_how_long_a_job_that_is_leaving_is_waited_for(lock, monkeypatch, host, seconds):
    """An NFS server keeps the lock of a machine that has vanished for 90 s."""
    waited = []
    monkeypatch.setattr(plumbing.time, "sleep", waited.append)
    other = open(lock, "w")  # noqa: SIM115
    other.write(f"process 2 of {host}, since 2026-11-29 12:00:00, f0f0f0f0")
    other.flush()
    fcntl.flock(other, fcntl.LOCK_EX)
    assert plumbing.holder_of(lock, JOB)
    assert sum(waited) == pytest.approx(seconds, abs=1)


def test_a_machine_of_the_same_job_may_have_it(lock):
    """On a disk that the machines share only one of them can."""
    other = open(lock, "w")  # noqa: SIM115
    other.write(JOB)
    other.flush()
    fcntl.flock(other, fcntl.LOCK_EX)
    assert plumbing.holder_of(lock, JOB) is None


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK])
def test_a_disk_without_locks_is_told(lock, monkeypatch, capsys, number):
    """No such one is at hand, so that answer of the kernel is made here."""

    def flock(file, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    assert plumbing.holder_of(lock, JOB) is None
    warning = f"WARNING: {lock}: {os.strerror(number)}: cannot tell if another job writes here\n"
    assert capsys.readouterr().out == warning
