"""Bad input: one line that names it, exit status 2, no traceback, nothing written."""

import importlib
import io
import pickle
import re
import sys
from itertools import product

import launch
import pytest
import torch
import torch.distributed as dist

SCRIPTS = ("single_gpu", "multigpu", "multigpu_torchrun", "multinode")
WITH_SNAPSHOT = SCRIPTS[2:]
COUNTS = [("multigpu", "nproc")]
COUNTS += product(SCRIPTS, ("total_epochs", "save_every", "batch_size", "seed"))
COUNTS += product(WITH_SNAPSHOT, ("timeout",))


def each(scripts):
    """The test for each of `scripts`; for all but the last it is a long one."""
    *others, last = scripts
    others = [pytest.param(script, marks=pytest.mark.long) for script in others]
    return pytest.mark.parametrize("script", [*others, last])


each_script, each_with_snapshot = each(SCRIPTS), each(WITH_SNAPSHOT)

# @record wants a stderr with a file descriptor, which the captured one is not.
pytestmark = pytest.mark.filterwarnings("ignore:Unable to enable fault handler")

ONE_GPU = """
import {script} as script
script.count_gpus = lambda: 1
script.main(script.parse_args())
"""


@pytest.fixture
def start(monkeypatch):
    """Give `start(script, *args)`: runs a script in this process, the only one of its job."""
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(launch.free_port())}
    for name, value in (ranks | address).items():
        monkeypatch.setenv(name, value)

    def start(script, *args):
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *map(str, args)])
        module = importlib.import_module(script)
        args = module.parse_args()
        if script in WITH_SNAPSHOT:
            module.main(args)

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def refusal(start, tmp_path, capsys):
    """Give `refusal(script, *args)`: the line with which the script ends, and writes nothing."""

    def files():
        return {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}

    def refusal(script, *args):
        before = files()
        with pytest.raises(SystemExit) as end:
            start(script, *args)
        assert end.value.code == 2
        assert files() == before
        stdout, stderr = capsys.readouterr()
        assert "Epoch" not in stdout
        assert re.fullmatch(r"(ERROR|\w+\.py: error): .+\n", stderr), stderr
        return stderr

    return refusal


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """The bytes of a good snapshot, of one epoch."""
    folder, cpu = tmp_path_factory.mktemp("good"), {"CUDA_VISIBLE_DEVICES": ""}
    launch.run(launch.torchrun(launch.TORCHRUN_SCRIPT, 1, nproc=1), cwd=folder, **cpu)
    return (folder / "snapshot.pt").read_bytes()


def flipped(good):
    """The bytes of a snapshot with one bit of a weight that is not what it was."""
    weight = torch.load(io.BytesIO(good))["model"]["0.weight"].numpy().tobytes()
    position = good.index(weight) + len(weight) // 2
    return good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :]


