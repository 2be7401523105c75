"""docs/plumbing.md: the scripts train without plumbing."""

import shutil

import pytest
import torch
import torch.nn.functional as F
from launch import ROOT, python, run, torchrun
from test_plumbing_page import LADDER, without_plumbing

from datautils import MyTrainDataset, build_model


@pytest.mark.parametrize("script", LADDER)
def test_a_script_trains_without_plumbing(tmp_path, script):
    """With its defaults, since it takes no options then."""
    (tmp_path / "own.py").write_text(without_plumbing(script))
    shutil.copy(ROOT / "datautils.py", tmp_path)
    saves, launcher = "checkpoint.pt", python
    if script in LADDER[2:]:
        saves, launcher = "snapshot.pt", torchrun
    run(launcher("own.py"), PYTHONPATH=str(tmp_path))
    state = torch.load(saves, weights_only=True)
    model, data = build_model(), MyTrainDataset(2048)
    model.load_state_dict(state.get("model", state))
    assert F.cross_entropy(model(data.features), data.labels) < 0.01
    if launcher is torchrun:  # again: it finds its snapshot, and nothing is left to train
        before = (tmp_path / saves).read_bytes()
        run(launcher("own.py"), PYTHONPATH=str(tmp_path))
        assert (tmp_path / saves).read_bytes() == before
