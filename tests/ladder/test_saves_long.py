"""Saves and refusals under torchrun, and in several processes."""

import pytest
from launch import (
    MULTI,
    MULTINODE,
    ROOT,
    TORCHRUN_SCRIPT,
    edited,
    run,
    torchrun,
)
from test_saves import NAN_DATA, assert_diverged, assert_small_batch_diverges


def test_a_small_batch_diverges_in_several_processes(saved):
    assert_small_batch_diverges(MULTI, saved)


@pytest.mark.parametrize("script", [TORCHRUN_SCRIPT, MULTINODE])
def test_torchruns_report_has_the_exit_status(script, saved, good):
    """A job that diverges ends at once: all its processes with exit status 2."""
    path, own = saved(script), edited(script, "own.py", NAN_DATA)
    output = run(torchrun(own, 2, 1), status=1, PYTHONPATH=str(ROOT))
    assert_diverged(output, "nan")
    assert "exitcode  : 2 " in output.partition("Root Cause")[2], output
    assert path.read_bytes() == good
