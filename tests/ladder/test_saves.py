"""A file that is saved is whole, and its weights are finite; or the one before stays as it was."""

import os
import re
from pathlib import Path

import pytest
import torch
from launch import (
    MULTI,
    MULTINODE,
    SINGLE,
    TORCHRUN_SCRIPT,
    edited,
    python,
    quickly,
    run,
)

SCRIPTS = [SINGLE, MULTI, TORCHRUN_SCRIPT, MULTINODE]


each_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: Path(script).stem)


# What may go wrong: a sample that is no number, and a last step after which a weight is none,
# though the loss before it was. An epoch is one step, of all samples of the rank.
WHOLE = ("--batch_size", 2048)


NAN_DATA = (
    "train_set = MyTrainDataset(2048)",
    "train_set = MyTrainDataset(2048)\n    train_set.features[7] = float('nan')",
)


INFINITE_WEIGHT = (
    "return loss.detach()",
    "next(self.model.parameters()).data[0, 0] = float('inf')\n        return loss.detach()",
)


CURE = "Lower the learning rate (the smaller the batch, the lower) or look at the data"


def ranks_of(script):
    return 1 if script == SINGLE else 2


def assert_diverged(output, loss, name="the loss"):
    """One line says so, and no epoch, save or traceback of ours comes after it."""
    begin = "ERROR: training diverged, nothing is saved"
    line = rf"^{begin}: (.+) is not finite \(loss (\S+)\)\. (.*)$"
    (told,) = re.findall(line, output, re.MULTILINE)
    assert told[0] == name and re.fullmatch(loss, told[1]) and told[2] == CURE, output
    assert output.count("ERROR: ") == 1
    after = output.rpartition("ERROR: ")[2]
    assert "] Epoch" not in after and "saved at" not in after
    assert "Traceback" not in output.replace("Traceback", "", output.count("ChildFailedError: "))


@each_script
@pytest.mark.parametrize(
    ("change", "loss", "name"),
    [(NAN_DATA, "nan", "the loss"), (INFINITE_WEIGHT, r"\d\.\d+", "0.weight")],
    ids=["loss", "weight"],
)
def test_what_is_not_finite_is_not_saved(script, change, loss, name, saved):
    """NaN in the loss, or only in a weight: a line, exit status 2, and the last file as it was."""
    path, own = saved(script), edited(script, "own.py", change)
    before = path.read_bytes()
    status, output = quickly(own, 2, 1, *WHOLE, nproc=ranks_of(script))
    assert status == {2}, output
    assert_diverged(output, loss, name)
    assert path.read_bytes() == before
    assert [file.name for file in Path().glob("[!.]*.pt*")] == [path.name]


def test_a_small_batch_diverges_at_the_default_rate(saved):
    """The command as a reader types it: the epochs before are printed, and then the one line."""
    assert_small_batch_diverges(SINGLE, saved)


def assert_small_batch_diverges(script, saved):
    path = saved(SINGLE)
    output = run(python(script, 50, 10, "--batch_size", 1), 100, status=2)
    assert_diverged(output, "nan|inf")
    assert output.endswith("look at the data\n")
    assert path.read_bytes() == b"good weights"


@each_script
def test_a_save_that_fails_leaves_the_last_file(script, saved):
    """The disk is full: the job ends and says why, the last file is whole, nothing else is left."""
    path = saved(script)
    before = path.read_bytes()
    status, output = quickly(script, 2, 1, largest_file=100_000)
    assert status == {1}, output
    assert "Epoch 0 |" in output or "Epoch 1 |" in output
    assert "saved at" not in output
    assert output.count("Traceback") and "File too large" in output
    assert path.read_bytes() == before
    assert [file.name for file in Path().glob("[!.]*.pt*")] == [path.name]


@each_script
def test_a_symbolic_link_stays_one(script, saved):
    """What is saved goes to where it points, be a file there or not yet; a resume reads there."""
    Path("elsewhere").mkdir()
    target = Path("elsewhere/other.pt")
    link = saved(script)
    link.unlink()
    link.symlink_to(target)
    given = () if script in (SINGLE, MULTI) else ("--snapshot_path", link)
    for epochs in 1, 2:
        status, output = quickly(script, epochs, 1, *given)
        assert status == {0}, output
        assert os.readlink(link) == str(target)
        assert [file.name for file in target.parent.glob("[!.]*")] == ["other.pt"]
        content = torch.load(target, weights_only=True)
        assert "0.weight" in content.get("model", content)
        assert content.get("epochs_run", epochs) == epochs
    assert ("Resuming training from snapshot at Epoch 1\n" in output) == bool(given)
