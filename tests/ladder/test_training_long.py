"""What takes longer to see of a script that trains."""

import os
import subprocess

import pytest
import torch
from launch import (
    MULTI,
    MULTINODE,
    SINGLE,
    TORCHRUN_SCRIPT,
    python,
    quickly,
    run,
    torchrun,
)
from test_training import (
    CPU,
    EPOCH,
    RESIZED,
    RESUMED,
    SAVED,
    check_log,
    lines,
    losses,
    trained,
)


def test_without_arguments_and_then_with_hyphens(tmp_path):
    """No argument means `50 10`; a finished job goes on when it is given more epochs."""
    first = run(torchrun(TORCHRUN_SCRIPT, nproc="auto"), 100, CUDA_VISIBLE_DEVICES="")
    assert lines(SAVED, first) == ["9", "19", "29", "39", "49"]
    if os.cpu_count() == 2:
        assert losses(first) == losses(quickly(MULTINODE, 50, 50, nproc=2, cwd="other")[1])
    more = ("--total-epochs=52", "--save-every=1", "--batch-size=16", "--snapshot-path=snapshot.pt")
    second = run(torchrun(TORCHRUN_SCRIPT, *more, nproc=2), PYTHONWARNINGS="error::UserWarning")
    check_log(second)
    assert lines(RESUMED, second) == ["50"]
    before = f"{32 * os.cpu_count()} (32 x {os.cpu_count()} processes)"
    assert lines(RESIZED, second) == [("32 (16 x 2 processes)", before)]
    assert lines(SAVED, second) == ["50", "51"]
    assert {(epoch, size) for _, epoch, size, *_ in lines(EPOCH, second)} == {
        ("50", "16"),
        ("51", "16"),
    }


FOUR = python(MULTI, 2, 2, "--nproc", 4, "--batch_size", 512)


@pytest.mark.parametrize(
    "command", [FOUR, torchrun(TORCHRUN_SCRIPT, 2, 2)], ids=["spawn", "torchrun"]
)
def test_every_line_is_one_write(command):
    """Lines of processes that print at the same moment stay whole, in unbuffered Python as well."""
    reader, writer = os.pipe2(os.O_DIRECT)  # a pipe that keeps writes apart
    env = os.environ | CPU | {"PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(["timeout", "100", *command], stdout=writer, env=env)
    os.close(writer)
    writes = list(iter(lambda: os.read(reader, 65536).decode(), ""))
    os.close(reader)
    assert process.wait() == 0
    assert [text for text in writes if text.count("\n") != 1 or not text.endswith("\n")] == []
    check_log("".join(writes))
    size = 4 if command is FOUR else 2
    assert len(lines(EPOCH, "".join(writes))) == 2 * size and len(losses("".join(writes))) == 2


def test_full_batches_are_the_same_in_single_gpu_and_multigpu():
    """single_gpu.py with all data in one batch equals multigpu.py with one half on each rank."""
    one, printed = trained(SINGLE, 1, "one", batch_size=2048)
    two, printed_by_two = trained(MULTI, 2, "two", batch_size=1024)
    torch.testing.assert_close(one, two)
    assert printed == pytest.approx(printed_by_two, abs=1e-5)
