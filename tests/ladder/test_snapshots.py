"""Snapshots: what is saved, when and by whom, and that a resumed run is the unbroken one."""

import re
import shutil
from functools import cache

import launch
import pytest
import torch

CPU = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(launch.ROOT)}


# A driver is a script of ours with one thing changed, and starts as the script itself does.
WITH_DROPOUT = """
import {script} as script
from torch import nn
build = script.build_model
script.build_model = lambda: nn.Sequential(nn.Dropout(0.1), build())
script.main(script.parse_args())
"""


DYING_IN_THE_SECOND_SAVE = """
import os, signal, torch
import multigpu_torchrun as script
def die(*args, **kwargs):
    if "{call}" == "torch.save":
        args[1].write(b"the first half of a snapsh")
        args[1].flush()
    os.kill(os.getpid(), signal.SIGKILL)
save_snapshot = script.Trainer._save_snapshot
def save_once(trainer, epoch):
    save_snapshot(trainer, epoch)
    {call} = die
script.Trainer._save_snapshot = save_once
script.main(script.parse_args())
"""


def driver(folder, name, text):
    (folder / name).write_text(text)
    return str(folder / name)


def load(folder):
    return torch.load(folder / "snapshot.pt", weights_only=True)


def assert_same(one, other, tolerance=0, own=("job_id",)):
    """Same weights, optimizer, epochs, seed and sizes. What is each job's `own` is left out."""
    for snapshot in one, other:
        assert any(
            state["momentum_buffer"].any() for state in snapshot["optimizer"]["state"].values()
        )
    one, other = ({**snapshot, **dict.fromkeys(own)} for snapshot in (one, other))
    launch.assert_equal(one, other, tolerance)


def told_at_resume(output):
    """What is not as it was in the snapshot, or that nothing is left: the lines that say so."""
    form = r"^(The snapshot's seed .*|Global batch size: .* snapshot|Nothing left .*)$"
    return re.findall(form, output, re.MULTILINE)


def losses(output):
    """All `(rank, epoch, loss)` that a job printed, in no order of ranks."""
    return sorted(re.findall(r"\[rank (\d+)\] Epoch (\d+) .* Loss: (\S+)", output))


