"""training/snapshots.py, in runs of train_llm.py: what is saved, found again, and left alone."""

import re
import shutil

import launch
import torch
from llm_runs import LONG, llm, metrics, newest


def test_resumed_run_ends_as_an_unbroken_one(local, tmp_path, stopped_run, unbroken_run):
    """Stopped in mid-epoch on two ranks, it goes on there, and ends with the same bits."""
    shutil.copytree(stopped_run[0], tmp_path / "outputs" / "default")
    output = launch.run(llm(local, *LONG, nproc=2))
    (step,) = re.findall(r"Resuming training from snapshot at Step (\d+)", output)
    losses = metrics("outputs/default", "train/loss")
    assert losses == metrics(unbroken_run, "train/loss") and 0 < int(step) < max(losses)
    torch.testing.assert_close(newest("outputs/default"), newest(unbroken_run), rtol=0, atol=0)
