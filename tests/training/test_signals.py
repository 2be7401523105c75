"""training/signals.py, in runs of train_llm.py: a job that is told to go saves first."""

import os
import re
import signal
import time

import launch
import pytest
from launch import gone, wait_for
from llm_runs import LONG, llm, metrics


def test_a_signal_leaves_a_snapshot_of_the_step_and_no_process(stopped_run):
    """SIGTERM to the launcher: all ranks end, and all is saved."""
    folder, status, output, processes = stopped_run
    assert status == 1  # torchrun's own, whatever the processes say
    (step,) = re.findall(r"SIGTERM: saved at step (\d+), leaving", output)
    assert (folder / f"snapshots/step-{int(step):08}.pt").exists() and int(step) >= 57
    assert max(metrics(folder, "train/loss")) == int(step)
    assert len(processes) == 2, "two ranks"
    assert gone(processes)


@pytest.mark.long
def test_a_second_signal_and_the_status_of_the_first(local, tmp_path):
    """Without a launcher the status says the signal, as a shell would: 128 + 10."""
    job = launch.start(llm(local, *LONG, "--batch-size", 6))
    wait_for(job, lambda output: "Step 3/" in output)
    job.send_signal(signal.SIGUSR1)
    status, output = launch.finish(job, 20)
    assert status == 128 + signal.SIGUSR1 and "SIGUSR1: saved at step" in output, output
    assert "Traceback" not in output

    job = launch.start(llm(local, *LONG, "--batch-size", 6, "--max-steps", 10**6))
    wait_for(job, lambda output: "Resuming" in output and "Step 20/" in output)
    job.send_signal(signal.SIGSTOP)  # so that it cannot be faster than the second signal
    job.send_signal(signal.SIGTERM)
    job.send_signal(signal.SIGTERM)
    job.send_signal(signal.SIGCONT)
    status, output = launch.finish(job, 20)
    assert status == 128 + signal.SIGTERM and "SIGTERM: saved at step" in output, "two at once"


@pytest.mark.long
def test_a_second_signal_leaves_at_once(local, tmp_path):
    """Where another rank hangs, so that the step does not end, the second signal ends this one."""
    job = launch.start(llm(local, *LONG, "--max-steps", 10**6, nproc=2))
    output = wait_for(job, lambda output: "Step 3/" in output)
    this, other = launch.pids(output)
    os.kill(other, signal.SIGSTOP)
    os.kill(this, signal.SIGTERM)
    time.sleep(4)
    assert launch.alive(this)
    os.kill(this, signal.SIGTERM)
    assert gone([this], 1)
    os.kill(other, signal.SIGCONT)
    launch.finish(job, 40)
