"""What the tests of faults share."""

import dataclasses
import tempfile
from functools import cache
from pathlib import Path

import faults
import pytest


@pytest.fixture(scope="module")
def folder():
    """One with a short path: sockets of processes lie in it, whose paths have at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def broken(folder):
    """`broken(script, fault, number)` breaks a run, at a moment that depends on the number, and
    returns what came of it. The runs are shorter than those of the table."""

    def shorter(name):
        script = faults.named(name)
        return dataclasses.replace(script, total=script.total * 6 // 10)

    @cache
    def undisturbed(name):
        return faults.undisturbed(shorter(name), folder / name)

    return lambda name, fault, number: faults.run(
        number, shorter(name), fault, 1, undisturbed(name), folder
    )
