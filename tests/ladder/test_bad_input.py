"""Bad input: one line that names it, exit status 2, no traceback, nothing written."""

import importlib
import io
import os
import pickle
import re
import sys
import zipfile
from itertools import product
from pathlib import Path

import launch
import pytest
import torch
import torch.distributed as dist

import plumbing
from plumbing import devices

SCRIPTS = ("single_gpu", "multigpu", "multigpu_torchrun", "multinode")


WITH_SNAPSHOT = SCRIPTS[2:]


COUNTS = [("multigpu", "nproc")]


COUNTS += product(SCRIPTS, ("total_epochs", "save_every", "batch_size", "seed"))


COUNTS += product(WITH_SNAPSHOT, ("timeout",))


each_script = pytest.mark.parametrize("script", SCRIPTS)


each_with_snapshot = pytest.mark.parametrize("script", WITH_SNAPSHOT)


# @record wants a stderr with a file descriptor, which the captured one is not.
pytestmark = pytest.mark.filterwarnings("ignore:Unable to enable fault handler")


# What a reader may do to a script: a dataset without samples, and batches that no rank can fill.
EMPTY = ("MyTrainDataset(2048)", "MyTrainDataset(0)")


NO_STEP = ("batch_size=batch_size", "batch_size=4096, drop_last=True")


@pytest.fixture
def start(monkeypatch):
    """Give `start(script, *args)`: runs a script in this process, the only one of its job."""
    for name, value in launch.alone().items():
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
        return {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("[!.]*")}

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


@pytest.mark.parametrize("value", ["0", "-1", "ten", "1.5", "", str(2**31), "9" * 5000])
@pytest.mark.parametrize(("script", "name"), COUNTS)
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
    for module in plumbing, devices:
        monkeypatch.setattr(module, "count_gpus", lambda: 1)
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


def changed(good, **parts):
    """The bytes of a snapshot with some of its parts replaced."""
    return packed(torch.load(io.BytesIO(good)) | parts)


def without(good, part):
    snapshot = torch.load(io.BytesIO(good))
    del snapshot[part]
    return packed(snapshot)


def model_of(hidden=2048):
    return torch.nn.Sequential(
        torch.nn.Linear(20, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 4)
    )


