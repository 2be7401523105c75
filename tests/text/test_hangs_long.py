"""docs/hangs.md: each job stands still or breaks as told, and each tool names the rank and line."""

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from launch import start_typed, wait_for
from test_hangs import PAGE, PROGRAMS, SHOWN

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


def failed(process, command="", seconds=60):
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


@pytest.mark.parametrize("command", [command for command in SHOWN if "lock" not in command][:4])
def test_a_job_says_what_the_page_shows(launch, command):
    assert_shown(SHOWN[command], failed(launch(command), command))


def test_a_rank_in_a_lock_is_found_by_name_and_by_line(launch):
    """With the signal and py-spy while it waits, and by monitored_barrier after that."""
    (command,) = (command for command in SHOWN if "lock.py" in command)
    (kill,) = (command for command in SHOWN if command.startswith("kill"))
    process = launch(command)
    output = wait_for(process, lambda output: output.count("is process") == 2)
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


def test_without_help_another_order_waits_for_the_time_out(launch):
    lines = [
        '[rank0]:   File "…/order.py", line 9, in <module>',
        '[rank1]:   File "…/order.py", line 10, in <module>',
        "[rank0]: RuntimeError: …Timed out waiting 5000ms for …",
        "[rank1]: RuntimeError: …Timed out waiting 5000ms for …",
    ]
    job = launch("torchrun --standalone --nproc_per_node=2 order.py")
    assert_shown(lines, failed(job))


def test_detail_crashes_ddp_and_faulthandler_names_the_line(launch):
    """As told in 3 and 4. Once it does not crash any more, the page has to say so."""
    command = "torchrun --standalone --nproc_per_node=2 steps.py"
    job = launch(command, TORCH_DISTRIBUTED_DEBUG="DETAIL", PYTHONFAULTHANDLER="1")
    line = PROGRAMS["steps.py"].splitlines().index("model = DDP(torch.nn.Linear(20, 2))") + 1
    lines = [f'  File "…/steps.py", line {line} in <module>', "  exitcode  : -11 …(SIGSEGV)"]
    assert_shown(lines, failed(job))


def test_join_lets_ranks_make_different_numbers_of_steps(launch):
    """The cure of 2: the loop of steps.py under `with Join([model]):`."""
    loop = re.search(r"^for step.*?(?=^dist)", PROGRAMS["steps.py"], re.DOTALL | re.MULTILINE)[0]
    joined = "from torch.distributed.algorithms.join import Join\n\nwith Join([model]):\n"
    joined += "".join(f"    {line}\n" for line in loop.splitlines())
    Path("joined.py").write_text(PROGRAMS["steps.py"].replace(loop, joined))
    job = launch("torchrun --standalone --nproc_per_node=2 joined.py")
    assert job.wait(60) == 0, job.log.read_text()
    lines = ["rank 0 made step 3", "rank 1 made step 2"]
    assert_shown(lines, without_tee(job.log.read_text()))
