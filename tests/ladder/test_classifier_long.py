"""classifier.py: a resume from each phase, more epochs, early stopping, accumulation, two jobs."""

import re
from pathlib import Path

import launch
import pytest
import torch
from launch import CLASSIFIER, quickly
from test_classifier import SMALL, trained
from wandb_files import QUIET, read_runs

import classifier

DIES = "if self.rank == 0 and epoch == 2:\n            os._exit(9)\n        "
VALIDATES, KEEPS = "model = self.average.module  # not", "if not loss < self.best_loss"
COUNTS = "totals[1] += samples"
SAVES = "weights = self.model.module.state_dict()"
PHASES = {  # rank 0 dies there, in epoch 2 or, of the snapshot, with the one after epoch 3
    "in an epoch": (
        COUNTS,
        f"{COUNTS}\n                if epoch == 2:\n                    os._exit(9)",
    ),
    "before validation": (VALIDATES, DIES + VALIDATES),
    "before the best is saved": (KEEPS, DIES + KEEPS),
    "before the snapshot": (SAVES, DIES.replace("epoch == 2", "self.epochs_run == 4") + SAVES),
}


@pytest.mark.parametrize("phase", PHASES)
def test_a_run_that_was_killed_ends_as_one_that_was_not(phase, tmp_path):
    dies = launch.edited(CLASSIFIER, "dies.py", PHASES[phase])
    statuses, _ = quickly(dies, 4, 2, *SMALL, nproc=2, cwd="killed", seconds=20)
    assert 9 in statuses
    assert "from snapshot at Epoch 2" in trained(4, 2, cwd="killed")
    trained(4, 2, cwd="whole")
    for name in ("snapshot.pt", "snapshot-best.pt"):
        launch.assert_same(Path("killed", name), Path("whole", name))


def test_more_epochs_follow_the_longer_schedule():
    trained(4, 4, "--lr", 0.01)
    trained(6, 6, "--lr", 0.01)
    snapshot = torch.load("snapshot.pt", weights_only=True)
    (group,) = snapshot["optimizer"]["param_groups"]
    assert snapshot["epochs_run"] == 6
    assert group["lr"] == pytest.approx(0.01 * classifier.rate_of(5, 6))


def test_it_stops_when_nothing_gets_better():
    output = trained(30, 30, "--lr", 0.0, "--patience", 2, nproc=1)
    best = int(re.search(r"Best validation loss: .* in epoch (\d+)", output)[1])
    last = torch.load("snapshot.pt", weights_only=True)["epochs_run"] - 1
    assert last == best + 2 < 29
    assert "Nothing left to train" in trained(30, 30, "--patience", 2, nproc=1)


def test_the_gradient_does_not_depend_on_how_a_step_is_divided():
    """Batch 400, 2 x 200 and 4 x 100 make the same steps, up to rounding. (Without BatchNorm, which
    sees one batch at a time.)"""
    plain = launch.edited(
        CLASSIFIER, "plain.py", ("nn.BatchNorm2d(16)", "nn.Identity()"),
        ("nn.BatchNorm2d(32)", "nn.Identity()"),
    )  # fmt: skip
    for size, parts in ((400, 1), (200, 2), (100, 4)):
        cwd = f"by-{parts}"
        args = ("--batch_size", size, "--accumulate", parts, "--workers", 0)
        statuses, output = quickly(plain, 2, 2, *args, nproc=2, cwd=cwd)
        assert statuses == {0}, output
        launch.assert_same_weights(Path(cwd, "snapshot.pt"), Path("by-1", "snapshot.pt"), 1e-4)


def test_a_second_job_in_the_folder_is_refused():
    """So it can write neither the snapshot nor the best model of the first."""
    args = (500, 500, "--patience", 500, *SMALL)
    first = launch.start(launch.forked(CLASSIFIER, *args), **launch.alone())
    launch.wait_for(first, lambda output: "Epoch 1 " in output)
    output = trained(1, 1, nproc=1, status=2)
    assert "ERROR: a different job uses" in output and "Epoch 0" not in output
    assert first.poll() is None
    first.kill()


def test_wandb_has_the_loss_and_the_validation_of_each_epoch(tmp_path):
    command = launch.torchrun(CLASSIFIER, 2, 1, *SMALL, "--wandb", "offline")
    output = launch.run(command, 120, **QUIET)
    (run,) = read_runs(tmp_path)
    logged = [
        f"Epoch {row['epoch']} | Validation loss: {row['validation loss']:.6f} | "
        f"Accuracy: {row['accuracy']:.4f}"
        for row in run.history
        if "accuracy" in row
    ]
    assert logged == re.findall(r"^Epoch \d+ \| Validation .*$", output, re.MULTILINE)
    assert len(logged) == 2 and sum("loss" in row for row in run.history) == 2
