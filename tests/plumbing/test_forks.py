"""Nothing of ours passes to a forked child: no signal handler, no pipe, no lock."""

import multiprocessing
import os
import signal
import threading
import time
from multiprocessing.pool import Pool

import pytest
from launch import gone, in_processes

from plumbing import locks, signals

FORK = multiprocessing.get_context("fork")
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def square(number):
    return number * number


def evaluate():
    """What a reader's evaluation may do: a pool of workers, which it ends by SIGTERM."""
    with Pool(2, context=FORK) as pool:
        assert pool.map(square, range(4)) == [0, 1, 4, 9]


def in_a_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()


def listening(rank, init_method, folder):
    """Children that are ended are no signal for this process; its own are heard still."""
    heard = []
    listener = signals.Listener(SIGNALS, heard.append)
    listener.start()
    for _ in range(5):
        evaluate()
    in_a_thread(evaluate)  # as where a training loop runs in a thread
    for _ in range(20):  # as soon as a child is there
        child = FORK.Process(target=time.sleep, args=(60,))
        child.start()
        child.terminate()
        child.join(10)
        assert child.exitcode == -signal.SIGTERM
    time.sleep(0.3)
    assert heard == []
    for number in SIGNALS:
        os.kill(os.getpid(), number)
        time.sleep(0.3)
    assert heard == list(SIGNALS)
    listener.stop()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    evaluate()


def test_a_signal_to_a_child_is_none_to_the_job(tmp_path):
    in_processes(1, listening, tmp_path)


def dying_owner(rank, init_method, folder):
    """Lock a file, start a worker that is slow, and die without a word."""
    path = str(folder / "lock")
    assert locks.try_to_lock(path, "the owner") is None
    worker = FORK.Process(target=time.sleep, args=(60,))
    worker.start()
    (folder / "pid").write_text(str(worker.pid))
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_outlives_its_process_keeps_no_lock(tmp_path):
    """The job that is started next need not wait for it."""
    with pytest.raises(Exception, match="SIGKILL"):
        in_processes(1, dying_owner, tmp_path)
    worker = int((tmp_path / "pid").read_text())
    os.kill(worker, 0)  # it lives
    path = str(tmp_path / "lock")
    assert locks.try_to_lock(path, "the next") is None
    locks.unlock(path)
    os.kill(worker, signal.SIGKILL)
    assert gone([worker])
