"""A job that waits for a lock keeps no rank in a collective for longer than --timeout."""

import fcntl
import re
import socket
import threading
import time

from launch import TORCHRUN_SCRIPT, quickly


def hold(seconds):
    """Hold the lock of snapshot.pt as a job on this host does, and release it in a thread."""
    file = open(".snapshot.pt.lock", "w")  # noqa: SIM115
    file.write(f"process 2 of {socket.gethostname()}, since yesterday, f0f0f0f0")
    file.flush()
    fcntl.flock(file, fcntl.LOCK_EX)
    threading.Thread(target=lambda: time.sleep(seconds) or file.close(), daemon=True).start()


def test_a_job_waits_for_one_that_is_leaving():
    """Longer than the time-out of a collective, and then it trains. It prints for whom it waits."""
    hold(4)
    status, output = quickly(TORCHRUN_SCRIPT, 1, 1, "--timeout", 2, nproc=2)
    assert status == {0} and output.count("] Epoch 0 |") == 2, output
    waiting = r"^Waiting up to 10 s for a job to end: a different job uses \S+/snapshot\.pt \(.*\)$"
    assert len(re.findall(waiting, output, re.MULTILINE)) == 1, output
