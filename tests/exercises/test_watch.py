"""exercises/watch.py: a job that stands still is noticed soon, and one that computes never."""

import time

import pytest

from exercises import watch

PROGRAM = """
import threading, time
import torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 1:
    {before}
dist.barrier()
"""
COMPUTES = f"""end = time.monotonic() + {2 * watch.STILL}
    while time.monotonic() < end:
        pass"""


@pytest.mark.parametrize(
    "before, said",
    [
        (COMPUTES, None),
        ("threading.Lock().acquire()", None),
        ("threading.Event().wait()", "The job stands still: all its ranks wait."),
        ("import os; os._exit(0)", "rank 0 waits and rank 1 gone without a word"),
    ],
    ids=["computes", "ends", "waits for ever", "leaves"],
)
def test_a_job_that_stands_still_is_told_from_one_that_computes(before, said, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM.format(before=before))
    began = time.monotonic()
    states = watch.run(str(tmp_path / "program.py"), tmp_path / "run", 2)
    found = watch.stopped(states)
    assert found is said is None or said in found
    assert time.monotonic() - began < watch.LATEST
