"""training/signals.py, in runs of train_llm.py: two signals, and signals in an evaluation."""

import os
import signal
import time
from pathlib import Path

import launch
import pytest
from launch import gone, wait_for
from llm_runs import LONG, llm, llm_by_torchrun, metrics
from wandb_files import QUIET, read_runs


def test_a_second_signal_and_the_status_of_the_first(local, tmp_path):
    """Without a launcher the status says the signal, as a shell would: 128 + 10."""
    job = launch.start(list(llm(local, *LONG, "--batch-size", 6, "--wandb", "offline")), **QUIET)
    wait_for(job, lambda output: "Step 3/" in output)
    job.send_signal(signal.SIGUSR1)
    status, output = launch.finish(job)
    (run,) = read_runs(Path("outputs/default"))  # it was finished: all that was logged is there
    logged = {row["global_step"] for row in run.history if "train/loss" in row}
    assert logged == set(metrics("outputs/default", "train/loss")) and len(logged) >= 3
    assert status == 128 + signal.SIGUSR1 and "SIGUSR1: saved at step" in output, output
    assert "Traceback" not in output

    job = launch.start(llm(local, *LONG, "--batch-size", 6, "--max-steps", 10**6))
    wait_for(job, lambda output: "Resuming" in output and "Step 20/" in output)
    job.send_signal(signal.SIGSTOP)  # so that it cannot be faster than the second signal
    job.send_signal(signal.SIGTERM)
    job.send_signal(signal.SIGTERM)
    job.send_signal(signal.SIGCONT)
    status, output = launch.finish(job)
    assert status == 128 + signal.SIGTERM and "SIGTERM: saved at step" in output, "two at once"


def test_a_second_signal_leaves_at_once(local, tmp_path):
    """Where another rank hangs, so that the step does not end, the second signal ends this one."""
    job = launch.start(llm_by_torchrun(local, *LONG, "--max-steps", 10**6))
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


SLOW_EVALUATION = """
import sys
sys.path.insert(0, {root!r})
import time, torch, train_llm
run_batch = train_llm.LanguageModelTrainer._run_batch
def slow(trainer, model, batch, targets_in_step):
    if not torch.is_grad_enabled():
        print("evaluating", flush=True)
        time.sleep(0.5)
    return run_batch(trainer, model, batch, targets_in_step)
train_llm.LanguageModelTrainer._run_batch = slow
train_llm.main(train_llm.parse_args())
"""


@pytest.mark.parametrize("everybody", [True, False])
def test_an_evaluation_is_stopped_and_made_up_for(local, tmp_path, everybody):
    """A signal in an evaluation of minutes: saved and gone in seconds; the next run evaluates.

    It may come to one rank of two only, and to a step whose loss was not told yet.
    """
    (tmp_path / "long.txt").write_text((local / "text.txt").read_text() * 5)
    (tmp_path / "slow.py").write_text(SLOW_EVALUATION.format(root=str(launch.ROOT)))
    options = ("--dataset-name", "long.txt", "--batch-size", 1, "--max-steps", 8)
    options += ("--eval-freq", 5, "--log-freq", 4, "--ckpt-freq", 8)
    command = llm(local, *options, nproc=2)
    expected = launch.run(command + ["--experiment-name", "unbroken"])
    command[command.index(launch.LLM)] = "slow.py"
    job = launch.start(command)
    output = wait_for(job, lambda output: output.count("evaluating") > 4)
    begin = time.monotonic()
    if everybody:
        job.send_signal(signal.SIGTERM)
    else:
        os.kill(launch.pids(output)[1], signal.SIGTERM)
    status, output = launch.finish(job)
    assert time.monotonic() - begin < 10 and "SIGTERM: saved at step 5, leaving" in output, output
    assert "Traceback" not in output.partition("leaving")[0]
    command[command.index("slow.py")] = launch.LLM
    output = launch.run(command)
    assert output.index("Step 5/8 | Validation") < output.index("Step 8/8 | Loss")
    for name in "validation/loss", "train/lr":
        found = metrics("outputs/default", name)
        unbroken = metrics("outputs/unbroken", name)
        assert {step: found[step] for step in unbroken} == unbroken, (expected, output)
