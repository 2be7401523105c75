"""One GPU for each process: the one that a wrapper shows it, and never one for two."""

import os
import socket
import sys

import pytest
import torch
import torch.distributed as dist
from launch import in_processes

from plumbing import agree, devices


@pytest.mark.parametrize(
    ("visible", "local_rank", "index"), [(4, 3, 3), (1, 0, 0), (1, 3, 0), (2, 1, 1)]
)
def test_the_gpu_of_a_local_rank(monkeypatch, visible, local_rank, index):
    """Local rank 3 takes GPU 3, or the one GPU that it sees."""
    monkeypatch.setattr(devices, "count_gpus", lambda: visible)
    kind = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: kind)
    assert devices.device_of(local_rank) == torch.device("cuda", index)


def test_without_a_gpu_the_cpu():
    assert devices.device_of(3) == torch.device("cpu")


def test_which_ranks_share_a_gpu():
    own = [("n1", "cuda", "GPU-a"), ("n1", "cuda", "GPU-b"), ("n2", "cuda", "GPU-c")]
    assert devices.clash(own) is None
    assert devices.clash([("n1", "xpu", None), ("n1", "xpu", None)]) is None, "without names"
    told = devices.clash([*own, ("n2", "cuda", "GPU-c")])
    assert told == ("ranks 2 and 3 use the same GPU, GPU-c of n2. Start one process for each GPU")


def test_a_rank_without_a_gpu_is_named():
    told = devices.clash([("n1", "cuda", "GPU-a"), ("n2", "cpu", None)])
    kinds = "rank 0 on n1 has a cuda, rank 1 on n2 a cpu"
    assert told == f"not all ranks have the same kind of device: {kinds}. Run check_cluster.py"


def two_on_one_gpu(rank, init_method, folder):
    os.environ["LOCAL_RANK"] = "0"  # each prints, as on a machine of its own
    sys.stderr = open(folder / f"errors{rank}.log", "w", buffering=1)
    dist.init_process_group("gloo", init_method, rank=rank, world_size=2)
    devices.count_gpus = lambda: 1
    devices.current_device = lambda: torch.device("cuda", 0)
    devices.name_of_gpu = lambda device: "GPU-a"
    agree.all_exit_if_devices_clash()


def test_two_processes_on_one_gpu_are_refused(tmp_path):
    """Each sees a single GPU with index 0, and the names are equal. One line, and status 2."""
    with pytest.raises(Exception, match="exit code 2"):
        in_processes(2, two_on_one_gpu, tmp_path)
    where = f"GPU-a of {socket.gethostname()}"
    line = f"ERROR: ranks 0 and 1 use the same GPU, {where}. Start one process for each GPU\n"
    assert [(tmp_path / f"errors{rank}.log").read_text() for rank in (0, 1)] == [line, line]
