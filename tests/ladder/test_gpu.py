"""The commands of the ladder on one and on two GPUs, with the same promises as on the CPU."""

import re
from functools import cache
from pathlib import Path

import pytest
from launch import (
    MULTI,
    MULTINODE,
    SINGLE,
    TORCHRUN_SCRIPT,
    agent,
    finish,
    free_port,
    gpus,
    python,
    run,
    start,
    torchrun,
)

ON_GPUS = [
    pytest.param(script, count, marks=pytest.mark.gpu(count), id=f"{Path(script).stem}-{count}")
    for count in (1, 2)
    for script in (SINGLE, MULTI, TORCHRUN_SCRIPT, MULTINODE)
    if (script, count) != (SINGLE, 2)
]


EPOCH = r"^\[rank (\d+)\] Epoch (\d+) \| Batchsize: (\d+) \| Steps: (\d+) \| Loss: (\d+\.\d{6})$"


STARTED = r"^Rank: (\d+) \| World size: (\d+) \| Local rank: (\d+) \|.*\| Device: (\S+)$"


def lines(form, output):
    return re.findall(form, output, re.MULTILINE)


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """`output(script, count)` is what the script's `50 10` prints on `count` GPUs."""

    @cache
    def output(script, count):
        folder = tmp_path_factory.mktemp(f"{Path(script).stem}-{count}")
        if script == MULTINODE:
            return on_nodes(count, folder)
        command = torchrun(script, 50, 10, nproc="gpu")
        if script != TORCHRUN_SCRIPT:
            command = python(script, 50, 10)
        return run(command, 200, cwd=folder, OMP_NUM_THREADS="1", **gpus(count))

    return output


def on_nodes(count, folder):
    """multinode.py by `count` agents, each a node that has one GPU and a folder of its own."""
    endpoint, arguments = f"localhost:{free_port()}", ("--total_epochs", 50, "--save_every", 10)
    command = agent(endpoint, *arguments, "--batch_size", 32, nproc="gpu")
    command[command.index("--nnodes=2")] = f"--nnodes={count}"
    nodes = [
        start(command, folder / f"node{n}", OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=str(n))
        for n in range(count)
    ]
    ended = [finish(node, 200) for node in nodes]
    assert [status for status, _ in ended] == [0] * count, ended
    return "".join(text for _, text in ended)


@pytest.mark.parametrize("script, count", ON_GPUS)
def test_the_loss_falls_under_a_tenth(script, count, output):
    """`50 10` ends with under a tenth of the first epoch's loss, the same on every rank's line."""
    printed = lines(EPOCH, output(script, count))
    assert len(printed) == 50 * count
    losses = {int(epoch): float(loss) for _, epoch, _, _, loss in printed}
    assert {(int(epoch), float(loss)) for _, epoch, _, _, loss in printed} == set(losses.items())
    assert losses[49] < losses[0] / 10


@pytest.mark.parametrize("script, count", ON_GPUS)
def test_each_process_has_its_own_gpu(script, count, output):
    """Local rank n trains on GPU n of its machine, and lines name the global rank."""
    text = output(script, count)
    started = {(rank, size, device) for rank, size, _, device in lines(STARTED, text)}
    device = {SINGLE: "cuda", MULTINODE: "cuda:0"}.get(script, "cuda:{}")
    assert started == {(str(n), str(count), device.format(n)) for n in range(count)}
    printed = {(rank, size, steps) for rank, _, size, steps, _ in lines(EPOCH, text)}
    assert printed == {(str(n), "32", str(2048 // (32 * count))) for n in range(count)}


@pytest.mark.parametrize("script, count", ON_GPUS)
def test_no_warnings_and_whole_lines(script, count, output):
    """Nothing in the log warns, and nothing was drawn over."""
    text = output(script, count)
    assert not re.findall(r".*warning.*", text, re.IGNORECASE)
    assert "\r" not in text
