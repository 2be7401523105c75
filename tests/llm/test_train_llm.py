"""train_llm.py as a whole: the commands of its docstring, what it leaves, what it refuses."""

import math
import re
import shlex

import launch
import pytest
import torch
from launch import LLM
from llm_runs import OFFLINE, llm, metrics, newest
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config
from wandb_files import QUIET, read_runs

import train_llm
from llm.model import load_tokenizer

TEXT = " ".join(train_llm.__doc__.replace("\\\n", "").split())  # its commands in one line each


def typed(start):
    """A command of the script's docstring, that begins with `start`."""
    (command,) = re.findall(rf"{start}.*?--batch-size 64", TEXT)
    return command


def test_pretraining_command(local, tmp_path):
    """The first named command learns, logs, draws, and leaves a model that transformers loads."""
    command = typed("OMP_NUM_THREADS=1 torchrun")
    assert "--nproc-per-node gpu" in command  # there is none here
    command = command.replace("--nproc-per-node gpu", "--nproc-per-node 2")
    command = command.replace("Skylion007/openwebtext", str(local / "openwebtext.parquet"))
    command = command.replace("openai-community/gpt2", str(local / "gpt2"))
    _, _, *options = shlex.split(command.replace("train_llm.py", LLM))
    options += ["--num-epochs", "8", "--lr", "1e-2", "--log-freq", "1", "--eval-freq", "5"]
    options += ["--wandb", "offline", "--wandb-group", "both"]
    launcher = launch.torchrun("x", options=())[:-2]
    output = launch.run([*launcher, *options], **QUIET)
    folder = tmp_path / "outputs" / "gpt2-openwebtext-A100"
    assert "128 sequences" in output and "Weights: fresh" in output
    assert output.count("Tokenised") == output.count("Global batch size") == 1

    losses = metrics(folder, "train/loss")
    last = max(losses)
    assert list(losses) == list(range(1, last + 1))
    assert abs(losses[1] - math.log(257)) < 0.2 and losses[last] < 0.7 * losses[1]
    validation = metrics(folder, "validation/loss")
    assert set(validation) == {*range(5, last, 5), last} and validation[last] < losses[1]
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")

    launch.run([*launcher, *options, "--num-epochs", "9"], **QUIET)
    *runs, again, and_again = read_runs(folder)
    assert {again.id, and_again.id} == {run.id for run in runs}
    assert min(row["global_step"] for row in again.history) == last + 1
    assert [run.group for run in runs] == ["both"] * 2 and len({run.id for run in runs}) == 2
    for run in runs:
        x_axes = {name: axis for name, axis in run.x_axes.items() if axis}
        assert x_axes.keys() >= {"train/*", "validation/*"}
        assert set(x_axes.values()) == {"global_step"}
        logged = {
            row["global_step"]: row["train/loss"] for row in run.history if "train/loss" in row
        }
        assert logged == losses

    model = AutoModelForCausalLM.from_pretrained(folder / "final")
    tokenizer = AutoTokenizer.from_pretrained(folder / "final")
    text = "the quick brown fox (é 日本)\n\tjumps"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    snapshot = newest(folder)
    assert not any(name.startswith("module.") for name in snapshot["model"])
    trained = AutoModelForCausalLM.from_config(model.config)
    trained.resize_token_embeddings(320)
    trained.load_state_dict(snapshot["model"])
    tokens = torch.tensor([tokenizer(text)["input_ids"][:32]])
    with torch.no_grad():
        logits, expected = model(tokens).logits, trained(tokens).logits[..., :257]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-6)


BAD = {
    "a text that is too short": (["--dataset-name", "short.txt"], "seq-length: .* too few"),
    "an unknown model": (["--model-name", "no/such"], "model-name no/such: "),
    "an unknown data set": (["--dataset-name", "no/such"], "dataset-name no/such: "),
    "a sequence that is too long": (["--seq-length", 33], "model-name .* at most 32 tokens"),
    "a batch that does not divide": (["--global-batch-size", 12], "global-batch-size: 12 is not"),
    "a vocabulary that does not fit": (["--model-name", "small"], "257 tokens.* vocabulary 100"),
    "a step without a snapshot": (
        ["--resume", 7],
        "resume: there is no snapshots/step-00000007.pt",
    ),
    "a word for a number": (["--batch-size", "x"], "batch-size: invalid int value: 'x'"),
    "a number below the least": (["--max-steps", 0], "max-steps: at least 1, not 0"),
    "a resume of nothing": (["--resume", "newest"], "resume: give latest, none"),
    "a resume of step 0": (["--resume", "0"], "resume: there is no snapshots/step-00000000.pt"),
    "a path for a name": (["--experiment-name", "../x"], "experiment-name: give the name"),
    "a folder of no use": (["--save-dir", "/proc/x"], "cannot write in /proc/x"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_told_in_one_line(local, tmp_path, case):
    """One line that begins with ERROR, exit status 2, no traceback."""
    options, message = BAD[case]
    (tmp_path / "short.txt").write_text("short")
    AutoModelForCausalLM.from_config(
        GPT2Config(vocab_size=100, n_layer=1, n_embd=8, n_head=1, n_positions=32)
    ).save_pretrained("small")
    load_tokenizer("bytes").save_pretrained("small")
    output = launch.run(llm(local, *options), status=2, **OFFLINE)
    told = ("Rank: ", "Tokenised", "Model: ", "Memory: ", "Data: ")
    errors = [line for line in output.splitlines() if not line.startswith(told)]
    assert len(errors) == 1 and re.match(f"ERROR: .*{message}", errors[0]), output
