"""Failures: a job that loses a process goes on, or ends soon and says why."""

import os
import re
import signal

import launch
import pytest
import torch
from launch import gone, wait_for

FAILING_ON_RANK_1 = """
import os, signal, sys, time
import multigpu_torchrun as script
def fail(trainer, epoch):
    if epoch == 2 and trainer.rank == 1:
        {failure}
    if epoch == 2:
        time.sleep({pause})
    run_epoch(trainer, epoch)
run_epoch = script.Trainer._run_epoch
script.Trainer._run_epoch = fail
script.main(script.parse_args())
"""
ALL_SCRIPTS_IN_ONE_PROCESS = """
import sys
from pathlib import Path
import torch.distributed as dist
import multigpu, multigpu_torchrun, multinode
def report():
    threads = [task.read_text() for task in Path("/proc/self/task").glob("*/comm")]
    threads = [name for name in threads if "gloo" in name or "tcpstore" in name]
    print("group left behind:", dist.is_initialized(), threads)
sys.argv[1:] = ["1"]
for script in multigpu_torchrun, multinode:
    script.main(script.parse_args())
    report()
store = multigpu.start_store()
multigpu.main(0, 1, store.port, multigpu.parse_args())
del store  # it is the parent's
report()
"""
RANK_0_OF_1 = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}


def test_job_restarts_from_the_snapshot_after_kill_of_each_rank(tmp_path):
    """kill -9 of rank 0, then of rank 1: the job ends well, bitwise where an unbroken one ends."""
    command = launch.torchrun(
        launch.TORCHRUN_SCRIPT, 120, 5, options=("--standalone", "--max-restarts=3")
    )
    no_race = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    job = launch.start(command, tmp_path / "broken", **no_race)
    for rank in 0, 1:
        output = wait_for(
            job,
            # In this attempt, which started with the last of these lines, two saves.
            lambda output, rank=rank: (
                len(launch.pids(output)) == 2 * (rank + 1)
                and output.rpartition("| Pid:")[2].count("snapshot saved") >= 2
            ),
        )
        (*_, pid) = re.findall(rf"Rank: {rank} .* Pid: (\d+)", output)
        os.kill(int(pid), signal.SIGKILL)
    status, output = launch.finish(job)
    assert status == 0, output
    resumed = re.findall(r"Resuming training from snapshot at Epoch (\d+)", output)
    assert len(resumed) == 2 and 10 <= int(resumed[0]) < int(resumed[1]) < 120, output

    launch.run(launch.torchrun(launch.TORCHRUN_SCRIPT, 120, 50), cwd=tmp_path / "unbroken")
    broken, unbroken = (
        {**torch.load(tmp_path / name / "snapshot.pt", weights_only=True), "wandb_id": None}
        for name in ("broken", "unbroken")
    )
    torch.testing.assert_close(broken, unbroken, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("failure", "cause"),
    [
        ("raise ValueError('epoch two is cursed')", "ValueError: epoch two is cursed"),
        pytest.param(
            "os.kill(os.getpid(), signal.SIGKILL)",
            "Signal 9 (SIGKILL) received by PID",
            marks=pytest.mark.long,
        ),
        pytest.param("sys.exit(0)", "Connection closed by peer", marks=pytest.mark.long),
    ],
)
def test_a_lost_rank_ends_the_job_within_seconds(tmp_path, monkeypatch, failure, cause):
    """A rank that raises, is killed or leaves early ends all; torchrun's report has the cause."""
    monkeypatch.setenv("PYTHONPATH", str(launch.ROOT))
    # One that was killed leaves no record of its own: torchrun has to see it before rank 0 does.
    pause = 3 if "kill" in failure else 0
    (tmp_path / "driver.py").write_text(FAILING_ON_RANK_1.format(failure=failure, pause=pause))
    job = launch.start(launch.torchrun("driver.py", 100000, 100000))
    wait_for(job, lambda output: "[CPU0] Epoch 1 |" in output)
    status, output = launch.finish(job, 30)
    assert status == 1, output
    assert gone(launch.pids(output))
    report = output.partition("Root Cause (first observed failure)")[2]
    assert cause in (report if "raise" in failure or "kill" in failure else output), output


def test_kill_of_a_process_of_multigpu_ends_the_others():
    """The parent ends with an exit status that is not 0 and names the signal."""
    job = launch.start(launch.python(launch.MULTI, 100000))
    output = wait_for(job, lambda output: "Epoch 1 |" in output)
    os.kill(launch.pids(output)[0], signal.SIGKILL)
    status, output = launch.finish(job, 30)
    assert status not in (0, None), output
    assert "SIGKILL" in output
    assert gone(launch.pids(output))


@pytest.mark.parametrize(
    "kill",
    [
        pytest.param(os.killpg, id="the group"),
        pytest.param(os.kill, id="the parent only", marks=pytest.mark.long),
    ],
)
def test_ctrl_c_ends_every_process_of_multigpu(kill):
    """Within 10 s, with the exit status of an interrupted command and no traceback."""
    job = launch.start(launch.python(launch.MULTI, 100000))
    wait_for(job, lambda output: "Epoch 1 |" in output)
    kill(job.pid, signal.SIGINT)
    status, output = launch.finish(job, 10)
    assert status == 130, output
    assert gone(launch.pids(output))
    assert "Traceback" not in output


@pytest.mark.parametrize(
    "script", [launch.TORCHRUN_SCRIPT, pytest.param(launch.MULTINODE, marks=pytest.mark.long)]
)
@pytest.mark.parametrize(
    "given", [(), pytest.param(("RANK", "WORLD_SIZE", "MASTER_ADDR"), marks=pytest.mark.long)]
)
def test_started_without_torchrun_says_how_to_start(script, given):
    """One line that names the variables that are missing and the command; exit status 2."""
    output = launch.run(launch.python(script), 30, status=2, **dict.fromkeys(given, "0"))
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    missing = " ".join(name for name in names if name not in given)
    command = f"torchrun --standalone --nproc_per_node=gpu {script}"
    assert output == f"ERROR: {missing} not set. Start with: {command} (no GPU: auto)\n"


@pytest.mark.long
def test_no_process_group_is_left_behind(tmp_path, monkeypatch):
    """Each script ends its group for good: a thread of it that lived on could abort the exit."""
    (tmp_path / "driver.py").write_text(ALL_SCRIPTS_IN_ONE_PROCESS)
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(launch.free_port())}
    output = launch.run(
        launch.python("driver.py"), PYTHONPATH=str(launch.ROOT), **RANK_0_OF_1, **address
    )
    assert output.count("group left behind: False []\n") == 3, output
