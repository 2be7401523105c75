"""A job that waits for a lock for as long as it may."""

import re
import time

from launch import TORCHRUN_SCRIPT, quickly
from test_locks import hold


def test_a_job_that_waits_in_vain_prints_for_whom():
    hold(60)
    begin = time.monotonic()
    status, output = quickly(TORCHRUN_SCRIPT, 1, 1, "--timeout", 2, nproc=2)
    assert status == {2} and time.monotonic() - begin > 10
    holder = r"\(process 2 of .*, f0f0f0f0\)\. Wait until it has ended, or choose a different --sn"
    told = re.findall(rf"^ERROR: a different job uses \S+/snapshot\.pt {holder}", output, re.M)
    assert len(told) == output.count("ERROR") == 1 and "Timed out" not in output, output
