"""More of faults.py, on each script: what is broken on purpose comes back, and nothing is lost."""

import pytest
from hosts import needs_namespaces
from test_faults_long import FIXED, assert_nothing_is_lost

MORE = [
    ("multigpu_torchrun.py", "SIGUSR1 to the launcher, once"),
    ("multigpu_torchrun.py", "SIGSTOP of a rank, for good"),
    ("multinode.py", "the other host has a snapshot of another job"),
    ("multinode.py", "the arguments differ between hosts"),
    ("train_llm.py", "a bit of the newest snapshot is flipped"),
]


@needs_namespaces
@pytest.mark.parametrize("script, name", MORE)
def test_nothing_is_lost_by_more_faults(script, name, broken):
    number = len(FIXED) + MORE.index((script, name))
    assert_nothing_is_lost(script, name, number, broken)