def saves(output):
    return [int(epoch) for epoch in re.findall(r"Epoch (\d+) \| Training snapshot saved", output)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """`runs(model)`: jobs of six epochs, unbroken and broken after three: folders and outputs.

    The broken ones go on with another --seed, which must not count: the snapshot has one. Those
    with Dropout go on in multinode.py, which must not matter either. One of these has three
    processes, because a sum of three numbers depends on their order.
    """
    base = tmp_path_factory.mktemp("runs")
    dropout, dropout_multinode = (
        driver(base, f"{name}_with_dropout.py", WITH_DROPOUT.format(script=name))
        for name in ("multigpu_torchrun", "multinode")
    )
    plain = launch.TORCHRUN_SCRIPT
    models = {
        "plain": (2, plain, plain),
        "dropout": (2, dropout, dropout_multinode),
        "three": (3, dropout, dropout_multinode),
    }

    @cache
    def runs(model):
        nproc, first, second = models[model]

        outputs = []
        for name, epochs in ("unbroken", 6), ("broken", 3):
            given = (first, epochs, 2, "--seed", 5)
            status, output = launch.quickly(*given, nproc=nproc, cwd=base / f"{model}-{name}")
            assert status == {0}, output
            outputs.append(output)
        shutil.copytree(base / f"{model}-broken", base / f"{model}-resumed")
        command = launch.torchrun(second, 6, 2, "--seed", 9, nproc=nproc)
        outputs.append(launch.run(command, cwd=base / f"{model}-resumed", **CPU))
        names = (f"{model}-{name}" for name in ("unbroken", "broken", "resumed"))
        return base, dict(zip(names, outputs, strict=True))

    return runs


@pytest.mark.parametrize("name", ["plain-resumed", "dropout-resumed"])
def test_resumed_run_ends_bitwise_where_an_unbroken_one_ends(runs, name):
    """Same weights, same momentum, same losses on the way, and each epoch exactly once."""
    model = name.split("-")[0]
    base, outputs = runs(model)
    assert_same(load(base / name), load(base / f"{model}-unbroken"))
    assert losses_of_resumed(outputs, model, ranks="01") == losses(outputs[f"{model}-unbroken"])


def test_resumed_run_of_three_processes_ends_close_to_an_unbroken_one(runs):
    """DDP adds three numbers in an order that may differ after a resume: up to rounding the same.

    Here as well each epoch is trained exactly once.
    """
    base, outputs = runs("three")
    assert_same(load(base / "three-resumed"), load(base / "three-unbroken"), tolerance=1e-5)
    both = losses_of_resumed(outputs, "three", ranks="012")
    printed, unbroken = (
        [float(loss) for *_, loss in each] for each in (both, losses(outputs["three-unbroken"]))
    )
    assert printed == pytest.approx(unbroken, abs=1e-5)


def losses_of_resumed(outputs, model, ranks):
    """What the broken and the resumed job printed: each of these ranks each epoch exactly once."""
    resumed = outputs[f"{model}-resumed"]
    both = losses(outputs[f"{model}-broken"] + resumed)
    assert [line[:2] for line in both] == [(r, e) for r in ranks for e in "012345"]
    assert resumed.count("Resuming training from snapshot at Epoch 3\n") == 1
    assert told_at_resume(resumed) == ["The snapshot's seed stays, 5, not 9"]
    assert "Resuming" not in outputs[f"{model}-broken"]
    return both


def test_one_process_writes_and_leaves_nothing_else(runs):
    """One line for each save, and only the snapshot in the folder."""
    base, outputs = runs("plain")
    assert saves(outputs["plain-unbroken"]) == [1, 3, 5]
    assert saves(outputs["plain-broken"]) == [1, 2]
    assert saves(outputs["plain-resumed"]) == [3, 5]
    files = {path.name for path in (base / "plain-resumed").glob("[!.]*")}
    assert files == {"snapshot.pt", "output-0.log", "output-1.log"}


def test_goes_on_with_another_number_of_processes(runs, tmp_path):
    """2 -> 1 and 1 -> 2 with the same global batch go on where an unbroken run does."""
    base, _ = runs("plain")
    two_to_one, one_to_two = tmp_path / "two-to-one", tmp_path / "one-to-two"
    two_to_one.mkdir()
    shutil.copy(base / "plain-broken" / "snapshot.pt", two_to_one)
    script = launch.TORCHRUN_SCRIPT
    one, ends = launch.quickly(script, 6, 2, "--batch_size", 64, cwd=two_to_one)
    given = (script, 3, 2, "--batch_size", 64, "--seed", 5)
    other, begins = launch.quickly(*given, cwd=one_to_two)
    assert one == other == {0}, ends + begins
    goes_on = launch.run(launch.torchrun(script, 6, 2), cwd=one_to_two)
    assert [epoch for _, epoch, _ in losses(begins)] == ["0", "1", "2"]
    assert [line[:2] for line in losses(ends)] == [("0", e) for e in "345"]
    assert [line[:2] for line in losses(goes_on)] == [(r, e) for r in "01" for e in "345"]
    for output in ends, goes_on:
        assert "Resuming training from snapshot at Epoch 3\n" in output
    one, two = "64 (64 x 1 processes)", "64 (32 x 2 processes)"
    seed = "The snapshot's seed stays, 5, not 0"
    assert told_at_resume(ends) == [seed, f"Global batch size: {one}, but {two} in the snapshot"]
    assert told_at_resume(goes_on) == [seed, f"Global batch size: {two}, but {one} in the snapshot"]
    for folder in two_to_one, one_to_two:
        other = load(base / "plain-unbroken")
        assert_same(load(folder), other, tolerance=3e-5, own=("job_id", "sizes"))
    assert load(two_to_one)["sizes"] == (64, 1) and load(one_to_two)["sizes"] == (32, 2)


@pytest.mark.parametrize("script", [launch.TORCHRUN_SCRIPT, launch.MULTINODE])
def test_a_resume_tells_what_is_not_as_it_was(script, good, tmp_path):
    """Nothing, if all is; the seed; the sizes; both; and rank 0 alone tells it."""
    seed = "The snapshot's seed stays, 0, not 9"
    sizes = "Global batch size: {}, but 32 (32 x 1 processes) in the snapshot"
    cases = [
        ((), 1, []),
        (("--seed", 9), 1, [seed]),
        (("--batch_size", 16), 2, [sizes.format("32 (16 x 2 processes)")]),
        (("--batch_size=512", "--seed=9"), 2, [seed, sizes.format("1024 (512 x 2 processes)")]),
    ]
    for args, nproc, lines in cases:
        (tmp_path / "snapshot.pt").write_bytes(good)
        status, output = launch.quickly(script, 2, *args, nproc=nproc)
        assert status == {0} and told_at_resume(output) == lines, output
        assert output.count("Resuming training from snapshot at Epoch 1\n") == 1
        assert load(tmp_path)["seed"] == 0


@pytest.mark.parametrize("script", [launch.TORCHRUN_SCRIPT, launch.MULTINODE])
def test_a_finished_job_says_that_nothing_is_left(script, good, tmp_path):
    """And what to delete to begin anew; the file stays as it is."""
    path = tmp_path / "other.pt"
    path.write_bytes(good)
    status, output = launch.quickly(script, 1, "--snapshot_path", path, nproc=2)
    assert status == {0} and "] Epoch" not in output
    line = f"Nothing left to train. To begin anew, delete {path}"
    assert told_at_resume(output)[1:] == [line]  # after the sizes
    assert path.read_bytes() == good
    path.unlink()
    status, output = launch.quickly(script, 1, "--snapshot_path", path)
    assert status == {0} and output.count("] Epoch 0 |") == 1
    assert told_at_resume(output) == []


@pytest.mark.parametrize("script", [launch.TORCHRUN_SCRIPT, launch.MULTINODE])
def test_a_snapshot_of_an_older_version_goes_on(script, good, tmp_path):
    """One without sizes and class ends where one with them ends, and nothing is told of sizes."""
    new, old = tmp_path / "new", tmp_path / "old"
    for folder in new, old:
        folder.mkdir()
        (folder / "snapshot.pt").write_bytes(good)
    snapshot = load(old)
    assert snapshot.pop("sizes") == (32, 1) and snapshot.pop("optimizer_class") == "SGD"
    torch.save(snapshot, old / "snapshot.pt")
    for folder, lines in ((new, 1), (old, 0)):
        status, output = launch.quickly(script, 2, "--batch_size", 512, nproc=2, cwd=folder)
        assert status == {0}, output
        assert output.count("Resuming training from snapshot at Epoch 1\n") == 1
        assert len(told_at_resume(output)) == lines, output
    assert_same(load(old), load(new))


def test_saves_every_so_many_epochs_and_after_the_last(tmp_path):
    """The save points, and a file that counts the finished epochs."""
    points = {(5, 5): [4], (5, 3): [2, 4], (1, 10): [0], (3, 1): [0, 1, 2]}
    for (total, every), epochs in points.items():
        folder = tmp_path / f"{total}-{every}"
        _, output = launch.quickly(launch.TORCHRUN_SCRIPT, total, every, cwd=folder)
        assert saves(output) == epochs
        assert load(folder)["epochs_run"] == total


def test_save_that_dies_leaves_the_last_snapshot_whole(tmp_path):
    """Killed half-way through writing, flushing or renaming, the job has its last snapshot."""
    folders = {call: tmp_path / call for call in ("torch.save", "os.fsync", "os.replace")}
    for call, folder in folders.items():
        dying = driver(tmp_path, f"{call}.py", DYING_IN_THE_SECOND_SAVE.format(call=call))
        status, output = launch.quickly(dying, 3, 1, cwd=folder)
        assert status == {-9}, output
        assert saves(output) == [0]
        assert load(folder)["epochs_run"] == 1
    folder = folders["torch.save"]
    assert list(folder.glob("*.tmp"))
    _, output = launch.quickly(launch.TORCHRUN_SCRIPT, 3, 1, cwd=folder)
    assert [epoch for _, epoch, _ in losses(output)] == ["1", "2"]
    assert load(folder)["epochs_run"] == 3
    assert not list(folder.glob("*.tmp"))


def test_snapshot_of_a_gpu_goes_on_without_that_gpu(runs, tmp_path, monkeypatch):
    """Tensors that were saved on another device are read to the CPU."""
    base, _ = runs("plain")
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:7")
        torch.save(load(base / "plain-broken"), tmp_path / "snapshot.pt")
    _, output = launch.quickly(launch.TORCHRUN_SCRIPT, 4)
    assert [epoch for _, epoch, _ in losses(output)] == ["3"]
