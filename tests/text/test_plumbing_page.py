"""docs/plumbing.md tells of every function, and its last table says truly how to do without."""

import ast
import re
import shutil

import pytest
import torch
import torch.nn.functional as F
from launch import ROOT, python, run, torchrun

from datautils import MyTrainDataset, build_model

LADDER = ("single_gpu.py", "multigpu.py", "multigpu_torchrun.py", "multinode.py")
PAGE = (ROOT / "docs" / "plumbing.md").read_text()
# The calls and what may stand in their place, "" for nothing.
ROWS = re.findall(r"^\| `(plumbing\.\w+\(.*?\))` \| (?:`(.*?)`|nothing)", PAGE, re.MULTILINE)


def without_plumbing(script):
    """The text of `script` after the replacements of the table."""
    text = (ROOT / script).read_text()
    imports = "import argparse, contextlib, os, tempfile\nimport torch.distributed.nn\n"
    text = re.sub(r"^import plumbing .*\n", imports, text, flags=re.MULTILINE)
    for call, instead in ROWS:
        call = re.escape(call).replace("…", "(.*)")
        if instead:
            text = re.sub(call, lambda match, new=instead: put(new, match), text)
        else:
            text = re.sub(rf"^ *{call}.*\n", "", text, flags=re.MULTILINE)
    return text


def put(instead, match):
    return instead.replace("…", match[1]) if "…" in instead else instead


def test_every_function_is_told():
    functions = [
        node.name
        for file in ("plumbing.py", "launchers.py")
        for node in ast.parse((ROOT / file).read_text()).body
        if isinstance(node, ast.FunctionDef)
    ]
    assert [name for name in functions if f"def {name}(" not in PAGE] == []


@pytest.mark.parametrize("script", LADDER)
def test_every_call_has_a_row(script):
    """The replacements leave nothing of plumbing.py in any of the four scripts."""
    text = without_plumbing(script)
    assert "plumbing" not in text
    compile(text, script, "exec")


@pytest.mark.long
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
