"""A small fixed part of faults.py: what is broken on purpose comes back, and nothing is lost."""

import dataclasses
import tempfile
from functools import cache
from pathlib import Path

import faults
import pytest
from hosts import needs_namespaces

pytestmark = pytest.mark.long


FIXED = [
    ("multigpu_torchrun.py", "SIGKILL of rank 0 in a save"),
    ("multigpu_torchrun.py", "SIGUSR1 to the launcher, once"),
    ("multigpu_torchrun.py", "SIGSTOP of a rank, for good"),
    ("multinode.py", "SIGKILL of every process of a host in a save"),
    ("multinode.py", "the other host has a snapshot of another job"),
    ("multinode.py", "the arguments differ between hosts"),
    ("train_llm.py", "SIGKILL of the launcher in a save"),
    ("train_llm.py", "the disk is full"),
    ("train_llm.py", "a bit of the newest snapshot is flipped"),
]


@pytest.fixture(scope="module")
def folder():
    """One with a short path: sockets of processes lie in it, whose paths have at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        yield Path(name)


def shorter(name):
    """The script of that name with a shorter run than those of the table."""
    script = faults.named(name)
    return dataclasses.replace(script, total=script.total * 6 // 10)


@pytest.fixture(scope="module")
def undisturbed(folder):
    """`undisturbed(script)` is the last snapshot of a run that nobody disturbed."""
    return cache(lambda script: faults.undisturbed(shorter(script), folder / script))


@needs_namespaces
@pytest.mark.parametrize("script, name", FIXED)
def test_nothing_is_lost(script, name, undisturbed, folder):
    """The job comes back, and ends with the bits of an undisturbed one; nothing is left behind."""
    (fault,) = [fault for fault in faults.faults() if fault.name == name]
    number = FIXED.index((script, name))
    result = faults.run(number, shorter(script), fault, 1, undisturbed(script), folder)
    assert not result.lost, f"{result}\n{result.output}"
    assert result.in_a_save or not fault.in_a_save, "it hit no save"
