"""Failures: a job that loses a process goes on, or ends soon and says why."""

import os
import re
import signal
from contextlib import suppress
from pathlib import Path

import launch
import pytest
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


FOREVER = 100000


def test_job_restarts_from_the_snapshot_after_kill_of_each_rank(tmp_path):
    """kill -9 of rank 0, then of rank 1: the job ends well, bitwise where an unbroken one ends."""
    command = launch.torchrun(
        launch.TORCHRUN_SCRIPT, 60, 5, options=("--standalone", "--max-restarts=3")
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
    assert len(resumed) == 2 and 10 <= int(resumed[0]) < int(resumed[1]) < 60, output

    unbroken = tmp_path / "unbroken"
    status, output = launch.quickly(launch.TORCHRUN_SCRIPT, 60, 50, nproc=2, cwd=unbroken)
    assert status == {0}, output
    launch.assert_same(tmp_path / "broken" / "snapshot.pt", unbroken / "snapshot.pt")


def test_a_lost_rank_ends_the_job_within_seconds(tmp_path, monkeypatch):
    """A rank that raises ends all; torchrun's report has the cause."""
    failure, cause = "raise ValueError('epoch two is cursed')", "ValueError: epoch two is cursed"
    assert_lost_rank_ends_the_job(tmp_path, monkeypatch, failure, cause)


def assert_lost_rank_ends_the_job(tmp_path, monkeypatch, failure, cause):
    monkeypatch.setenv("PYTHONPATH", str(launch.ROOT))
    # One that was killed leaves no record of its own: torchrun has to see it before rank 0 does.
    pause = 3 if "kill" in failure else 0
    (tmp_path / "driver.py").write_text(FAILING_ON_RANK_1.format(failure=failure, pause=pause))
    job = launch.start(launch.torchrun("driver.py", 100000, 100000))
    wait_for(job, lambda output: "[rank 0] Epoch 1 |" in output)
    status, output = launch.finish(job, 30)
    assert status == 1, output
    assert gone(launch.pids(output))
    report = output.partition("Root Cause (first observed failure)")[2]
    assert cause in (report if "raise" in failure or "kill" in failure else output), output


def test_kill_of_a_process_of_multigpu_ends_the_others(multigpu):
    """The parent ends with an exit status that is not 0 and names the signal."""
    start, end = multigpu
    job = start()
    output = wait_for(job, lambda output: "Epoch 1 |" in output)
    os.kill(launch.pids(output)[0], signal.SIGKILL)
    status, output = end(job)
    assert status == 1, output
    assert "SIGKILL" in output


@pytest.mark.parametrize(
    ("number", "to", "status"),
    [(signal.SIGINT, os.killpg, 130), (signal.SIGTERM, os.kill, 143)],
    ids=["Ctrl-C", "SIGTERM"],
)
def test_a_signal_ends_every_process_of_multigpu(multigpu, monkeypatch, number, to, status):
    """Within 10 s, with the exit status of such an end, and nothing else in its output."""
    assert_ends_by_signal(multigpu, monkeypatch, number, to, status)


def assert_ends_by_signal(multigpu, monkeypatch, number, to, status):
    start, end = multigpu
    monkeypatch.delenv("OMP_NUM_THREADS")
    job = start()
    output = wait_for(job, lambda output: "Epoch 1 |" in output)
    variables = [Path(f"/proc/{pid}/environ").read_text() for pid in launch.pids(output)]
    to(job.pid, number)
    ended, output = end(job, 10)
    assert ended == status, output
    assert all("OMP_NUM_THREADS=" in each for each in variables), "they share the cores"
    forms = r"Rank: .*|Global batch size: 64|\[rank \d\] Epoch .*|Epoch \d+ \| Training chec.*"
    assert [line for line in output.splitlines() if not re.fullmatch(forms, line)] == []


def workers(launcher):
    """The processes of a torchrun that have begun to import torch."""
    found = []
    for pid in map(int, re.findall(r"\d+", children_of(launcher))):
        with suppress(FileNotFoundError, ProcessLookupError):
            if "libtorch_python" in Path(f"/proc/{pid}/maps").read_text():
                found.append(pid)
    return found


def children_of(pid):
    return "".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children"))


def test_processes_end_with_a_torchrun_that_is_killed():
    """Nobody tells them: within 10 s they find that it is gone."""
    assert_processes_end_with_torchrun("while they import torch")


def assert_processes_end_with_torchrun(when):
    job = launch.start(launch.torchrun(launch.TORCHRUN_SCRIPT, FOREVER, FOREVER))
    if when == "in training":
        wait_for(job, lambda output: "[rank 0] Epoch 1 |" in output)
    else:
        wait_for(job, lambda output: len(workers(job.pid)) == 2)
    found = workers(job.pid)
    os.kill(job.pid, signal.SIGKILL)
    job.wait()
    ended, output = gone(found), job.log.read_text()
    assert len(found) == 2 and ended, output
    assert ("Rank: " in output) == (when == "in training"), "else this shows something else"


@pytest.mark.parametrize("script", [launch.TORCHRUN_SCRIPT, launch.MULTINODE])
@pytest.mark.parametrize("given", [(), ("RANK", "WORLD_SIZE", "MASTER_ADDR")])
def test_started_without_torchrun_says_how_to_start(script, given):
    """One line that names the variables that are missing and the command; exit status 2."""
    output = launch.run(launch.forked(script), 30, status=2, **dict.fromkeys(given, "0"))
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    missing = " ".join(name for name in names if name not in given)
    command = f"torchrun --standalone --nproc_per_node=gpu {script}"
    assert output == f"ERROR: {missing} not set. Start with: {command} (no GPU: 2)\n"
