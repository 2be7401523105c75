"""On GPUs: a refusal is one line, a wrapper may show each process one GPU, a resume fits."""

import os
import re
import stat
import sys
from pathlib import Path

import pytest
import torch
from launch import LLM, ROOT, TORCHRUN_SCRIPT, edited, gpus, python, run, torchrun

from plumbing import files

WRAPPER = """#!/bin/sh
export CUDA_VISIBLE_DEVICES={shown}
exec "$@"
"""
LARGE = 64 * 2**20  # bytes of the largest tensor


def by_wrapper(shown, script, *args, nproc):
    """The command by which a site's wrapper shows each process the GPUs that `shown` names."""
    path = Path("wrapper.sh").resolve()
    path.write_text(WRAPPER.format(shown=shown))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    options = ("--standalone", "--no-python")
    return torchrun(str(path), sys.executable, script, *args, nproc=nproc, options=options)


@pytest.mark.gpu(1)
def test_a_refusal_is_one_line():
    """Neither NCCL nor torch adds a warning to it, before the report of torchrun."""
    output = run(torchrun(TORCHRUN_SCRIPT, 0, nproc=1), 100, status=1, **gpus(1))
    ours = output.partition("ERROR: ")[2].partition("\n")
    assert ours[0].startswith("total_epochs: give a whole number"), output
    assert not re.findall("(?i).*warning.*", output), output


@pytest.mark.gpu(1)
def test_the_end_of_training_that_diverges_is_one_line(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    own = edited(TORCHRUN_SCRIPT, "own.py", ("lr=0.05", "lr=1e30"))
    output = run(torchrun(own, 3, nproc=1), 100, status=1, **gpus(1))
    assert len(re.findall("^ERROR: training diverged, nothing is saved: ", output, re.M)) == 1
    assert not re.findall("(?i).*warning.*", output), output


@pytest.mark.gpu(2)
def test_a_wrapper_may_show_each_process_one_gpu():
    """Both processes then have device cuda:0, which are two GPUs."""
    output = run(by_wrapper("$LOCAL_RANK", TORCHRUN_SCRIPT, 2, nproc=2), 100, **gpus(2))
    assert output.count("Device: cuda:0") == output.count("] Epoch 1 |") == 2, output


@pytest.mark.gpu(1)
def test_two_processes_on_the_gpu_that_a_wrapper_shows_are_refused():
    output = run(by_wrapper("0", TORCHRUN_SCRIPT, 2, nproc=2), 100, status=1, **gpus(1))
    line = r"^ERROR: ranks 0 and 1 use the same GPU, \S+ of \S+\. Start one process for each GPU$"
    assert len(re.findall(line, output, re.M)) == 1 and "] Epoch" not in output, output


def sending(rank, init_method, folder):
    """Send a snapshot on the CPU by way of the GPU."""
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    torch.cuda.set_device(0)
    torch.distributed.init_process_group("nccl", init_method, rank=0, world_size=1)
    tensors = {str(number): torch.ones(LARGE // 4) for number in range(10)}
    before = torch.cuda.memory_allocated()
    files.all_broadcast_snapshot({"model": tensors}, src=0)
    peak = torch.cuda.max_memory_allocated() - before
    assert LARGE <= peak < 2 * LARGE, f"{peak / 2**20} MiB for tensors of {LARGE / 2**20}"
    torch.distributed.destroy_process_group()


@pytest.mark.gpu(1)
def test_a_gpu_holds_one_tensor_of_a_snapshot_at_a_time(tmp_path):
    (tmp_path / "driver.py").write_text(
        "import test_plumbing_on_gpus_long as own, pathlib\n"
        "own.sending(0, f'file://{pathlib.Path().resolve()}/store', None)\n"
    )
    paths = f"{ROOT}:{ROOT / 'tests'}:{Path(__file__).parent}"
    run(python("driver.py"), 100, PYTHONPATH=paths, **gpus(1))


@pytest.mark.gpu(1)
def test_a_real_run_refuses_two_processes_on_one_gpu():
    """training/ joins the group by itself: NCCL must not fail before the ranks can tell."""
    output = run(torchrun(LLM, nproc=2), 100, status=1, **gpus(1))
    assert len(re.findall("^ERROR: ranks 0 and 1 use the same GPU, ", output, re.M)) == 1, output
    assert "NCCL" not in output.partition("ERROR: ranks")[0], output


@pytest.mark.gpu(1)
def test_a_resume_gives_the_snapshot_up(monkeypatch):
    """AdamW counts its steps on the CPU: they must not be those of the file, which is replaced."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    sgd = "torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)"
    look = 'print("kept:", "snapshot.pt" in open("/proc/self/maps").read())'
    own = edited(
        TORCHRUN_SCRIPT,
        "own.py",
        (sgd, "torch.optim.AdamW(model.parameters(), lr=1e-3)"),
        ("        plumbing.report(", f"        {look}\n        plumbing.report("),
    )
    run(torchrun(own, 1, 1, nproc=1), 100, **gpus(1))
    output = run(torchrun(own, 3, 1, nproc=1), 100, **gpus(1))
    assert "Resuming" in output and output.count("kept: False") == 2, output