def archive(good):
    """A zip file that has nothing to do with torch."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as zipped:
        zipped.writestr("a.txt", "It was a dark and stormy night.")
    return file.getvalue()


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def in_two_groups(model):
    groups = [{"params": layer.parameters()} for layer in (model[0], model[2])]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


# What is told of a file: what it is, and what to do. A good file of other jobs is worth keeping.
DAMAGED = ("is damaged or no snapshot", "move it away, or choose a different --snapshot_path")


NO_SNAPSHOT = (
    "is no snapshot of this script",
    "use the one that wrote it, or choose a different --snapshot_path",
)


DIFFERENT_MODEL = ("is of a different model", "use that, or choose a different --snapshot_path")


DIFFERENT_GROUPS = ("is of a different optimizer (than this SGD)", DIFFERENT_MODEL[1])


DIFFERENT_OPTIMIZER = ("is of a different optimizer (AdamW, not SGD)", DIFFERENT_MODEL[1])


RUNS_CODE = (
    "has objects in it that could run code, and is not read",
    "save only plain values, or choose a different --snapshot_path",
)


BAD_SNAPSHOTS = [
    ("empty", DAMAGED, lambda good: b""),
    ("cut after a byte", DAMAGED, lambda good: good[:1]),
    ("cut after 100 bytes", DAMAGED, lambda good: good[:100]),
    ("cut in half", DAMAGED, lambda good: good[: len(good) // 2]),
    ("cut before the last byte", DAMAGED, lambda good: good[:-1]),
    ("one bit of a weight flipped", DAMAGED, flipped),
    ("a text", DAMAGED, lambda good: b"It was a dark and stormy night.\n"),
    ("another archive", DAMAGED, archive),
    ("a pickle that runs code", DAMAGED, lambda good: pickle.dumps(RunsCode(), protocol=2)),
    ("a list", NO_SNAPSHOT, lambda good: packed([1, 2])),
    ("only weights", NO_SNAPSHOT, lambda good: packed(torch.load(io.BytesIO(good))["model"])),
    ("without its epochs", NO_SNAPSHOT, lambda good: without(good, "epochs_run")),
    ("without its seed", NO_SNAPSHOT, lambda good: without(good, "seed")),
    (
        "other layers",
        DIFFERENT_MODEL,
        lambda good: changed(good, model=torch.nn.Linear(20, 4).state_dict()),
    ),
    (
        "layers of another size",
        DIFFERENT_MODEL,
        lambda good: changed(good, model=model_of(hidden=64).state_dict()),
    ),
    (
        "AdamW",
        DIFFERENT_OPTIMIZER,
        lambda good: changed(
            good, optimizer=adamw(model_of()).state_dict(), optimizer_class="AdamW"
        ),
    ),
    (
        "AdamW, by its options only",
        DIFFERENT_GROUPS,
        lambda good: changed(good, optimizer=adamw(model_of()).state_dict()),
    ),
    (
        "two groups of weights",
        DIFFERENT_GROUPS,
        lambda good: changed(good, optimizer=in_two_groups(model_of()).state_dict()),
    ),
    ("code among the tensors", RUNS_CODE, lambda good: changed(good, extra=RunsCode())),
]


@pytest.mark.parametrize(
    ("told", "spoiled"), [pytest.param(*rest, id=kind) for kind, *rest in BAD_SNAPSHOTS]
)
@each_with_snapshot
def test_file_that_is_no_snapshot(refusal, good, tmp_path, script, told, spoiled):
    """It stays as it is, no code in it runs, and the line says which of these it is, and a cure."""
    (tmp_path / "snapshot.pt").write_bytes(spoiled(good))
    line = refusal(script, "2")  # which also sees that no file `ran` appears
    problem, cure = told
    there = r"(missing|\[64, 20\])"
    detail = rf" \(0\.weight is {there} there, \[2048, 20\] here\)"
    detail = detail if told is DIFFERENT_MODEL else ""
    pattern = f"ERROR: snapshot\\.pt {re.escape(problem)}{detail}: {re.escape(cure)}\n"
    assert re.fullmatch(pattern, line), line


def test_the_page_of_messages_has_each_kind():
    """docs/troubleshooting.md can be searched for what these tests have seen."""
    text = (launch.ROOT / "docs" / "troubleshooting.md").read_text()
    told = {problem.partition(" (")[0] for _, (problem, _), _ in BAD_SNAPSHOTS}
    told |= {"cannot be read", "the dataset has 0 samples, nothing to train on"}
    told |= {"an epoch has no step", "torchrun is not for this script"}
    assert {problem for problem in told if problem not in text} == set()


@pytest.mark.parametrize(
    ("optimizer", "told"), [(adamw, "SGD, not AdamW"), (in_two_groups, "than this SGD")]
)
@each_with_snapshot
def test_snapshot_of_another_optimizer_than_the_readers(
    refusal, good, tmp_path, monkeypatch, script, optimizer, told
):
    """The reader's script has got another one since the snapshot was saved: it is told apart."""
    module = importlib.import_module(script)
    dataset, model, _ = module.load_train_objs(0)
    monkeypatch.setattr(module, "load_train_objs", lambda seed: (dataset, model, optimizer(model)))
    (tmp_path / "snapshot.pt").write_bytes(good)
    cure = "use that, or choose a different --snapshot_path"
    assert refusal(script) == (f"ERROR: snapshot.pt is of a different optimizer ({told}): {cure}\n")


