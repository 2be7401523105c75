"""A small fixed part of faults.py: what is broken on purpose comes back, and nothing is lost."""

import faults
import pytest
from hosts import needs_namespaces

FIXED = [
    ("multigpu_torchrun.py", "SIGKILL of rank 0 in a save"),
    ("multinode.py", "SIGKILL of every process of a host in a save"),
    ("train_llm.py", "SIGKILL of the launcher in a save"),
    ("train_llm.py", "the disk is full"),
]


@needs_namespaces
@pytest.mark.parametrize("script, name", FIXED)
def test_nothing_is_lost(script, name, broken):
    assert_nothing_is_lost(script, name, FIXED.index((script, name)), broken)


def assert_nothing_is_lost(script, name, number, broken):
    """The job comes back, and ends with the bits of an undisturbed one; nothing is left behind."""
    (fault,) = [fault for fault in faults.faults() if fault.name == name]
    result = broken(script, fault, number)
    assert not result.lost, f"{result}\n{result.output}"
    assert result.in_a_save or not fault.in_a_save, "it hit no save"
