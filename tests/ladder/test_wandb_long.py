"""wandb in every script: what each logs, and what goes wrong."""

import os
import signal
import time
from pathlib import Path

import launch
import pytest
import torch
from test_wandb import (
    ALL_SCRIPTS_IN_ONE_PROCESS,
    FOREVER,
    assert_a_signal_finishes,
    assert_finished,
    logged,
    one_process,
    printed,
)
from wandb_files import QUIET, read_runs


@pytest.mark.parametrize("script", [launch.SINGLE, launch.MULTI], ids=["single", "multi"])
def test_one_run_of_a_job(tmp_path, script):
    """From rank 0: its rows are the printed lines, and `epoch` is their x-axis."""
    output = launch.run(launch.python(script, 2, "--wandb", "offline"), **QUIET)
    (run,) = read_runs(tmp_path)
    assert run.x_axes == {"*": "epoch"}
    assert logged(run) == printed(output) and len(run.history) == 2
    assert_finished(tmp_path)


TORCHRUN, MULTINODE = (
    launch.torchrun(script, FOREVER, FOREVER)
    for script in (launch.TORCHRUN_SCRIPT, launch.MULTINODE)
)


OTHERS = {
    "single": (launch.python(launch.SINGLE, FOREVER), signal.SIGTERM, {143}),
    "multi-SIGINT": (launch.python(launch.MULTI, FOREVER), signal.SIGINT, {130}),
    "torchrun": (TORCHRUN, signal.SIGTERM, launch.SIGNALLED),
    "multinode": (MULTINODE, signal.SIGTERM, launch.SIGNALLED, 2),
}


@pytest.mark.parametrize("how", OTHERS.values(), ids=OTHERS)
def test_a_signal_finishes_each_run(tmp_path, how):
    """To whatever was started."""
    assert_a_signal_finishes(tmp_path, *how)


def test_a_run_that_diverges_is_finished(tmp_path):
    """The epochs before are there, of a process that has no time for more."""
    command = launch.python(launch.MULTI, 50, 10, "--batch_size", 1, "--wandb", "offline")
    output = launch.run(command, 100, status=2, **QUIET)
    assert_finished(tmp_path)
    (run,) = read_runs(tmp_path)
    assert logged(run) == printed(output) and len(run.history) >= 1


@pytest.mark.parametrize("script", [launch.TORCHRUN_SCRIPT, launch.MULTINODE])
def test_resumed_job_goes_on_in_its_runs(tmp_path, script):
    """One run from rank 0, or in multinode.py one of each rank in one group; same ids later."""
    ranks = [0, 1] if script == launch.MULTINODE else [0]
    histories = []
    for total in 1, 3:
        output = launch.run(launch.torchrun(script, total, "--wandb", "offline"), **QUIET)
        histories.append([printed(output, rank) for rank in ranks])
    runs = read_runs(tmp_path)
    assert len(runs) == 2 * len(ranks)
    job_id = torch.load("snapshot.pt", weights_only=True)["job_id"]
    ids = [f"{job_id}-{rank}" for rank in ranks] if len(ranks) > 1 else [job_id]
    for job, history in enumerate(histories):
        of_job = sorted(runs[job * len(ranks) : (job + 1) * len(ranks)])
        assert [run.id for run in of_job] == ids
        assert [logged(run) for run in of_job] == history
        for run in of_job:
            assert run.x_axes == {"*": "epoch"}
            assert run.group == (job_id if len(ranks) > 1 else "")
    assert [[epoch for epoch, _ in history[0]] for history in histories] == [[0], [1, 2]]


def test_broken_wandb_does_not_end_training(tmp_path):
    """A wandb that cannot be imported costs a line."""
    Path("broken").mkdir()
    Path("broken/wandb.py").write_text("raise RuntimeError('this wandb is broken')")
    Path("driver.py").write_text(ALL_SCRIPTS_IN_ONE_PROCESS)
    env = one_process() | {"PYTHONPATH": f"{tmp_path / 'broken'}:{launch.ROOT}"}
    output = launch.run(launch.forked("driver.py", 1, "--wandb", "offline"), **env)
    assert output.count("Training continues without wandb: this wandb is broken\n") == 4
    assert len(printed(output)) == 3  # multinode.py finds the snapshot of one epoch


def test_wandb_without_account_and_network_does_not_end_training(tmp_path):
    """`--wandb online` costs a line, and little time."""
    nowhere = {"WANDB_BASE_URL": "http://127.0.0.1:9", "HOME": str(tmp_path), "WANDB_API_KEY": ""}
    output = launch.run(
        launch.python(launch.SINGLE, 1, "--wandb", "online"), 120, **nowhere, **QUIET
    )
    assert "Training continues without wandb: " in output
    assert len(printed(output)) == 1


def test_killed_wandb_service_does_not_end_training(tmp_path):
    """The service process of wandb dies in mid-run: all epochs are trained, exit status 0."""
    job = launch.start(launch.python(launch.SINGLE, 300, "--wandb", "offline"), **QUIET)
    while "Epoch 1 |" not in job.log.read_text() and job.poll() is None:
        time.sleep(0.02)
    (service,) = children(job.pid, "wandb-core")
    os.kill(service, signal.SIGKILL)
    status, output = launch.finish(job)
    assert status == 0, output
    assert [epoch for epoch, _ in printed(output)] == list(range(300))


def children(parent, name):
    """The pids of the processes called `name` that `parent` started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            before, _, after = stat.read_text().rpartition(")")
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended in the meantime
        if before.partition("(")[2] == name and int(after.split()[1]) == parent:
            found.append(int(stat.parent.name))
    return found
