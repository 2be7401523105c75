"""A snapshot that an older version of the scripts has saved is resumed."""

import shutil
from pathlib import Path

import pytest
import torch
from launch import ROOT, quickly

# Of multigpu_torchrun.py 3 3 --seed 5 on two processes, at commit 322a565: it has wandb_id in
# place of job_id, and no optimizer_class. The whole run of 5 epochs ended with this loss.
OLD = Path(__file__).with_name("snapshot_with_wandb_id.snapshot")
LAST_LOSS = "0.224089"
DRIVER = """
import {script} as script
from torch import nn
script.build_model = lambda: nn.Linear(20, 4)
script.main(script.parse_args())
"""


@pytest.mark.parametrize("script", ["multigpu_torchrun", "multinode"])
def test_it_continues_where_the_old_run_would_have(script, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    shutil.copy(OLD, "snapshot.pt")
    before = torch.load("snapshot.pt", weights_only=True)
    Path("driver.py").write_text(DRIVER.format(script=script))
    status, output = quickly("driver.py", 5, 5, nproc=2)
    assert status == {0} and "Resuming training from snapshot at Epoch 3\n" in output, output
    assert output.count(f"Epoch 4 | Batchsize: 32 | Steps: 32 | Loss: {LAST_LOSS}\n") == 2, output
    after = torch.load("snapshot.pt", weights_only=True)
    assert after["job_id"] == before["wandb_id"] and after["seed"] == 5
    assert "wandb_id" not in after and after["optimizer_class"] == "SGD"
