"""train_llm.py as a whole: the commands of its docstring, what it leaves, what it refuses."""

import math
import os
import re
import shlex
from pathlib import Path

import launch
import pytest
import torch
from launch import LLM
from llm_runs import LONG, OFFLINE, llm, metrics, newest
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


@pytest.mark.long
def test_finetuning_command(local, tmp_path):
    """The second named command starts from the weights in the folder and goes on from there."""
    text = TEXT.partition("Fine-tune: the same with ")[2]
    (options,) = re.findall(r"--experiment-name.* --init pretrained", text)
    options = options.replace("EleutherAI/gpt-neo-1.3B", str(local / "gpt-neo"))
    options = options.replace("stanfordnlp/imdb", str(local / "imdb.jsonl"))
    command = launch.torchrun(LLM, *shlex.split(options), "--batch-size", 64, "--max-steps", 2)
    output = launch.run([*command, "--warmup-steps", "1", "--log-freq", "1"])
    assert "Weights: pretrained" in output and "LR: 5.00e-05" in output
    before = AutoModelForCausalLM.from_pretrained(local / "gpt-neo").state_dict()
    after = AutoModelForCausalLM.from_pretrained("outputs/gpt-neo-imdb-A100/final").state_dict()
    changed = max((after[name] - before[name]).abs().max() for name in before)
    assert 0 < changed < 2e-4, "two steps of AdamW go no further than twice the learning rate"


@pytest.mark.long
def test_default_run_writes_a_sample(tmp_path):
    """`python train_llm.py` trains on Python's own library and writes by itself, in two steps."""
    output = launch.run(launch.python(LLM, "--max-steps", 2, "--batch-size", 2))
    assert "byte-gpt" in output and "Steps: 2 " in output
    (given, added) = re.findall(r"A sample of outputs/default/final, after (.*):\n([^$]*)", output)[
        0
    ]
    assert len(given) > 16 and len(added) > 100
    output = launch.run(launch.python(LLM, "--max-steps", 2, "--batch-size", 2))
    assert "Resuming training from snapshot at Step 2\n" in output and "A sample of" in output
    output = launch.run(launch.python(LLM, "--resume", "none"), status=2)
    assert "choose another --experiment-name" in output


@pytest.mark.long
def test_cold_cache_is_made_once_and_a_cut_off_one_again(local, tmp_path):
    """Two jobs that start together share one cache; a file that lost its end is made again."""
    jobs = [launch.start(llm(local, "--max-steps", 1, "--experiment-name", name)) for name in "ab"]
    outputs = [launch.finish(job) for job in jobs]
    assert [status for status, _ in outputs] == [0, 0], outputs
    assert sum(output.count("Tokenised") for _, output in outputs) == 1
    (tokens,) = Path("outputs").glob("tokens-*/tokens.bin")
    whole = tokens.read_bytes()
    os.truncate(tokens, len(whole) // 2)
    output = launch.run(llm(local, "--max-steps", 1, "--experiment-name", "c"))
    assert output.count("Tokenised") == 1 and tokens.read_bytes() == whole


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


@pytest.mark.long
def test_options_that_differ_between_machines_are_told(local, tmp_path):
    """Before anything is written or trained, in one line."""
    endpoint = f"localhost:{launch.free_port()}"
    nodes = []
    for seed in 1, 2:
        names = ("--model-name", local / "gpt2", "--dataset-name", local / "text.txt")
        command = launch.agent(endpoint, *names, "--seed", seed, script=LLM)
        nodes.append(launch.start(command, tmp_path / f"{seed}"))
    logs = "".join(launch.finish(node)[1] for node in nodes)
    assert logs.count("ERROR: seed: not the same on all machines\n") == 2, logs  # one on each


@pytest.mark.long
@pytest.mark.parametrize("nproc", [pytest.param(n, marks=pytest.mark.gpu(n)) for n in (1, 2)])
def test_compiled_bfloat16_on_gpus_learns_what_the_cpu_learns(local, tmp_path, nproc):
    """On one and two GPUs: compiled, in bfloat16, and each loss near that of the CPU in float32."""
    options = (*LONG, "--dropout", 0, "--batch-size", 3)
    output = launch.run(llm(local, *options, nproc=nproc), 300)
    assert "Matrix products: bfloat16 | Compiled: yes" in output
    assert re.search(r"MFU: \d|MFU: unknown", output) and "A sample of" in output
    assert not any("_orig_mod" in name for name in newest("outputs/default")["model"])
    launch.run(llm(local, *options, "--experiment-name", "cpu"), CUDA_VISIBLE_DEVICES="")
    found, expected = (metrics(f"outputs/{name}", "train/loss") for name in ("default", "cpu"))
    assert found.keys() == expected.keys()
    assert max(abs(found[step] / expected[step] - 1) for step in expected) < 0.02
