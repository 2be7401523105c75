"""The promises of the CPU on GPUs: equal weights, resumes, refusals."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from launch import (
    MULTI,
    SINGLE,
    TORCHRUN_SCRIPT,
    alive,
    gpus,
    pids,
    python,
    run,
    start,
    torchrun,
)
from test_gpu import EPOCH, lines

ON_TWO_GPUS = pytest.mark.parametrize(
    "command",
    [python(MULTI, 10**6, 10**6), torchrun(TORCHRUN_SCRIPT, 10**6, 10**6, nproc="gpu")],
    ids=["multigpu", "multigpu_torchrun"],
)


@pytest.mark.gpu(2)
def test_two_gpus_learn_what_one_with_twice_the_batch_learns():
    """2 x 32 equals 1 x 64 in weights; a GPU adds in another order, so not bit by bit."""
    run(python(MULTI, 3, 3), 100, cwd="two", **gpus(2))
    run(python(MULTI, 3, 3, "--nproc", 1, "--batch_size", 64), 100, cwd="one", **gpus(2))
    one, two = (torch.load(f"{name}/checkpoint.pt", map_location="cpu") for name in ("one", "two"))
    torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu(1)
def test_a_gpu_learns_what_the_cpu_learns():
    """The copies to the GPU, which nobody waits for, arrive whole and in time."""
    run(python(SINGLE, 3, 3), 100, cwd="gpu", **gpus(1))
    run(python(SINGLE, 3, 3), 100, cwd="cpu", **gpus(0))
    gpu, cpu = (torch.load(f"{name}/checkpoint.pt", map_location="cpu") for name in ("gpu", "cpu"))
    torch.testing.assert_close(gpu, cpu, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("count", [pytest.param(n, marks=pytest.mark.gpu(n)) for n in (1, 2)])
def test_resumed_equals_unbroken(count):
    """A job that stops after 2 epochs and goes on ends where an unbroken one ends."""
    run(torchrun(TORCHRUN_SCRIPT, 4, 2, nproc="gpu"), 100, cwd="unbroken", **gpus(count))
    run(torchrun(TORCHRUN_SCRIPT, 2, 2, nproc="gpu"), 100, cwd="resumed", **gpus(count))
    text = run(torchrun(TORCHRUN_SCRIPT, 4, 2, nproc="gpu"), 100, cwd="resumed", **gpus(count))
    assert "Resuming training from snapshot at Epoch 2\n" in text
    assert {epoch for _, epoch, *_ in lines(EPOCH, text)} == {"2", "3"}
    unbroken, resumed = (
        torch.load(f"{name}/snapshot.pt", map_location="cpu", weights_only=True)
        for name in ("unbroken", "resumed")
    )
    for part in ("model", "optimizer"):
        torch.testing.assert_close(resumed[part], unbroken[part], rtol=1e-4, atol=1e-6)
    assert resumed["optimizer"]["state"], "an optimizer without a state would prove nothing"
    assert resumed["epochs_run"] == unbroken["epochs_run"] == 4


@pytest.mark.gpu(1)
def test_more_processes_than_gpus_are_refused_by_multigpu():
    """One line says how many there may be, and nothing starts."""
    text = run(python(MULTI, 1, 1, "--nproc", 99), status=2, **gpus(1))
    assert re.fullmatch(r".*nproc.*at most 1, .*not 99\n", text)
    assert not list(Path().glob("*.pt"))


@pytest.mark.gpu(1)
def test_more_processes_than_gpus_are_refused_under_torchrun():
    """The line comes once for the job; the exit status is torchrun's."""
    text = run(torchrun(TORCHRUN_SCRIPT, 1, 1, nproc=2), 100, status=1, **gpus(1))
    assert text.count("ERROR: ranks 0 and 1 use the same GPU, ") == 1
    assert not lines(EPOCH, text) and not list(Path().glob("*.pt"))


def memory_used():
    """MiB in use on each GPU of the machine, as nvidia-smi tells it."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0,1"]
    return [int(line) for line in subprocess.check_output(query, text=True).split()]


@ON_TWO_GPUS
@pytest.mark.gpu(2)
def test_no_process_opens_the_gpu_of_another(command):
    """Both GPUs are as full: a context of rank 1 on GPU 0 would take hundreds of MiB there."""
    before = memory_used()
    process = start(command, OMP_NUM_THREADS="1", **gpus(2))
    try:
        deadline = time.monotonic() + 120
        while len(lines(EPOCH, process.log.read_text())) < 20:
            assert process.poll() is None and time.monotonic() < deadline, process.log.read_text()
            time.sleep(0.2)
        grown = [now - then for now, then in zip(memory_used(), before, strict=True)]
    finally:
        workers = pids(process.log.read_text())
        process.kill()
        process.wait()
        while running := [pid for pid in workers if alive(pid)]:
            os.kill(running[0], signal.SIGKILL)
            time.sleep(0.2)
    assert min(grown) > 100, f"nvidia-smi does not show what the processes use: {grown} MiB"
    assert abs(grown[0] - grown[1]) < 150, f"GPU 0 and GPU 1 grew by {grown} MiB"
