"""Snapshots: what takes longer to see."""

import shutil

import launch
import pytest
import torch
from test_snapshots import CPU, assert_same, load, losses, saves


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Jobs of six epochs, one unbroken and one broken after three: their folder and outputs."""
    base, outputs = tmp_path_factory.mktemp("runs"), {}
    for name, epochs in ("unbroken", 6), ("broken", 3):
        given = (launch.TORCHRUN_SCRIPT, epochs, 2, "--seed", 5)
        status, outputs[name] = launch.quickly(*given, nproc=2, cwd=base / name)
        assert status == {0}, outputs[name]
    return base, outputs


def finish_all(processes):
    """Wait for all of `processes`, expect exit status 0 and return their outputs."""
    ends = [launch.finish(process, 90) for process in processes]
    for status, output in ends:
        assert status == 0, output
    return [output for _, output in ends]


@pytest.mark.parametrize(
    "where", ["the first", "the second", "an older one on the first", "a disk that both share"]
)
def test_two_machines_go_on_from_the_newest_snapshot_of_any(runs, tmp_path, where):
    """Wherever the snapshot lies, two agents go on from it and end where an unbroken job ends."""
    base, outputs = runs
    one, other = tmp_path / "one", tmp_path / ("one" if "share" in where else "other")
    for folder in {one, other}:
        folder.mkdir()
    newest = one if where in ("the first", "a disk that both share") else other
    shutil.copy(base / "broken" / "snapshot.pt", newest)
    if "older" in where:
        snapshot = load(newest)
        for weight in snapshot["model"].values():
            weight.zero_()
        torch.save({**snapshot, "epochs_run": 2, "seed": 3}, one / "snapshot.pt")
    endpoint = f"localhost:{launch.free_port()}"
    agents = [launch.start(launch.agent(endpoint, 6, 2), folder, **CPU) for folder in (one, other)]
    output = "".join(finish_all(agents))
    assert output.count("Resuming training from snapshot at Epoch 3\n") == 1
    assert saves(output) == [3, 5]
    assert losses(outputs["broken"] + output) == losses(outputs["unbroken"])
    snapshots = [load(folder) for folder in {one, other} if (folder / "snapshot.pt").exists()]
    (last,) = (snapshot for snapshot in snapshots if snapshot["epochs_run"] == 6)
    assert_same(last, load(base / "unbroken"))
