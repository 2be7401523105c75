"""What a stranger could make of a run of train_llm.py: foreign files, ports, and what is told."""

import json
import os
import pickle
import re
import shutil
from pathlib import Path

import launch
import pytest
import torch
from hosts import needs_namespaces
from launch import LLM
from security import (
    OFFLINE,
    assert_no_other_machine_can_reach,
    assert_wandb_has_no_secret,
    written_outside,
)


class RunsCode:
    """Unpickled, it makes a file of the name `ran`."""

    def __reduce__(self):
        return os.mkdir, (f"{os.getcwd()}/ran",)


def test_what_it_unpickles_would_run(tmp_path):
    """The means of the tests below is one that works."""
    pickle.loads(pickle.dumps(RunsCode()))
    assert Path("ran").exists()


def llm(local, *options):
    data = ("--dataset-name", local / "text.txt", "--model-name", local / "gpt2")
    return launch.forked(LLM, *data, "--batch-size", 4, "--max-steps", 2, *options)


def test_no_code_in_a_snapshot_of_train_llm_runs(local, tmp_path):
    """A snapshot with code in it is not used, and told in one line."""
    launch.run(llm(local))
    (path,) = Path("outputs/default/snapshots").glob("*.pt")
    for content in ({**torch.load(path, weights_only=True), "name": RunsCode()}, RunsCode()):
        torch.save(content, path)
        output = launch.run(llm(local), status=2)
        assert re.search(f"^ERROR: {path} has objects in it that could run code", output, re.M), (
            output
        )
    assert not Path("ran").exists()


def test_no_code_in_a_cache_of_tokens_runs(local, tmp_path):
    """What lies in its place is made again."""
    launch.run(llm(local))
    (folder,) = Path("outputs").glob("tokens-*")
    shutil.rmtree("outputs/default")
    code = pickle.dumps(RunsCode())
    (folder / "tokens.json").write_bytes(code)
    assert "Tokenised" in launch.run(llm(local)), "it was made again"
    size = (folder / "tokens.bin").stat().st_size
    (folder / "tokens.bin").write_bytes((code * size)[:size])
    shutil.rmtree("outputs/default")
    output = launch.run(llm(local))
    assert "tokens.bin is damaged: it is made again\nTokenised" in output
    assert not Path("ran").exists()


def test_no_code_in_a_model_runs(local, tmp_path):
    """Neither in pickled weights nor in a file of Python that the configuration names."""
    shutil.copytree(local / "gpt2", "pickled")
    Path("pickled/model.safetensors").unlink()
    torch.save(RunsCode(), "pickled/pytorch_model.bin")
    shutil.copytree(local / "gpt2", "python")
    config = json.loads(Path("python/config.json").read_text())
    config |= {"auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    config["model_type"] = "own"
    Path("python/config.json").write_text(json.dumps(config))
    Path("python/own.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\n")
    for name in "pickled", "python":
        options = ("--model-name", name, "--tokenizer-name", "bytes", "--init", "pretrained")
        output = launch.run(llm(local, *options), status=2, **OFFLINE)
        assert re.search(f"^ERROR: model-name {name}: ", output, re.MULTILINE), output
    assert not Path("ran").exists()


@needs_namespaces
@pytest.mark.parametrize(
    "command",
    [
        launch.torchrun(LLM, "--max-steps", 100000, "--log-freq", 1),
        launch.python(LLM, "--max-steps", 100000, "--log-freq", 1),
    ],
    ids=["torchrun", "alone"],
)
def test_on_one_machine_no_other_can_reach_train_llm(tmp_path, command):
    """With a launcher or alone, all that it opens is on the loopback interface."""
    assert_no_other_machine_can_reach(command, tmp_path)


def test_train_llm_writes_nothing_outside_of_its_folder(local, tmp_path):
    """Nothing but what lies in --save-dir, and no file stays among the temporary ones."""
    rows = ("--experiment-name", "rows", "--dataset-name", local / "imdb.jsonl")
    commands = [llm(local, "--save-dir", "out"), llm(local, "--save-dir", "out", *rows)]
    assert written_outside(commands, tmp_path) == set()


def test_wandb_gets_no_secret_of_train_llm(local, tmp_path):
    """The values of the environment's variables stay here."""
    assert_wandb_has_no_secret(llm(local), tmp_path)
