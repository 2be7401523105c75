"""What makes it another run than that of the snapshot is refused or told, never passed over."""

import re
import shutil
from types import SimpleNamespace

import launch
import pytest
import torch
from llm_runs import FIRST, llm, metrics

from plumbing.files import misfit
from training.snapshots import differences
from training.trainer import Trainer


def go_on(local, first, *options, status=0, **names):
    shutil.copytree(first, "outputs", dirs_exist_ok=True)
    return launch.run(llm(local, *FIRST, *options, **names), status=status)


def test_differences_in_words():
    """What one of the two does not have is equal; of a pair only the first is compared."""
    there = {"lr": 1e-3, "data": ("a1", "old.txt"), "steps": 4, "gone": 1}
    here = {"lr": 1e-3, "data": ("a1", "moved/old.txt"), "steps": 8, "new": 2}
    assert differences(there, here) == "steps is 4 there, 8 here"
    here |= {"data": ("b2", "new.txt"), "steps": 4}
    assert differences(there, here) == "data is old.txt (a1) there, new.txt (b2) here"
    tensors = {"model": {"w": torch.zeros(2), "b": torch.zeros(1)}}
    assert misfit({"model": {"w": torch.ones(2), "b": torch.ones(1)}}, tensors) is None
    assert misfit({"model": {"w": torch.ones(2)}}, tensors) == "model b is missing there, [1] here"
    assert misfit({"model": {"w": torch.ones(3)}}, tensors) == "model w is [3] there, [2] here"
    assert misfit({}, tensors) == "model w is missing there, [2] here"


def test_a_longer_run_is_told_what_becomes_of_its_learning_rate(local, tmp_path, first):
    """Another number of steps changes the schedule: old and new rate of the next step."""
    output = go_on(local, first, "--max-steps", 20, "--dropout", 0.2)
    (line,) = re.findall("Not as in the snapshot: .*", output)
    assert "steps is 4 there, 20 here" in line and "dropout is 0.0 there, 0.2 here" in line
    (now, before) = re.findall(r"has LR (\S+) and not (\S+);? ?", line)[0]
    assert metrics("outputs/default", "train/lr")[5] == pytest.approx(float(now), rel=1e-2)
    assert float(before.rstrip(".")) < float(now)
    assert "choose another --experiment-name" in line


def test_what_leaves_the_learning_rate_as_it_is_does_not_name_it(capsys):
    there = {"lr": 1e-3, "warm-up steps": 1, "steps": 4, "processes": 2}
    here = there | {"processes": 1}
    snapshots = SimpleNamespace(another="another name")
    trainer = SimpleNamespace(steps_run=2, snapshots=snapshots, _settings=lambda: here)
    Trainer._print_changes(trainer, {"settings": there})
    told = "processes is 2 there, 1 here. For a run of its own: another name"
    assert capsys.readouterr().out == f"Not as in the snapshot: {told}\n"
