"""Failures of every kind, of every rank, and of the launcher."""

import os
import signal

import launch
import pytest
from test_failures import (
    assert_ends_by_signal,
    assert_lost_rank_ends_the_job,
    assert_processes_end_with_torchrun,
)

ALL_SCRIPTS_IN_ONE_PROCESS = """
import sys
from pathlib import Path
import torch.distributed as dist
import multigpu, multigpu_torchrun, multinode, plumbing
def report():
    threads = [task.read_text() for task in Path("/proc/self/task").glob("*/comm")]
    threads = [name for name in threads if "gloo" in name or "tcpstore" in name]
    print("group left behind:", dist.is_initialized(), threads)
sys.argv[1:] = ["1"]
for script in multigpu_torchrun, multinode:
    script.main(script.parse_args())
    report()
with plumbing.local_job(1) as init_method:
    multigpu.main(0, 1, init_method, multigpu.parse_args())
report()
"""


@pytest.mark.parametrize(
    ("failure", "cause"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "Signal 9 (SIGKILL) received by PID"),
        ("sys.exit(0)", "Connection closed by peer"),
    ],
)
def test_a_rank_that_is_killed_or_leaves_ends_the_job(tmp_path, monkeypatch, failure, cause):
    assert_lost_rank_ends_the_job(tmp_path, monkeypatch, failure, cause)


def test_an_error_in_a_process_of_multigpu_ends_the_others(multigpu):
    """The parent ends with exit status 1 and shows the traceback of the process that failed.

    Rank 0 is slow here. Otherwise, on a busy machine, the parent may see first that it has failed
    too, since its partner is gone, and mp.spawn shows one traceback only."""
    start, end = multigpu
    failure = "plumbing.report(epoch, loss, 1 / (1 - self.rank) and self.train_data)"
    report = "plumbing.report(epoch, loss, self.train_data)"
    slow = f"{failure}\n        __import__('time').sleep(5)"
    status, output = end(start(launch.edited(launch.MULTI, "own.py", (report, slow))), 60)
    assert status == 1, output
    assert output.rstrip().endswith("ZeroDivisionError: division by zero") and failure in output


@pytest.mark.parametrize(
    ("number", "to", "status"),
    [(signal.SIGINT, os.kill, 130), (signal.SIGTERM, os.killpg, 143)],
    ids=["SIGINT to the parent only", "SIGTERM to all"],
)
def test_a_signal_to_some_ends_every_process_of_multigpu(multigpu, monkeypatch, number, to, status):
    assert_ends_by_signal(multigpu, monkeypatch, number, to, status)


def test_processes_end_with_a_torchrun_that_is_killed_in_training():
    assert_processes_end_with_torchrun("in training")


def test_no_process_group_is_left_behind(tmp_path, monkeypatch):
    """Each script ends its group for good: a thread of it that lived on could abort the exit."""
    (tmp_path / "driver.py").write_text(ALL_SCRIPTS_IN_ONE_PROCESS)
    env = launch.alone() | {"PYTHONPATH": str(launch.ROOT)}
    output = launch.run(launch.forked("driver.py"), **env)
    assert output.count("group left behind: False []\n") == 3, output
