"""check_cluster.py on sound clusters, and on broken ones, each broken for real."""

import re
import shutil
import socket
from pathlib import Path

import launch
import pytest
import torch

WRONG_SUMS = """
import check_cluster
all_reduce = check_cluster.dist.all_reduce
def wrong(tensor, *args, **kwargs):
    all_reduce(tensor, *args, **kwargs)
    if len(tensor.shape) == 1 and len(tensor) == 4096:
        tensor[77] += 1
check_cluster.dist.all_reduce = wrong
check_cluster.main()
"""


def errors(output):
    return re.findall(r"^ERROR: (.*)$", output, re.MULTILINE)


def table(output):
    """The rows of the table as dicts. Columns are where their names are."""
    lines = output.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("rank"))
    columns = [match.span() for match in re.finditer(r"\S+ *", lines[start])]
    columns[-1] = (columns[-1][0], None)
    rows = []
    for line in lines[start + 1 :]:
        if not re.match(r"\d+ ", line):
            return rows
        rows.append({lines[start][a:b].strip(): line[a:b].strip() for a, b in columns})


def curve(output):
    """{message size: [(microseconds, GB/s) of each group]}"""
    found = {}
    for size, rest in re.findall(r"^ +(\d+ [KM]iB)((?: +[\d.]+ us +[\d.]+ GB/s)+)$", output, re.M):
        pairs = re.findall(r"([\d.]+) us +([\d.]+) GB/s", rest)
        found[size] = [(float(us), float(speed)) for us, speed in pairs]
    return found


def see_it_end(process, status=2, seconds=20):
    """It ends in time, with that exit status and no traceback. Return what it printed."""
    returncode, output = launch.finish(process, seconds)
    assert returncode == status, output
    assert "Traceback" not in output
    return output


def the_error(process, seconds=20):
    (error,) = errors(see_it_end(process, seconds=seconds))
    return error


def test_on_one_machine():
    assert_good_on_one_machine(launch.python(launch.CHECK, "--max_mib=1"))


def assert_good_on_one_machine(command):
    output = launch.run(command, 30)
    rows = table(output)
    assert [row["rank"] for row in rows] == ["0", "1"] == [row["local"] for row in rows]
    for row in rows:
        assert row["host"] == socket.gethostname() and row["device"] == "cpu"
        assert row["torch"] == torch.__version__ and row["threads"] == "1"
    assert list(curve(output)) == ["1 KiB", "4 KiB", "16 KiB", "64 KiB", "256 KiB", "1 MiB"]
    for size, [(microseconds, speed)] in curve(output).items():
        number, unit = size.split()
        size = int(number) * {"KiB": 2**10, "MiB": 2**20}[unit]
        # The bus bandwidth of 2 processes is 2 (2 - 1) / 2 = 1 times the size by the time.
        assert speed == pytest.approx(size / microseconds / 1e3, rel=0.01, abs=0.006)
    assert output.endswith("OK: all-reduce gives the right sums between 2 processes\n")


def by_srun(rank, address, port):
    """The variables that slurm/multinode_srun.sbatch sets for one of two processes on a node."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


def test_started_by_srun():
    wanted = "MASTER_ADDR: {host} cannot resolve the name nosuch.invalid"
    assert_told_by_srun(1, "nosuch.invalid", False, wanted)


def assert_told_by_srun(rank, address, taken, expected):
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
        if not taken:
            server.close()
        variables = by_srun(rank, address, port)
        error = the_error(launch.start(launch.python(launch.CHECK, "--wait=1"), **variables))
    assert error.startswith(expected.format(host=socket.gethostname(), port=port))


def test_wrong_sums_are_told(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(launch.ROOT))
    Path("driver.py").write_text(WRONG_SUMS)
    status, output = launch.finish(launch.start(launch.torchrun("driver.py")), 30)
    assert status == 1
    assert re.search(
        r"^ERROR: rank 0 on .*: an all-reduce of 16384 bytes gave wrong sums$", output, re.M
    )
    assert "64 KiB" not in output and "OK" not in output


BAD = [
    (["--nosuch"], "unrecognized arguments: --nosuch"),
    (["--nnodes=2", "--rdzv-endpoint=alpha:99999"], "--rdzv-endpoint: The port number"),
    (["--nproc_per_node=none"], "Unsupported nproc_per_node value: none"),
    (["multinode.py", "50", "--wait=0"], "wait: give a whole number from 1 to 3600, not '0'"),
    (["--wait=0"], "wait: give a whole number from 1 to 3600, not '0'"),
    (["--max_mib=x"], "max_mib: give a whole number from 1 to 65536, not 'x'"),
]


@pytest.mark.parametrize(("options", "expected"), BAD)
def test_bad_options(options, expected):
    output = launch.run(launch.forked(launch.CHECK, *options), 30, status=2)
    (line,) = output.splitlines()
    assert expected in line and "rror: " in line.replace("ERROR", "error")


def test_it_needs_only_plumbing(tmp_path):
    """It is carried to a cluster together with that folder, and nothing else of ours."""
    shutil.copy(launch.CHECK, tmp_path)
    shutil.copytree(launch.ROOT / "plumbing", tmp_path / "plumbing")
    output = launch.run(launch.python("check_cluster.py", "--max_mib", 1), PYTHONPATH="")
    assert "OK: all-reduce gives the right sums between 2 processes" in output
