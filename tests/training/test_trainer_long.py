"""training/trainer.py, in runs of train_llm.py: a step as plain autograd and AdamW have it."""

import math
import os
import re

import launch
import pytest
import torch
from llm_runs import llm, metrics, newest
from transformers import AutoModelForCausalLM, GPT2Config

from llm.model import load_tokenizer
from training.sampler import StepSampler


@pytest.fixture
def oracle(local, tmp_path):
    """What plain autograd says on tiny GPT-2's first weights: f(training set?, indices)."""
    (tmp_path / "text.txt").write_text((local / "text.txt").read_text()[: 32 * 140])
    text = (tmp_path / "text.txt").read_text()
    tokens = torch.tensor([*load_tokenizer("bytes")(text)["input_ids"], 256])
    order = torch.randperm(140, generator=torch.Generator().manual_seed(0))
    config = GPT2Config.from_pretrained(local / "gpt2", resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)

    def loss_and_gradient(held_out, indices, fresh=False):
        if fresh or not hasattr(loss_and_gradient, "model"):
            torch.manual_seed(0)
            loss_and_gradient.model = AutoModelForCausalLM.from_config(config)
        model = loss_and_gradient.model
        sequences = (order[:7] if held_out else order[7:]).sort().values[indices]
        rows = torch.stack([tokens[32 * i : 32 * i + 33] for i in sequences.tolist()])
        logits = model(rows[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        model.zero_grad()
        loss.backward()
        return loss.item(), {name: each.grad.clone() for name, each in model.named_parameters()}

    return loss_and_gradient


def gradients(folder, steps):
    """The gradient of the last of `steps`, from what it added to AdamW's mean of gradients."""
    before, after = (
        torch.load(folder / f"snapshots/step-{step:08}.pt", weights_only=True) for step in steps
    )
    added = {
        index: (after["optimizer"]["state"][index]["exp_avg"] - 0.9 * state["exp_avg"]) / 0.1
        for index, state in before["optimizer"]["state"].items()
    }
    shapes = {
        name: tensor.dim() for name, tensor in after["model"].items() if "lm_head" not in name
    }
    # The optimizer counts matrices first, then vectors.
    names = [name for name in shapes if shapes[name] >= 2]
    names += [name for name in shapes if shapes[name] < 2]
    return {name: added[index][:257] for index, name in enumerate(names)}


def test_gradient_and_evaluation_do_not_depend_on_how_a_step_is_cut(local, tmp_path, oracle):
    """One batch, accumulated batches, two and three ranks: as plain autograd on the whole.

    133 sequences make steps of 66, 66 and 1: in the third, two of three ranks have none. Of the 7
    that are held out, each counts once.
    """
    options = ["--max-steps", 3, "--lr", 0, "--clip-norm", 0, "--ckpt-freq", 1]
    options += ["--global-batch-size", 66, "--log-freq", 1, "--dtype", "float32"]
    for name, nproc, batch_size in [
        ("whole", 1, 66),
        ("accumulated", 1, 22),
        ("two", 2, 11),
        ("three", 3, 11),
    ]:
        options += ["--experiment-name", name, "--batch-size", batch_size]
        enough_cpus = nproc <= len(os.sched_getaffinity(0))
        bind = ["--bind-cpus"] if enough_cpus else []
        output = launch.run(llm(tmp_path, *options, *bind, nproc=nproc, model=local / "gpt2"))
        masks = re.findall(r"^Rank \d \| cpu \| Bound to CPUs (0x\w+), of ", output, re.MULTILINE)
        assert len({*masks}) == (nproc if bind else 0), output
        assert f"x {66 // batch_size // nproc} (accumulation)" in output
        folder = tmp_path / "outputs" / name
        sampler = StepSampler(133, batch_size, 66, seed=0)
        for step in 0, 1, 2:
            loss, gradient = oracle(False, sampler.samples(step))
            assert metrics(folder, "train/loss")[step + 1] == pytest.approx(loss, rel=1e-5)
        torch.testing.assert_close(gradients(folder, (2, 3)), gradient, rtol=1e-4, atol=1e-7)
        loss, _ = oracle(True, torch.arange(7))
        assert metrics(folder, "validation/loss")[3] == pytest.approx(loss, rel=1e-6)


def test_a_step_is_that_of_adamw_with_clipping_and_a_schedule(local, tmp_path, oracle):
    """Norm before clipping, decay of matrices only, a linear rise and a cosine to a tenth.

    And where dropout is on, it is off in the evaluation.
    """
    options = ["--batch-size", 66, "--log-freq", 1, "--ckpt-freq", 1, "--lr", "1e-2"]
    options += ["--max-steps", 8, "--warmup-steps", 4, "--weight-decay", 0.5, "--clip-norm", 0.25]
    launch.run(llm(tmp_path, *options, model=local / "gpt2"))
    rates = list(metrics("outputs/default", "train/lr").values())
    cosine = [1 + math.cos(math.pi * step / 4) for step in range(4)]
    expected = [0.0025, 0.005, 0.0075, 0.01, *(0.01 * (0.1 + 0.45 * part) for part in cosine)]
    assert rates == pytest.approx(expected)

    options[options.index(8)] = 1  # the first step alone, at the highest rate
    options[options.index(4)] = 0
    launch.run(llm(tmp_path, *options, "--experiment-name", "one", model=local / "gpt2"))
    sampler = StepSampler(133, 66, 66, seed=0)
    _, gradient = oracle(False, sampler.samples(0))
    norm = torch.stack([each.norm() for each in gradient.values()]).norm().item()
    assert norm > 0.5 and metrics("outputs/one", "train/grad_norm")[1] == pytest.approx(norm, 1e-4)
    model, reference = newest("outputs/one")["model"], oracle.model
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in reference.parameters() if p.dim() > 1], "weight_decay": 0.5},
            {"params": [p for p in reference.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=1e-2,
        betas=(0.9, 0.95),
    )
    torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.25)
    optimizer.step()
    for name, parameter in reference.named_parameters():
        # Where a gradient is all but zero, its sign is a matter of rounding, and so is the step.
        sure = gradient[name].abs() > 1e-6
        found = model[name][: len(parameter)]
        torch.testing.assert_close(found[sure], parameter[sure].detach(), rtol=0, atol=1e-4)

    options += ["--experiment-name", "dropout", "--dropout", 0.5, "--lr", 0]
    launch.run(llm(tmp_path, *options, model=local / "gpt2"))
    loss, _ = oracle(True, torch.arange(7), fresh=True)
    assert metrics("outputs/dropout", "validation/loss")[1] == pytest.approx(loss, rel=1e-6)


def test_dropout_differs_between_ranks_and_the_best_model_is_the_best(local, tmp_path):
    """Where all sequences are the same, two ranks with one mask would have the loss of one rank.

    Nothing is learnt here, so only the first of the evaluations is better than those before.
    """
    (tmp_path / "same.txt").write_text("abcdefgh" * 100)
    options = ["--dataset-name", "same.txt", "--seq-length", 8, "--batch-size", 1, "--lr", 0]
    options += ["--dropout", 0.5, "--max-steps", 3, "--log-freq", 1, "--eval-freq", 1]
    losses = []
    for nproc in 1, 2:
        name = ("--experiment-name", f"on-{nproc}")
        output = launch.run(llm(local, *options, *name, nproc=nproc))
        losses.append(metrics(f"outputs/on-{nproc}", "train/loss")[1])
        assert output.count(f"Model saved at outputs/on-{nproc}/best") == 1
    assert abs(losses[0] - losses[1]) > 1e-4
