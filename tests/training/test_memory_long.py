"""training/memory.py, in runs of train_llm.py: a batch that does not fit, and NaN."""

import re

import launch
import pytest
import torch
from launch import LLM
from llm_runs import LONG, llm, llm_by_torchrun, metrics, newest

OUT_OF_MEMORY = """
import sys
sys.path.insert(0, {root!r})
import torch, train_llm, training.trainer
def fail(trainer, step):
    raise torch.OutOfMemoryError("Tried to allocate 20.00 MiB. GPU 0 has 79.11 GiB")
training.trainer.Trainer._run_step = fail
train_llm.main(train_llm.parse_args())
"""


SMALL_GPU_ON_RANK_1 = """
import sys
sys.path.insert(0, {root!r})
import torch, train_llm, training.trainer
run_batch = train_llm.LanguageModelTrainer._run_batch
def fail(trainer, model, batch, targets_in_step):
    if trainer.rank == 1 and len(batch[0]) > 2:
        raise torch.OutOfMemoryError("Tried to allocate 20.00 MiB")
    return run_batch(trainer, model, batch, targets_in_step)
train_llm.LanguageModelTrainer._run_batch = fail
train_llm.main(train_llm.parse_args())
"""


def test_batch_that_does_not_fit_is_divided_and_the_steps_stay_the_same(local, tmp_path):
    """Where one of two GPUs is too small for 6 sequences and for 3, both take 1, and accumulate."""
    options = ("--batch-size", 6, "--max-steps", 3, "--log-freq", 1)
    (tmp_path / "small.py").write_text(SMALL_GPU_ON_RANK_1.format(root=str(launch.ROOT)))
    command = llm(local, *options, nproc=2)
    launch.run(command + ["--experiment-name", "large"])
    command[command.index(LLM)] = "small.py"
    output = launch.run(command)
    assert "6 sequences do not fit on a GPU. Going on with --batch-size 1 --global" in output
    assert "Global batch size: 1 (batch) x 6 (accumulation) x 2 (processes) = 12" in output
    for name in "train/loss", "validation/loss":
        small, large = (metrics(f"outputs/{folder}", name) for folder in ("default", "large"))
        assert small == pytest.approx(large, rel=1e-5)


def test_a_model_that_does_not_fit_is_told(local, tmp_path):
    """Where not even one sequence fits, no batch size helps."""
    source = SMALL_GPU_ON_RANK_1.replace("len(batch[0]) > 2", "True").replace(
        "rank == 1", "rank == 0"
    )
    (tmp_path / "small.py").write_text(source.format(root=str(launch.ROOT)))
    command = llm(local, "--batch-size", 2)
    command[command.index(LLM)] = "small.py"
    output = launch.run(command, status=2)
    advice = "Try a shorter --seq-length or a smaller model: even one sequence does not fit"
    assert advice in output.splitlines()[-1]


def test_out_of_memory_says_what_to_lower(local, tmp_path):
    """Half the batch with the same global batch makes the same steps: this is told, once."""
    (tmp_path / "full.py").write_text(OUT_OF_MEMORY.format(root=str(launch.ROOT)))
    command = llm_by_torchrun(local, "--batch-size", 6)
    command[command.index(LLM)] = "full.py"
    output = launch.run(command, status=1)
    (error,) = re.findall("^ERROR: .*", output, re.MULTILINE)
    assert "6 sequences of 32 tokens do not fit on rank 0" in error and "79.11 GiB" in error
    assert "Try --batch-size 3 --global-batch-size 12 (the same steps, in more passes)" in error


def test_loss_that_is_not_a_number_stops_the_run(local, tmp_path):
    """The step is named, and the last good snapshot, which stays."""
    output = launch.run(
        llm(local, *LONG, "--batch-size", 6, "--clip-norm", 0, "--max-steps", 5, "--lr", 1e-4),
    )
    good = newest("outputs/default")
    output = launch.run(
        llm(local, *LONG, "--batch-size", 6, "--clip-norm", 0, "--max-steps", 90, "--lr", "1e30"),
        status=2,
    )
    error = output.splitlines()[-1]
    assert re.match(r"ERROR: the gradient of step \d+ is (nan|inf)", error), output
    assert "outputs/default/snapshots/step-00000005.pt" in error
    torch.testing.assert_close(newest("outputs/default"), good, rtol=0, atol=0)