def packed(value):
    """The bytes of a file to which `value` is saved."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


class RunsCode:
    """Unpickled, it makes a file named `ran`."""

    def __reduce__(self):
        return open, ("ran", "w")


@pytest.mark.parametrize(
    ("script", "name", "value"),
    [
        # Each count with one value and each value for one count, and the others with --all.
        pytest.param(*count, value, marks=() if 0 in (row, column) else pytest.mark.long)
        for row, count in enumerate(COUNTS)
        for column, value in enumerate(["0", "-1", "ten", "1.5", "", str(2**31), "9" * 5000])
    ],
)
def test_counts_are_whole_numbers(refusal, script, name, value):
    """Zero, negative, no number or too large: the line names the argument and its value."""
    if (name, value) == ("seed", "0"):
        value = "-0"
    line = refusal(script, f"--{name}={value}")
    assert f"{name}: give a whole number from " in line
    assert line.endswith(f", not {value!r}\n")


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("0", "5"), "total_epochs: "),
        (("5", "-1"), "save_every: "),
        (("5", "5", "7"), "unrecognized arguments: 7"),
        (("5", "--colour", "blue"), "unrecognized arguments: --colour"),
        (("--wandb", "sometimes"), "'sometimes'"),
        (("--batch_size",), "--batch_size"),
    ],
)
@each_script
def test_arguments_that_the_scripts_do_not_have(refusal, script, args, named):
    """Positional counts, unknown options and values: the line names them."""
    assert named in refusal(script, *args)


def test_at_most_one_process_per_gpu(refusal, monkeypatch):
    """multigpu.py --nproc 2 on a machine with one GPU."""
    monkeypatch.setattr(importlib.import_module("multigpu"), "count_gpus", lambda: 1)
    line = refusal("multigpu", "--nproc=2")
    assert "nproc: give at most 1, " in line and line.endswith(", not 2\n")


@pytest.mark.parametrize(
    "path", ["nowhere/snapshot.pt", "nowhere/", "/proc/snapshot.pt", "/sys/snapshot.pt", ""]
)
@each_with_snapshot
def test_snapshot_path_that_cannot_be_written(refusal, script, path):
    """Told before training: no such folder, or one in which even root makes no file."""
    line = refusal(script, "1", "--snapshot_path", path)
    assert "snapshot_path" in line and path.rpartition("/")[0] in line


@pytest.mark.parametrize("path", ["folder", "folder/"])
@each_with_snapshot
def test_snapshot_path_that_is_a_folder(refusal, tmp_path, script, path):
    """The line names the path and the option that changes it."""
    (tmp_path / "folder").mkdir()
    line = refusal(script, "1", "--snapshot_path", path)
    assert path in line and "--snapshot_path" in line


# What the file was, the error that docs/troubleshooting.md names for it, and how to make it.
BAD_SNAPSHOTS = [
    ("empty", "BadZipFile", lambda good: b""),
    ("cut after a byte", "BadZipFile", lambda good: good[:1]),
    ("cut after 100 bytes", "BadZipFile", lambda good: good[:100]),
    ("cut in half", "BadZipFile", lambda good: good[: len(good) // 2]),
    ("cut before the last byte", "BadZipFile", lambda good: good[:-1]),
    ("one bit of a weight flipped", "BadZipFile", flipped),
    ("a text", "BadZipFile", lambda good: b"It was a dark and stormy night.\n"),
    ("a list", "TypeError", lambda good: packed([1, 2])),
    ("only weights", "KeyError", lambda good: packed(torch.load(io.BytesIO(good))["model"])),
    (
        "another model",
        "RuntimeError",
        lambda good: packed(
            torch.load(io.BytesIO(good)) | {"model": torch.nn.Linear(20, 4).state_dict()}
        ),
    ),
    ("a pickle that runs code", "BadZipFile", lambda good: pickle.dumps(RunsCode(), protocol=2)),
    (
        "code among the tensors",
        "UnpicklingError",
        lambda good: packed(torch.load(io.BytesIO(good)) | {"extra": RunsCode()}),
    ),
]


@pytest.mark.parametrize(
    ("error", "spoiled"), [pytest.param(*rest, id=kind) for kind, *rest in BAD_SNAPSHOTS]
)
@each_with_snapshot
def test_file_that_is_no_snapshot(refusal, good, tmp_path, script, error, spoiled):
    """It stays as it is, no code in it runs, and the line says what to do."""
    (tmp_path / "snapshot.pt").write_bytes(spoiled(good))
    line = refusal(script, "2")  # which also sees that no file `ran` appears
    problem = "snapshot.pt is damaged, not a snapshot or of another model"
    cure = "move it away or choose another --snapshot_path"
    assert line == f"ERROR: {problem} ({error}): {cure}\n"
    text = (launch.ROOT / "docs" / "troubleshooting.md").read_text()
    assert re.search(rf"^\| .*`{error}`.* \| ", text, re.MULTILINE), "the table has it"


@each_with_snapshot
def test_good_snapshot_is_accepted(start, good, tmp_path, capsys, script):
    """The one that the tests above spoil."""
    (tmp_path / "snapshot.pt").write_bytes(good)
    start(script, "1")
    assert "Resuming training from snapshot at Epoch 1\n" in capsys.readouterr().out


def assert_told_once(output, line):
    """One line of ours, before the launcher's report, which has the only traceback."""
    (ours,) = re.findall("^ERROR: .*$", output, re.MULTILINE)
    assert line in ours, output
    assert "Traceback" not in output.partition(ours)[0]
    assert output.count("Traceback") <= output.count("ChildFailedError: ")
    assert "Epoch" not in output.replace("total_epochs", "")


def test_scripts_end_with_one_line_and_status_2():
    """Started as a reader starts them, without a launcher."""
    value = "total_epochs: give a whole number from 1 to 2147483647, not 'x'"
    for script in launch.SINGLE, launch.MULTI:
        name = script.rpartition("/")[2]
        output = launch.run(launch.python(script, "x"), 30, status=2)
        assert output == f"{name}: error: {value}\n"


@pytest.mark.long
def test_job_of_two_ranks_tells_once(tmp_path):
    """Wrong count, damaged snapshot, too few GPUs: one line, and exit status 2 in the report."""
    (tmp_path / "damaged.pt").write_text("damaged")
    for script in WITH_SNAPSHOT:
        (tmp_path / f"one_gpu_{script}.py").write_text(ONE_GPU.format(script=script))
    torchrun, env = launch.torchrun, {"PYTHONPATH": str(launch.ROOT)}
    jobs = {
        "save_every: ": torchrun(launch.TORCHRUN_SCRIPT, 5, 0),
        "damaged.pt is damaged": torchrun(launch.TORCHRUN_SCRIPT, "--snapshot_path=damaged.pt"),
        "2 processes, but 1 GPUs on ": torchrun("one_gpu_multinode.py"),
    }
    jobs = {line: launch.start(command, **env) for line, command in jobs.items()}
    for line, job in jobs.items():
        status, output = launch.finish(job)
        assert status == 1, output  # torchrun's own
        assert_told_once(output, line)
        assert "exitcode  : 2 " in output.partition("Root Cause")[2], output
    assert not list(tmp_path.glob("snapshot.pt*"))


@pytest.mark.parametrize(
    ("node", "wrong"),
    [
        (1, "argument"),
        pytest.param(0, "argument", marks=pytest.mark.long),
        pytest.param(1, "snapshot", marks=pytest.mark.long),
    ],
)
def test_mistake_on_one_of_two_machines_ends_both(tmp_path, node, wrong):
    """Typed or found on either machine, it is told once, and the other does not wait."""
    endpoint = f"localhost:{launch.free_port()}"
    folders = [tmp_path / "0", tmp_path / "1"]
    args = [(1000,), (1000,)]
    if wrong == "argument":
        args[node] = (1000, 0)
    else:
        folders[node].mkdir()
        (folders[node] / "snapshot.pt").write_text("damaged")
    agents = [
        launch.start(launch.agent(endpoint, *arguments), folder)
        for arguments, folder in zip(args, folders, strict=True)
    ]
    ends = [launch.finish(agent) for agent in agents]
    assert [status for status, _ in ends] == [1, 1]
    line = "save_every: " if wrong == "argument" else "snapshot.pt is damaged"
    assert_told_once("".join(output for _, output in ends), line)
