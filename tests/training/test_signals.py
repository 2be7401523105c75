"""training/signals.py, in runs of train_llm.py: a job that is told to go saves first."""

import re

import launch
from launch import gone
from llm_runs import metrics


def test_a_signal_leaves_a_snapshot_of_the_step_and_no_process(stopped_run):
    """SIGTERM to the launcher: all ranks end, and all is saved."""
    folder, status, output, processes = stopped_run
    assert status in launch.SIGNALLED
    (step,) = re.findall(r"SIGTERM: saved at step (\d+), leaving", output)
    assert (folder / f"snapshots/step-{int(step):08}.pt").exists() and int(step) >= 57
    assert max(metrics(folder, "train/loss")) == int(step)
    assert len(processes) == 2, "two ranks"
    assert gone(processes)
