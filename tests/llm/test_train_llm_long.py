"""train_llm.py as a whole: its other commands, several machines, GPUs."""

import os
import re
import shlex
from pathlib import Path

import launch
import pytest
from launch import LLM
from llm_runs import LONG, llm, metrics, newest
from test_train_llm import TEXT
from transformers import AutoModelForCausalLM


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


def test_default_run_writes_a_sample(tmp_path):
    """`python train_llm.py` trains on Python's own library and writes by itself, in two steps."""
    output = launch.run(launch.forked(LLM, "--max-steps", 2, "--batch-size", 2))
    assert "byte-gpt" in output and "Steps: 2 " in output
    (given, added) = re.findall(r"A sample of outputs/default/final, after (.*):\n([^$]*)", output)[
        0
    ]
    assert len(given) > 16 and len(added) > 100
    output = launch.run(launch.forked(LLM, "--max-steps", 2, "--batch-size", 2))
    assert "Resuming training from snapshot at Step 2\n" in output and "A sample of" in output
    output = launch.run(launch.forked(LLM, "--resume", "none"), status=2)
    assert "choose another --experiment-name" in output


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
