"""training/snapshots.py, in runs of train_llm.py: other numbers of ranks, machines, damage."""

import os
import re
import shlex
import shutil
import signal
from pathlib import Path

import launch
import pytest
import torch
from launch import LLM, wait_for
from llm_runs import LONG, llm, metrics, newest


def test_resumed_on_other_numbers_of_ranks(local, tmp_path):
    """From two ranks to one and to three, in mid-epoch: each step as if it had been on one."""
    options = (*LONG, "--dropout", 0, "--max-steps", 60)
    launch.run(llm(local, *options, "--batch-size", 6, "--experiment-name", "unbroken"))
    expected = metrics("outputs/unbroken", "train/loss")
    job = launch.start(llm(local, *options, nproc=2))
    wait_for(job, lambda output: "Step 50/" in output)
    job.send_signal(signal.SIGTERM)
    _, output = launch.finish(job, 30)
    assert "SIGTERM: saved at step" in output
    for nproc, batch_size in (1, 6), (3, 2):
        shutil.copytree("outputs/default", f"outputs/on-{nproc}")
        name = ("--experiment-name", f"on-{nproc}", "--batch-size", batch_size)
        output = launch.run(llm(local, *options, *name, nproc=nproc))
        assert "Resuming training from snapshot at Step 5" in output
        assert metrics(f"outputs/on-{nproc}", "train/loss") == pytest.approx(expected, rel=1e-4)


def test_newest_snapshot_of_any_machine_wins(local, tmp_path, stopped_run, unbroken_run):
    """Two machines with a disk each: one has the newest, the other only the one before."""
    for name in "ab":
        shutil.copytree(stopped_run[0].parent, tmp_path / name / "outputs")
    newest_of_b = max(Path("b/outputs/default/snapshots").glob("step-*.pt"))
    newest_of_b.unlink()
    endpoint = f"localhost:{launch.free_port()}"
    names = ("--model-name", local / "gpt2", "--dataset-name", local / "text.txt")
    command = launch.agent(endpoint, *names, *LONG, script=LLM)
    nodes = [launch.start(command, tmp_path / name) for name in "ab"]
    ended = [launch.finish(node) for node in nodes]
    assert [status for status, _ in ended] == [0, 0], ended
    step = int(newest_of_b.stem[5:])
    assert f"Resuming training from snapshot at Step {step}\n" in "".join(log for _, log in ended)
    (folder,) = [path.parent for path in tmp_path.glob("*/outputs/default/final")]
    torch.testing.assert_close(newest(folder), newest(unbroken_run), rtol=0, atol=0)


def test_going_back_to_a_step(local, tmp_path, stopped_run):
    """--resume STEP goes on from there, and what came later is not the newest any more."""
    shutil.copytree(stopped_run[0], tmp_path / "outputs" / "default")
    earlier, later = sorted(Path("outputs/default/snapshots").glob("step-*.pt"))
    step = int(earlier.stem[5:])
    options = (*LONG, "--batch-size", 6, "--max-steps", step + 1)
    with open("outputs/default/metrics.jsonl", "a") as file:
        file.write('{"timestamp": 17')  # as of a run that was killed
    output = launch.run(llm(local, *options, "--resume", step))
    assert f"Resuming training from snapshot at Step {step}\n" in output
    assert "There is no" not in output
    names = {path.name for path in Path("outputs/default/snapshots").iterdir()}
    later_name = later.with_suffix(".unused").name
    assert names == {earlier.name, f"step-{step + 1:08}.pt", later_name}
    output = launch.run(llm(local, *options, "--seq-length", 16), status=2)
    assert "sequence length is 32 there, 16 here" in output.splitlines()[-1]


