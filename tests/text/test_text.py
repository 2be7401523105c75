"""What the text says is run: its commands, the lines that it shows, its differences, its links."""

import ast
import re
from itertools import pairwise

import lesson
import pytest
from launch import ROOT

README = (ROOT / "README.md").read_text()


DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


LADDER = ("single_gpu.py", "multigpu.py", "multigpu_torchrun.py", "multinode.py")


@pytest.mark.parametrize("old, new", list(pairwise(LADDER)))
def test_the_text_shows_the_whole_difference(old, new):
    """Each part that differs is shown, once, but for the docstring and imports. That it is shown
    as it is now, `cog --check` tells."""
    shown = re.findall(rf'show\("{old}","{new}"((?:,"[\w.> ]+")+)\)', README)
    names = re.findall(r"[\w.]+", "".join(shown))
    assert sorted([*names, "imports"]) == sorted(lesson.changed(old, new))


def test_commands_of_docstrings_can_be_pasted():
    """A line that a command goes on in follows a backslash."""
    docstrings = [ast.get_docstring(ast.parse(path.read_text())) for path in ROOT.glob("*.py")]
    pairs = [pair for text in docstrings for pair in pairwise((text or "").splitlines())]
    before = [first for first, second in pairs if second.startswith("  --")]
    assert len(before) >= 6
    assert all(first.endswith(("\\", "the same with")) for first in before), before


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", document.read_text()):
        path = (document.parent / target) if target else document
        assert path.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in headings]
            assert anchor in slugs, anchor
