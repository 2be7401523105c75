"""classifier.py: exact validation, the schedule, data of one's own, what is refused."""

import re
from pathlib import Path

import launch
import torch
from launch import CLASSIFIER, quickly
from test_lessons import parts

import classifier

SMALL = ("--batch_size", 200, "--workers", 0)


def trained(*args, script=CLASSIFIER, nproc=2, status=0, **options):
    """Train, and return what was printed."""
    statuses, output = quickly(script, *args, *SMALL, nproc=nproc, **options)
    assert statuses == {status}, output
    return output


def test_one_checkpoint_has_the_same_metrics_on_any_number_of_processes():
    """To the last digit that is printed, also where each rank has a BatchNorm of its own."""
    trained(2, 2)
    once = launch.edited(
        CLASSIFIER,
        "validates.py",
        (
            "        while not self._is_done():",
            "        self._all_validate(7)\n        while False:",
        ),
    )
    found = {
        re.search(r"Epoch 7 \| .*", trained(2, 2, script=once, nproc=nproc))[0]
        for nproc in (1, 2, 3)
    }
    assert len(found) == 1, found


def test_the_rate_rises_and_then_falls():
    rates = [classifier.rate_of(epoch, 20) for epoch in range(20)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1] and rates[3:] == sorted(rates[3:], reverse=True)
    assert 0 < rates[-1] < 0.02 and classifier.rate_of(0, 1) == 0.25


def test_a_file_of_images_takes_the_place_of_those_that_are_made():
    images, labels = classifier.make_images(400)
    torch.save({"images": images, "labels": labels}, "mine.pt")
    output = trained(1, 1, "--data", "mine.pt")
    assert "Steps: 1 |" in output
    for path in ("nowhere.pt", "log.txt"):
        Path("log.txt").write_text("no images")
        output = trained(1, 1, "--data", path, status=2)
        assert output.count("ERROR") == 1 and f"ERROR: data: cannot read {path} (" in output


def test_numbers_that_make_no_step_are_refused():
    for option in ("--accumulate", "--patience"):
        output = trained(1, 1, option, 0, status=2)
        assert "ERROR: accumulate, patience: give at least 1" in output


def test_the_average_is_what_is_kept():
    trained(1, 1)  # the first epoch is the best one so far
    snapshot = torch.load("snapshot.pt", weights_only=True)
    best = torch.load("snapshot-best.pt", weights_only=True)
    for name, weight in best.items():
        torch.testing.assert_close(weight, snapshot["average"][f"module.{name}"], rtol=0, atol=0)
    assert not torch.equal(best["9.weight"], snapshot["model"]["9.weight"])


def test_what_is_no_part_of_the_example_is_as_in_the_ladder():
    """It has a copy, because people take this file alone."""
    copy, original = parts("classifier.py"), parts("multigpu_torchrun.py")
    assert copy["ddp_setup"] == original["ddp_setup"]
