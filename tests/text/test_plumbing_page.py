"""docs/plumbing.md tells of every function, and its last table says truly how to do without."""

import ast
import re

import pytest
from launch import ROOT

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
