"""What a stranger could make of a job of the ladder: torchrun's, its files, and what is told."""

import launch
import pytest
from hosts import needs_namespaces
from launch import MULTI, MULTINODE, SINGLE, TORCHRUN_SCRIPT
from security import (
    assert_no_other_machine_can_reach,
    assert_wandb_has_no_secret,
    written_outside,
)


@needs_namespaces
@pytest.mark.parametrize("script", [TORCHRUN_SCRIPT, MULTINODE], ids=["torchrun", "multinode"])
def test_on_one_machine_no_other_can_reach_a_process_of_torchrun(tmp_path, script):
    assert_no_other_machine_can_reach(launch.torchrun(script, 100000), tmp_path)


def test_nothing_is_written_outside_of_the_folder(tmp_path):
    """No file stays among the temporary ones or in the user's home."""
    commands = [
        launch.python(SINGLE, 1, 1),
        launch.python(MULTI, 1, 1),
        launch.torchrun(MULTINODE, 1, 1),
    ]
    here = {"work/checkpoint.pt", "work/snapshot.pt"}
    here |= {"work/.checkpoint.pt.lock", "work/.snapshot.pt.lock"}
    assert written_outside(commands, tmp_path) == here


def test_wandb_gets_no_secret_of_the_environment(tmp_path):
    """The values of the environment's variables stay here."""
    assert_wandb_has_no_secret(launch.torchrun(MULTINODE, 1), tmp_path)
