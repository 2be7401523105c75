"""A job that waits for a lock for as long as it may."""

import re
import time

import pytest
from launch import MULTI, SINGLE, TORCHRUN_SCRIPT, forked, quickly, run, start, wait_for
from test_locks import hold


def test_a_job_that_waits_in_vain_prints_for_whom():
    hold(60)
    begin = time.monotonic()
    status, output = quickly(TORCHRUN_SCRIPT, 1, 1, "--timeout", 2, nproc=2)
    assert status == {2} and time.monotonic() - begin > 10
    holder = r"\(process 2 of .*, f0f0f0f0\)\. Wait until it has ended, or choose a different --sn"
    told = re.findall(rf"^ERROR: a different job uses \S+/snapshot\.pt {holder}", output, re.M)
    assert len(told) == output.count("ERROR") == 1 and "Timed out" not in output, output


@pytest.mark.parametrize("script", [SINGLE, MULTI])
def test_two_jobs_in_one_folder_write_one_checkpoint_only_in_turn(script):
    """As the processes of a launcher that sets no variable of the table."""
    first = start(forked(SINGLE, 2000, 2000))
    wait_for(first, lambda output: "Epoch 1 " in output)
    output = run(forked(script, 2, 1), status=2)
    (line,) = re.findall("^ERROR: a different job trains in .*$", output, re.M)
    assert "Wait until it has ended, or start in a different folder. If one launcher" in line
    assert "Epoch" not in output and first.poll() is None
    first.kill()
    run(forked(script, 2, 1))
