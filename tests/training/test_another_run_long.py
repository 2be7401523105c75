"""What makes it another run is refused or told: each kind of it."""

import json
import re
import shutil
from pathlib import Path

import launch
import pytest
import torch
from llm_runs import FIRST, llm, metrics
from test_another_run import go_on
from transformers import AutoModelForCausalLM, GPT2Config

REFUSED = {
    "seed": (["--seed", 1], "seed is 0 there, 1 here"),
    "global batch": (["--global-batch-size", 8], "global batch size is 4 there, 8 here"),
    "length": (["--seq-length", 16], "sequence length is 32 there, 16 here"),
    "weights": (
        ["--init", "pretrained"],
        r"weights to start from is fresh there, \S+gpt2 \(.* here",
    ),
    "data": (
        ["--dataset-name", "{}/imdb.jsonl"],
        r"data is \S+text.txt \(.*imdb.jsonl \(\w+\) here",
    ),
    "model": (["--model-name", "four"], "n_layer is 2 there, 4 here"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_another_run_is_refused_with_both_values(local, tmp_path, first, case):
    """In one line; the snapshots stay as they are, none is taken for damaged."""
    options, message = REFUSED[case]
    config = GPT2Config.from_pretrained(local / "gpt2", n_layer=4)
    AutoModelForCausalLM.from_config(config).save_pretrained("four")
    options = [str(option).format(local) for option in (*options, "--tokenizer-name", "bytes")]
    output = go_on(local, first, *options, status=2)
    (error,) = re.findall("^ERROR: .*", output, re.M)
    assert re.search(f"outputs/default is of another run: .*{message}", error), error
    assert "to keep it, choose another --experiment-name" in error
    assert [path.name for path in Path("outputs/default/snapshots").iterdir()] == [
        "step-00000004.pt"
    ]


def test_weights_that_changed_under_one_name_are_other_weights(local, tmp_path):
    """A model that was trained on under its name is not what the run had started from."""
    shutil.copytree(local / "gpt2", "model")
    options = ("--model-name", "model", "--init", "pretrained", *FIRST)
    launch.run(llm(local, *options))
    assert "Resuming" in launch.run(llm(local, *options)), "the same weights are the same"
    model = AutoModelForCausalLM.from_pretrained("model")
    with torch.no_grad():
        model.transformer.h[0].mlp.c_fc.bias[0] += 1e-6
    model.save_pretrained("model")
    output = launch.run(llm(local, *options), status=2)
    assert re.search(r"weights to start from is model \(\w+\) there, model \(\w+\) here", output)


def test_a_snapshot_of_an_older_version_resumes(local, tmp_path, first):
    """It has no list of what it was; its data and length are compared, and the line says so."""
    shutil.copytree(first, "outputs")
    (path,) = Path("outputs/default/snapshots").iterdir()
    snapshot = torch.load(path, weights_only=True)
    identity = snapshot.pop("identity")
    for name in "settings", "steps_evaluated":
        del snapshot[name]
    snapshot["tokens"] = f"{identity['data'][0]}, in sequences of 32"
    torch.save(snapshot, path)
    output = launch.run(llm(local, *FIRST, "--max-steps", 6))
    assert "Resuming training from snapshot at Step 4\nIt is of an older version: " in output
    assert list(metrics("outputs/default", "train/loss")) == [1, 2, 3, 4, 5, 6]
    shutil.copy(path, "old.pt")
    for newer in Path("outputs/default/snapshots").iterdir():
        newer.unlink()
    shutil.copy("old.pt", path)
    output = launch.run(llm(local, *FIRST, "--seq-length", 16), status=2)
    assert "sequence length is 32 there, 16 here" in output


def test_configurations_that_differ_between_machines_are_told(local, tmp_path):
    """The weights have one shape, and yet the models are not the same."""
    nodes = []
    endpoint = f"localhost:{launch.free_port()}"
    for name, slope in (("a", 1e-5), ("b", 1e-6)):
        shutil.copytree(local / "gpt2", tmp_path / name / "model")
        config = json.loads((local / "gpt2" / "config.json").read_text())
        config["layer_norm_epsilon"] = slope
        (tmp_path / name / "model" / "config.json").write_text(json.dumps(config))
        options = ("--model-name", "model", "--dataset-name", local / "text.txt", *FIRST)
        command = launch.agent(endpoint, *options, script=launch.LLM)
        nodes.append(launch.start(command, tmp_path / name))
    logs = [launch.finish(node)[1] for node in nodes]
    for log in logs:
        (error,) = re.findall("^ERROR: .*", log, re.M)
        assert error.startswith("ERROR: not the same on all machines: layer_norm_epsilon is 1e-0")
