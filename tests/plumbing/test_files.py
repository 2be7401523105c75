"""What is saved can be read back, under the names of any model; and who may use it."""

import collections
import copy
import datetime
import os
import socket
import sys
from pathlib import Path

import launch
import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from launch import in_processes
from torch import nn

from plumbing import agree, files

CURE = "Make it a plain number, text, list or dict"


def model():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def test_a_snapshot_that_cannot_be_read_is_not_saved(tmp_path):
    """The line names the part, and the file of before stays."""
    path = tmp_path / "snapshot.pt"
    path.write_bytes(b"good")
    for value, kind in [
        (np.float64(0.1), "numpy.float64"),
        (collections.deque([1]), "collections.deque"),
        (Path("here"), "pathlib.PosixPath"),
        (datetime.date(2026, 12, 1), "datetime.date"),
    ]:
        content = {"model": model().state_dict(), "best": [{"loss": value}], "epochs_run": 3}
        with pytest.raises(agree.Refused) as refused:
            files.write_atomically(content, str(path))
        told = f"['best'][0]['loss'] is a {kind}, which torch.load would not read back. {CURE}"
        assert str(refused.value) == told
        assert os.listdir(tmp_path) == ["snapshot.pt"] and path.read_bytes() == b"good"


def test_a_key_that_cannot_be_read_is_named(tmp_path):
    content = {"model": {}, "counts": {np.int64(3): 1}}
    with pytest.raises(agree.Refused) as refused:
        files.write_atomically(content, str(tmp_path / "snapshot.pt"))
    told = "a key of ['counts'] is a numpy.int64, which torch.load would not read back"
    assert str(refused.value) == f"{told}. {CURE}"


def test_what_only_one_side_contains_is_a_misfit():
    one, more = (
        {"state": {0: torch.ones(2)}},
        {"state": {0: torch.ones(2), 1: {"a": torch.ones(3)}}},
    )
    assert files.misfit(more, one) == "state 1 a is [3] there, missing here"
    assert files.misfit(one, more) == "state 1 a is missing there, [3] here"
    assert files.misfit(None, one) == "state 0 is missing there, [2] here"
    assert files.misfit(one, one) is None


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda parts: st.lists(parts) | st.tuples(parts) | st.dictionaries(st.text(), parts),
    max_leaves=20,
)


@settings(max_examples=50, deadline=None)
@given(PLAIN)
def test_plain_values_can_be_saved(value):
    assert files.cannot_be_read_back(value, "") is None


@pytest.mark.parametrize("script", ["multigpu_torchrun.py", "multinode.py"])
def test_an_optimizer_that_cannot_be_saved_is_refused_before_training(script):
    """The usual lr * np.sqrt(world_size) makes a number of numpy."""
    own = launch.edited(
        launch.ROOT / script,
        "own.py",
        ("import torch\n", "import numpy as np\nimport torch\n"),
        ("lr=0.05", "lr=0.05 * np.sqrt(2)"),
    )
    status, output = launch.quickly(own, 2, 1, nproc=1)
    part = "optimizer.state_dict()['param_groups'][0]['lr'] is a numpy.float64"
    line = f"ERROR: {part}, which torch.load would not read back. {CURE}\n"
    assert status == {2} and line in output and "] Epoch" not in output, output


def test_a_value_of_numpy_in_a_snapshot_ends_the_job_at_its_first_save(tmp_path):
    """Rank 0 alone saves: one line, status 2, no traceback, and no file."""
    own = launch.edited(
        launch.TORCHRUN_SCRIPT,
        "own.py",
        ("import torch\n", "import numpy as np\nimport torch\n"),
        (
            '"epochs_run": epoch + 1,',
            '"epochs_run": epoch + 1,\n            "best": np.float32(1),',
        ),
    )
    status, output = launch.quickly(own, 2, 1, nproc=1)
    told = "ERROR: snapshot.pt is not saved: ['best'] is a numpy.float32, which torch.load would"
    assert status == {2} and told in output and "Traceback" not in output, output
    assert not list(tmp_path.glob("[!.]*.pt*"))