def test_damaged_newest_snapshot_is_told_and_the_one_before_is_used(local, tmp_path, stopped_run):
    """Cut off at any place, the newest is left as it is; without any good one the job ends."""
    shutil.copytree(stopped_run[0], tmp_path / "outputs" / "default")
    last, reserve = sorted(Path("outputs/default/snapshots").glob("*"), reverse=True)
    os.truncate(last, last.stat().st_size // 2)
    options = (*LONG, "--batch-size", 6, "--max-steps", int(reserve.stem[5:]))
    output = launch.run(llm(local, *options))
    assert (
        output.count("WARNING") == 1 and f"{last.name} is damaged or no snapshot. Another" in output
    )
    assert f"Resuming training from snapshot at Step {int(reserve.stem[5:])}\n" in output
    assert not last.exists() and last.with_suffix(".unused").exists()
    before = reserve.read_bytes()[:100]
    reserve.write_bytes(before)
    output = launch.run(llm(local, *options), status=2)
    error = output.splitlines()[-1]
    damaged = f"ERROR: {reserve} is damaged or no snapshot: move it away, or choose another"
    assert error.startswith(damaged)
    assert reserve.read_bytes() == before


def test_full_disk_is_told_in_one_line_and_the_last_snapshot_stays(local, tmp_path):
    """A file-size limit that a snapshot exceeds stops the run soon after the save."""
    options = (*LONG, "--batch-size", 6, "--max-steps")
    launch.run(llm(local, *options, 5))
    (last,) = Path("outputs/default/snapshots").glob("*")
    before = last.read_bytes()
    command = shlex.join(llm(local, *options, 30))
    output = launch.run(["bash", "-c", f"ulimit -f 300; exec {command}"], status=2)
    error = output.splitlines()[-1]
    assert re.match("ERROR: cannot save in outputs/default: .*File too large", error), output
    assert "Traceback" not in output
    assert list(last.parent.glob("*")) == [last] and last.read_bytes() == before


def test_two_jobs_do_not_write_in_one_folder(local, tmp_path):
    """The second is told so, and the first goes on."""
    job = launch.start(llm(local, *LONG, "--batch-size", 6, "--max-steps", 10**6))
    wait_for(job, lambda output: "Step 3/" in output)
    output = launch.run(llm(local, *LONG, "--batch-size", 6), status=2)
    assert "experiment-name: another job is writing in outputs/default" in output
    job.send_signal(signal.SIGTERM)
    status, output = launch.finish(job, 30)
    assert status == 128 + signal.SIGTERM and "Traceback" not in output, output


def test_snapshots_of_two_jobs_are_not_mixed(local, tmp_path):
    """Each machine went on by itself once. Neither's snapshot is taken for that of both."""
    options = ("--model-name", local / "gpt2", "--dataset-name", local / "text.txt")
    for folder in "0", "1":
        launch.run(launch.python(LLM, *options, "--max-steps", 1), cwd=folder)
    snapshots = sorted(tmp_path.glob("*/outputs/default/snapshots/*"))
    before = [path.read_bytes() for path in snapshots]
    command = launch.agent(f"localhost:{launch.free_port()}", *options, script=LLM)
    nodes = [launch.start(command, folder) for folder in ("0", "1")]
    logs = "".join(launch.finish(node)[1] for node in nodes)
    error = "ERROR: outputs/default is not of the same job on all machines: move the others away\n"
    assert logs.count(error) == 2 and "Step 2/" not in logs, logs  # one on each
    assert len(before) == 2 and [path.read_bytes() for path in snapshots] == before


@pytest.mark.gpu(2)
def test_resumed_run_on_gpus_ends_as_an_unbroken_one(local, tmp_path):
    """SIGTERM to a job on two GPUs with dropout: resumed, it ends with the unbroken weights.

    Not compiled: then a kernel adds in an order of its own, and no two runs have the same bits.
    """
    options = (*LONG, "--num-epochs", 20, "--no-compile")
    job = launch.start(llm(local, *options, nproc=2))
    wait_for(job, lambda output: "Step 57/" in output, 300)
    job.send_signal(signal.SIGTERM)
    status, output = launch.finish(job, 60)
    assert status in launch.SIGNALLED and "SIGTERM: saved at step" in output, output
    output = launch.run(llm(local, *options, nproc=2), 300)
    assert "Resuming training from snapshot" in output
    launch.run(llm(local, *options, "--experiment-name", "unbroken", nproc=2), 300)
    broken, unbroken = newest("outputs/default"), newest("outputs/unbroken")
    torch.testing.assert_close(broken, unbroken, rtol=0, atol=0)
