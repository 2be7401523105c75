"""What the text says is run: its commands, the lines that it shows, its differences, its links."""

import ast
import re
from itertools import pairwise

import lesson
import pytest
import torch
import torch.distributed as dist
from launch import ROOT, in_processes
from torch.nn.parallel import DistributedDataParallel as DDP

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


def one_step(rank, init_method, samples, averaged, updated):
    """The step of the table in step 2, on a rank with these samples."""
    dist.init_process_group("gloo", init_method, rank=rank, world_size=2)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model = DDP(model)
    x = torch.tensor(samples[rank])[:, None]
    (model(x) - 3 * x).square().mean().backward()
    assert model.module.weight.grad.item() == averaged[rank]
    optimizer.step()
    assert model.module.weight.item() == pytest.approx(updated[rank])
    del model
    dist.destroy_process_group()


def test_the_step_on_two_ranks_has_the_numbers_of_the_table():
    lines = re.findall(r"^\| .* \| (.*) \| (.*) \|$", README.split("## What DDP does")[1], re.M)
    cells = [[cell.replace("x = ", "").replace("−", "-") for cell in line] for line in lines]
    samples = [[float(x) for x in cell.split(", ")] for cell in cells[0]]
    own, averaged, updated = (list(map(float, line)) for line in cells[1:4])
    gradients = [-4 * x**2 for share in samples for x in share]
    assert own == [sum(gradients[:2]) / 2, sum(gradients[2:]) / 2]
    assert f"the mean of {', '.join(f'−{-g:.0f}' for g in gradients[:3])}" in README
    in_processes(2, one_step, samples, averaged, updated)