@pytest.mark.parametrize("saved_as", ["plain", "compiled", "compiled in part"])
@pytest.mark.parametrize("read_by", ["plain", "compiled", "compiled in part"])
def test_a_compiled_model_shares_its_files_with_a_plain_one(tmp_path, saved_as, read_by):
    """torch.compile puts `_orig_mod.` into names. The file has none, and each reads it."""

    def made(kind):
        built = model()
        if kind == "compiled in part":
            built[0] = torch.compile(built[0])
        return torch.compile(built) if kind == "compiled" else built

    path = str(tmp_path / "snapshot.pt")
    saved, read = made(saved_as), made(read_by)
    files.write_atomically({"model": saved.state_dict(), "optimizer": {}}, path)
    snapshot = files.load_whole(path, {"model"})
    assert list(snapshot["model"]) == list(model().state_dict())
    files.prepare(snapshot, read)
    assert files.misfit(snapshot["model"], read.state_dict()) is None
    read.load_state_dict(snapshot["model"])
    for one, other in zip(saved.parameters(), read.parameters(), strict=True):
        assert torch.equal(one, other)


def test_weights_of_a_compiled_model_have_plain_names_in_a_checkpoint(tmp_path):
    compiled = torch.compile(model())
    files.save_atomically(compiled.state_dict(), str(tmp_path / "checkpoint.pt"))
    model().load_state_dict(torch.load(tmp_path / "checkpoint.pt", weights_only=True))


SGD, ADAM, ADAMW = (
    lambda model, made=made: made(model.parameters(), lr=0.1)
    for made in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
)


@pytest.mark.parametrize(
    ("before", "now", "known", "told"),
    [
        (ADAM, ADAMW, True, "(Adam, not AdamW)"),
        (ADAMW, ADAM, True, "(AdamW, not Adam)"),
        (ADAM, SGD, True, "(Adam, not SGD)"),
        (SGD, ADAM, False, "(than this Adam)"),
        (ADAM, ADAMW, False, None),  # their numbers have the same names
        (ADAMW, ADAMW, True, None),
    ],
)
def test_the_class_of_the_optimizer_is_compared(before, now, known, told):
    """Where it is known: an older snapshot does not contain it."""
    here = model()
    optimizer = before(here)
    snapshot = {"model": here.state_dict(), "optimizer": optimizer.state_dict()}
    if known:
        snapshot["optimizer_class"] = type(optimizer).__name__
    if told is None:
        files.refuse_misfit(snapshot, here, now(here))
        return
    with pytest.raises(agree.Refused) as refused:
        files.refuse_misfit(snapshot, here, now(here))
    assert str(refused.value) == f"is of a different optimizer {told}: use that"


def test_the_digest_is_that_of_the_content(tmp_path):
    content = {"model": model().state_dict(), "epochs_run": 3}
    for name, each in [("a.pt", content), ("b.pt", content), ("c.pt", content | {"epochs_run": 4})]:
        files.write_atomically(each, str(tmp_path / name))
    one, other, different = (files.digest_of(tmp_path / name) for name in ("a.pt", "b.pt", "c.pt"))
    assert one == other != different


def on_hosts(rank, init_method, folder, function):
    """Run `function(rank, folder)` on ranks that are each on a host of their own."""
    os.environ["LOCAL_RANK"] = "0"
    socket.gethostname = lambda: f"n{rank}"
    os.chdir(folder / f"n{rank}")
    sys.stderr = open("errors.log", "w", buffering=1)
    dist.init_process_group("gloo", init_method, rank=rank, world_size=2)
    function(rank)
    dist.destroy_process_group()