@each_with_snapshot
def test_error_in_the_readers_own_resume(good, tmp_path, script):
    """It is told as what it is, a traceback, and not as a bad file; the file stays as it is."""
    resume = ('self.job_id = snapshot["job_id"]', 'self.step = snapshot["scheduler"]')
    own = launch.edited(launch.ROOT / f"{script}.py", f"own_{script}.py", resume)
    (tmp_path / "snapshot.pt").write_bytes(good)
    status, output = launch.quickly(own, 2)
    assert status == {1}
    assert output.count("KeyError: 'scheduler'\n") == 1 and resume[1] in output
    assert "ERROR: " not in output and "damaged" not in output
    assert (tmp_path / "snapshot.pt").read_bytes() == good


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
    assert "] Epoch" not in output


def test_nothing_to_train_on(tmp_path):
    """No sample, or too few for a step: a line with the sizes, exit status 2, nothing saved."""
    few = "an epoch has no step: {} samples for each process, batch size 4096"
    lines = {EMPTY: "the dataset has 0 samples, nothing to train on", NO_STEP: few}
    for script in SCRIPTS:
        nproc = 1 if script == "single_gpu" else 2
        for change, line in lines.items():
            own = launch.edited(launch.ROOT / f"{script}.py", f"own_{script}.py", change)
            status, output = launch.quickly(own, 1, nproc=nproc)
            assert status == {2}, output
            assert_told_once(output, line.format(2048 // nproc))
            assert "Traceback" not in output
    assert not list(tmp_path.glob("[!.]*.pt*"))


def test_multigpu_ends_as_its_processes_do(tmp_path):
    """They have said why and ended with status 2: so does the parent, with nothing to add."""
    own = launch.edited(launch.MULTI, "own_multigpu.py", EMPTY)
    (tmp_path / "temporary").mkdir()
    env = {"PYTHONPATH": str(launch.ROOT), "TMPDIR": str(tmp_path / "temporary")}
    output = launch.run(launch.python(own), status=2, **env)
    lines = [line for line in output.splitlines() if not line.startswith("Rank: ")]
    assert lines == ["ERROR: the dataset has 0 samples, nothing to train on"]
    assert not list(tmp_path.glob("[!.]*.pt*")) and not os.listdir("temporary")


def test_torchrun_is_not_for_every_script():
    """Processes that do not know of one another would write one file: none starts to train."""
    assert_not_for_torchrun(launch.SINGLE)


def assert_not_for_torchrun(script):
    output = launch.run(launch.torchrun(script, 1), status=1)
    assert_told_once(
        output, f"torchrun is not for this script: start it once, with: python {script}"
    )
    assert "exitcode  : 2 " in output.partition("Root Cause")[2], output
    assert not list(Path().glob("*.pt*")) and "Rank: " not in output


@pytest.mark.parametrize(("script", "refused"), [("single_gpu", False), ("multigpu", True)])
def test_torchrun_with_one_process(start, capsys, monkeypatch, script, refused):
    """Training on one device does not mind; a script that starts the others itself is refused."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "456")  # torchrun sets it
    if not refused:
        start(script)
        return
    with pytest.raises(SystemExit) as end:
        start(script)
    assert end.value.code == 2
    line = f"ERROR: torchrun is not for this script: start it once, with: python {script}.py\n"
    assert capsys.readouterr().err == line


def test_scripts_end_with_one_line_and_status_2():
    """Started as a reader starts them, without a launcher."""
    value = "total_epochs: give a whole number from 1 to 2147483647, not 'x'"
    for script in launch.SINGLE, launch.MULTI:
        name = script.rpartition("/")[2]
        output = launch.run(launch.python(script, "x"), 30, status=2)
        assert output == f"{name}: error: {value}\n"


def test_mistake_on_one_of_two_machines_ends_both(tmp_path):
    """Both say why, once, and the other does not wait."""
    assert_mistake_ends_both(tmp_path, 1, "argument")


def assert_mistake_ends_both(tmp_path, node, wrong):
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
    for _, output in ends:
        assert_told_once(output, line)
