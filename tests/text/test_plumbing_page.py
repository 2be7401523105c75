"""docs/plumbing.md tells of every function, and its last table says truly how to do without."""

import ast
import re

import pytest
from launch import ROOT

LADDER = ("single_gpu.py", "multigpu.py", "multigpu_torchrun.py", "multinode.py")


PAGE = (ROOT / "docs" / "plumbing.md").read_text()


# The calls and what may stand in their place, "" for nothing.
CALL = r"(?:snapshot = )?plumbing\.\w+\(.*?\)"


ROWS = re.findall(rf"^\| `({CALL})` \| (?:`(.*?)`|nothing)", PAGE, re.MULTILINE)


def without_plumbing(script):
    """The text of `script` after the replacements of the table."""
    text = (ROOT / script).read_text()
    imports = "import argparse, contextlib, os, tempfile\nimport torch.distributed.nn\n"
    text = re.sub(r"^import plumbing\n", imports, text, flags=re.MULTILINE)
    for call, instead in ROWS:
        call = re.escape(call).replace("…", "(.*)")
        if instead:
            text = re.sub(call, lambda match, new=instead: put(new, match), text)
        else:
            text = re.sub(rf"^ *{call}.*\n", "", text, flags=re.MULTILINE)
    return text


def put(instead, match):
    return instead.replace("…", match[1]) if "…" in instead else instead


MODULES = sorted(path.stem for path in (ROOT / "plumbing").glob("[a-z]*.py"))


@pytest.mark.parametrize("module", MODULES)
def test_every_function_is_told(module):
    """In the words of its module's section, and what the section shows is of that module."""
    ((_, section),) = re.findall(rf"^## ({module}\.py): .*\n((?:(?!## ).*\n)*)", PAGE, re.MULTILINE)
    words, shown = re.sub(r"^```.*?^```$", "", section, flags=re.DOTALL | re.MULTILINE), section
    names = [
        node.name
        for node in ast.parse((ROOT / "plumbing" / f"{module}.py").read_text()).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    ]
    assert [name for name in names if f"`{name}`" not in words] == []
    assert set(re.findall(r"^def (\w+)", shown, re.MULTILINE)) <= set(names)


@pytest.mark.parametrize("script", LADDER)
def test_every_call_has_a_row(script):
    """The replacements leave nothing of plumbing in any of the four scripts."""
    text = without_plumbing(script)
    assert "plumbing" not in text
    compile(text, script, "exec")
