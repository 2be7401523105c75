from functools import cache

import launch
import pytest
import torch


@pytest.fixture(autouse=True)
def on_the_cpu_in_an_empty_folder(request, monkeypatch, tmp_path):
    """Every test starts in a folder of its own and, unless it is marked `gpu`, sees no GPU."""
    marker = request.node.get_closest_marker("gpu")
    if marker is None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    elif torch.cuda.device_count() < marker.args[0]:
        pytest.skip(f"needs {marker.args[0]} GPUs, this machine has {torch.cuda.device_count()}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory):
    """`unbroken(nproc, epochs)` is the snapshot that multinode.py leaves on one machine."""

    @cache
    def unbroken(nproc, epochs):
        folder = tmp_path_factory.mktemp(f"unbroken-{nproc}-{epochs}")
        command = launch.torchrun(launch.MULTINODE, epochs, epochs, nproc=nproc)
        launch.run(command, cwd=folder, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
        return folder / "snapshot.pt"

    return unbroken
