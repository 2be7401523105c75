"""docs/hangs.md: each job stands still or breaks as told, and each tool names the rank and line.

The programs on the page are marked `py` and not `python`, since they end badly: they are run here.
"""

import os
import re
import shutil
import signal
import subprocess
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from launch import ROOT, in_processes, start_typed, wait_for
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
# torchrun lets the second rank speak, too, before it ends it, and no line has parts of both.
OPTIONS = "--standalone --monitor-interval=1 --tee 3"


@pytest.fixture
def launch():
    """`launch(command)` starts it as a reader types it, with the page's programs in this folder."""
    processes = []

    def launch(command, **env):
        for name, code in PROGRAMS.items():
            Path(name).write_text(code)
        command = "exec env " + command.replace(" --tee 3", "").replace("--standalone", OPTIONS)
        processes.append(start_typed(command, **env))
        return processes[-1]

    yield launch
    for process in processes:
        end(process)


def end(process):
    """torchrun ends its workers at SIGTERM, and not at SIGKILL."""
    if process.poll() is None:
        process.terminate()
        process.wait(40)


def failed(process, command="", seconds=18):
    """What the job printed until it failed, within that time."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        end(process)
        raise AssertionError(f"still running:\n{process.log.read_text()}") from None
    output = process.log.read_text()
    assert process.returncode == 1, output
    return output if "--tee 3" in command else without_tee(output)


def without_tee(output):
    return re.sub(r"^\[default\d\]:", "", output, flags=re.MULTILINE)


def assert_shown(lines, output):
    """Each line is a whole line of `output`; pids differ, and `…` stands for anything."""
    for line in lines:
        pattern = re.escape(line).replace("…", ".*")
        pattern = re.sub(r"(?<!\d)482\d\d(?!\d)", r"\\d+", pattern)
        assert re.search(f"^{pattern}$", output, re.MULTILINE), f"{line}\n{output}"


def test_every_program_and_every_command_is_run_here():
    assert list(PROGRAMS) == ["alone.py", "steps.py", "order.py", "died.py", "lock.py"]
    assert [command.split()[0] for command in SHOWN if ".py" not in command] == ["kill", "py-spy"]
    assert len(SHOWN) == len(PROGRAMS) + 2


@pytest.mark.long
@pytest.mark.parametrize("command", [command for command in SHOWN if "lock" not in command][:4])
def test_a_job_says_what_the_page_shows(launch, command):
    assert_shown(SHOWN[command], failed(launch(command), command))


@pytest.mark.long
def test_a_rank_in_a_lock_is_found_by_name_and_by_line(launch):
    """With the signal and py-spy while it waits, and by monitored_barrier after that."""
    (command,) = (command for command in SHOWN if "lock.py" in command)
    (kill,) = (command for command in SHOWN if command.startswith("kill"))
    process = launch(command)
    output = wait_for(process, lambda output: output.count("is process") == 2, 15)
    pids = [re.search(rf"rank {rank} is process (\d+)", output)[1] for rank in (0, 1)]
    time.sleep(1)  # it takes the lock

    ps = ["ps", "-o", "pid,stat,args", "--ppid", str(process.pid)]
    assert " ".join(ps[:-1]) in PAGE.read_text()
    if shutil.which("ps"):
        found = subprocess.run(ps, capture_output=True, text=True, timeout=10).stdout
        assert all(pid in found.split() for pid in pids), found

    traced, spied = spy(pids[1])
    os.kill(int(pids[1]), signal.SIGUSR1)
    assert kill == "kill -USR1 48213"
    assert_shown([*SHOWN[command], *SHOWN[kill]], failed(process))
    if not traced:
        pytest.skip(f"all was tried but py-spy: {spied}")
    assert_shown(SHOWN["py-spy dump --pid 48213"], spied)


def spy(pid):
    """(whether py-spy could trace that process, what it said)"""
    if not shutil.which("py-spy"):
        return False, "not installed"
    command = ["py-spy", "dump", "--pid", pid]
    dump = subprocess.run(command, capture_output=True, text=True, timeout=10)
    return dump.returncode == 0, dump.stdout + dump.stderr


@pytest.mark.long
def test_without_help_another_order_waits_for_the_time_out(launch):
    lines = [
        '[rank0]:   File "…/order.py", line 9, in <module>',
        '[rank1]:   File "…/order.py", line 10, in <module>',
        "[rank0]: RuntimeError: …Timed out waiting 5000ms for …",
        "[rank1]: RuntimeError: …Timed out waiting 5000ms for …",
    ]
    job = launch("torchrun --standalone --nproc_per_node=2 order.py")
    assert_shown(lines, failed(job))


@pytest.mark.long
def test_detail_crashes_ddp_and_faulthandler_names_the_line(launch):
    """As told in 3 and 4. Once it does not crash any more, the page has to say so."""
    command = "torchrun --standalone --nproc_per_node=2 steps.py"
    job = launch(command, TORCH_DISTRIBUTED_DEBUG="DETAIL", PYTHONFAULTHANDLER="1")
    line = PROGRAMS["steps.py"].splitlines().index("model = DDP(torch.nn.Linear(20, 2))") + 1
    lines = [f'  File "…/steps.py", line {line} in <module>', "  exitcode  : -11 …(SIGSEGV)"]
    assert_shown(lines, failed(job))


@pytest.mark.long
def test_join_lets_ranks_make_different_numbers_of_steps(launch):
    """The cure of 2: the loop of steps.py under `with Join([model]):`."""
    loop = re.search(r"^for step.*?(?=^dist)", PROGRAMS["steps.py"], re.DOTALL | re.MULTILINE)[0]
    joined = "from torch.distributed.algorithms.join import Join\n\nwith Join([model]):\n"
    joined += "".join(f"    {line}\n" for line in loop.splitlines())
    Path("joined.py").write_text(PROGRAMS["steps.py"].replace(loop, joined))
    job = launch("torchrun --standalone --nproc_per_node=2 joined.py")
    assert job.wait(18) == 0, job.log.read_text()
    lines = ["rank 0 made step 3", "rank 1 made step 2"]
    assert_shown(lines, without_tee(job.log.read_text()))


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
