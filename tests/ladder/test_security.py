"""What a stranger could make of a job of the ladder: its ports, its files, and what is told.

That no code in a snapshot runs, test_bad_input.py sees.
"""

import launch
from hosts import needs_namespaces
from launch import MULTI
from security import (
    assert_no_other_machine_can_reach,
)


@needs_namespaces
def test_on_one_machine_no_other_can_reach_a_process(tmp_path):
    """All that a script opens is on the loopback interface."""
    assert_no_other_machine_can_reach(launch.python(MULTI, 100000), tmp_path)