def run_on_hosts(function, folder, ends=True):
    """Return what two hosts print to stderr, which end with status 2 or, if not `ends`, well."""
    for name in "n0", "n1":
        (folder / name).mkdir(exist_ok=True)
    if ends:
        with pytest.raises(Exception, match="exit code 2"):
            in_processes(2, on_hosts, folder, function)
    else:
        in_processes(2, on_hosts, folder, function)
    return "".join((folder / name / "errors.log").read_text() for name in ("n0", "n1"))


def job():
    built = model()
    return built, torch.optim.SGD(built.parameters(), lr=0.1, momentum=0.9)


def save(path, job_id="0f0f0f0f", epochs_run=3):
    built, optimizer = job()
    content = {"model": built.state_dict(), "optimizer": optimizer.state_dict()}
    content |= {"epochs_run": epochs_run, "seed": 0, "job_id": job_id}
    path.parent.mkdir(exist_ok=True)
    files.write_atomically(content, str(path))


def read(rank):
    return files.all_read_snapshot("snapshot.pt", *job())


def read_on_one_disk(rank):
    files.all_exit_if_disks_differ(read(rank))


def test_a_file_that_is_damaged_is_told_with_its_host(tmp_path):
    """Both hosts end, and each says which of the two has to be looked at."""
    for name in "n0", "n1":
        save(tmp_path / name / "snapshot.pt")
    (tmp_path / "n1" / "snapshot.pt").write_bytes(b"damaged")
    line = "ERROR: on n1: snapshot.pt is damaged or no snapshot: move it away, or choose a "
    assert run_on_hosts(read, tmp_path).count(line) == 2


def test_snapshots_of_two_jobs_are_told_with_their_hosts(tmp_path):
    save(tmp_path / "n0" / "snapshot.pt", "aaaaaaaa")
    save(tmp_path / "n1" / "snapshot.pt", "bbbbbbbb")
    where = "that on n0 is of job aaaaaaaa; that on n1 is of job bbbbbbbb. Keep one job's"
    line = f"ERROR: snapshot.pt is not of the same job on all machines: {where}\n"
    assert run_on_hosts(read, tmp_path).count(line) == 2


@pytest.mark.parametrize(
    ("epochs", "found"), [((3, 0), "one of epoch 3 on n0, none on n1"), ((0, 0), None)]
)
def test_a_script_for_one_disk_refuses_two(tmp_path, epochs, found):
    """multigpu_torchrun.py on machines with a disk each: it names the script for that."""
    for name, number in zip(("n0", "n1"), epochs, strict=True):
        if number:
            save(tmp_path / name / "snapshot.pt", epochs_run=number)
    told = run_on_hosts(read_on_one_disk, tmp_path, ends=found is not None)
    cure = "If each machine has its own disk, start multinode.py instead"
    line = f"ERROR: the snapshot is not the same on all machines ({found}). {cure}\n"
    assert told.count(line) == (2 if found else 0), told


def tree():
    """What a snapshot may hold, of every kind: types, shapes, layouts, containers, plain values."""
    torch.manual_seed(0)
    return {
        "model": {
            "matrix": torch.randn(3, 5),
            "transposed": torch.randn(3, 5).t(),
            "number": torch.tensor(2.5),
            "empty": torch.empty(0, 4),
            "half": torch.randn(7).bfloat16(),
            "flags": torch.tensor([True, False]),
            "count": torch.tensor(7, dtype=torch.int64),
            "complex": torch.randn(2, dtype=torch.complex64),
        },
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1}]},
        "sizes": (32, 2),
        "note": None,
    }


def broadcast(rank):
    mine = tree() if rank == 1 else {"model": {"matrix": torch.zeros(1)}}
    before = copy.deepcopy(mine)
    got = files.all_broadcast_snapshot(mine, src=1)
    torch.testing.assert_close(got, tree(), rtol=0, atol=0)
    torch.testing.assert_close(mine, before, rtol=0, atol=0)  # nothing is written into it


def test_a_snapshot_arrives_as_it_was_sent(tmp_path):
    run_on_hosts(broadcast, tmp_path, ends=False)
