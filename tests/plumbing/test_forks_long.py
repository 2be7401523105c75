"""A reader's evaluation with a pool of processes, in a run that logs to wandb."""

import os
import signal

import pytest
from launch import (
    ROOT,
    SIGNALLED,
    TORCHRUN_SCRIPT,
    edited,
    finish,
    gone,
    pids,
    run,
    start,
    torchrun,
    wait_for,
)

POOL = (
    "        plumbing.report(epoch, loss, self.train_data)",
    # In the first epoch alone: Python before 3.12 can hang in os.fork() where threads start or end.
    "        if epoch == 0:\n"
    "            with multiprocessing.get_context('fork').Pool(1) as pool:\n"
    "                assert pool.map(abs, range(4)) == [0, 1, 2, 3]\n"
    "        plumbing.report(epoch, loss, self.train_data)",
)
IMPORT = ("import os\n", "import multiprocessing\nimport os\n")
OFFLINE = ("--wandb", "offline")


@pytest.fixture
def own(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return edited(TORCHRUN_SCRIPT, "own.py", IMPORT, POOL)


def test_the_end_of_a_pool_is_not_the_end_of_the_job(own):
    output = run(torchrun(own, 8, 8, *OFFLINE), 120)
    assert output.count("] Epoch 7 |") == 2 and "snapshot saved" in output


def test_sigterm_still_ends_it(own):
    job = start(torchrun(own, 10**5, 10**5, *OFFLINE))
    wait_for(job, lambda output: "[rank 0] Epoch 3 |" in output)
    os.kill(job.pid, signal.SIGTERM)
    status, output = finish(job, 60)
    assert status in SIGNALLED and gone(pids(output)), output
