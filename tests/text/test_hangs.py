"""docs/hangs.md: each job stands still or breaks as told, and each tool names the rank and line.

The programs on the page are marked `py` and not `python`, since they end badly: they are run here.
"""

import re
import time
from datetime import timedelta

import torch.distributed as dist
from launch import ROOT, in_processes
from torch.distributed.constants import default_pg_timeout

PAGE = ROOT / "docs" / "hangs.md"


BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)


PROGRAMS, SHOWN = {}, {}  # a program by its name, what a command prints by the command


for language, text in BLOCKS:
    if language == "py":
        code = text
        continue
    for command, lines in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", text, re.MULTILINE):
        SHOWN[command] = lines.splitlines()
        if name := re.search(r"\w+\.py$", command):
            PROGRAMS[name[0]] = code


def test_every_program_and_every_command_is_run_here():
    assert list(PROGRAMS) == ["alone.py", "steps.py", "order.py", "died.py", "lock.py"]
    assert [command.split()[0] for command in SHOWN if ".py" not in command] == ["kill", "py-spy"]
    assert len(SHOWN) == len(PROGRAMS) + 2


def late(rank, init_method):
    wait = timedelta(seconds=1)
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=2, timeout=wait)
    if rank == 1:
        time.sleep(3)
    dist.monitored_barrier()
    dist.destroy_process_group()


def test_monitored_barrier_does_not_take_the_time_out_of_the_group():
    """It waits for a rank that comes 3 s late to a group that waits for 1 s."""
    assert default_pg_timeout == timedelta(minutes=30)
    in_processes(2, late)
