"""docs/how-ddp-works.md: its pictures show what its programs compute, and what jobs do."""

import re
from math import ceil, isclose, log2

import matplotlib
import pictures
from launch import ROOT

PAGE = (ROOT / "docs" / "how-ddp-works.md").read_text()


DRAWN = ROOT / "docs" / "pictures"


def run_block(part, capsys):
    """Run the one Python block with `part`, compare what it prints, and return its names."""
    found = re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```$", PAGE, re.DOTALL | re.M)
    ((code, shown),) = [block for block in found if part in block[0]]
    names = {"__name__": "example"}
    exec(code, names)
    assert capsys.readouterr().out == shown
    return names


def texts(path):
    return re.findall(r">([^<>\n]+)</(?:text|tspan)>", path.read_text())


def test_the_pictures_are_what_the_script_draws(tmp_path):
    pictures.main(tmp_path)
    assert {path.name for path in DRAWN.iterdir()} == set(pictures.PICTURES)
    for name in pictures.PICTURES:
        kept, new = DRAWN / name, tmp_path / name
        assert texts(new) == texts(kept) and len(texts(new)) > 5
        if f"Matplotlib v{matplotlib.__version__}," in kept.read_text():  # another draws otherwise
            assert new.read_text() == kept.read_text()
        assert re.search(rf"^!\[[^\]]{{50,}}\]\(pictures/{name}\)$", PAGE, re.M)


def test_the_graph_has_the_numbers_of_autograd(capsys):
    names = run_block("retain_grad", capsys)
    nodes = pictures.loss_graph(2, 3, 4)
    found = {name: (node.item(), node.grad.item()) for name, node in names["nodes"].items()}
    assert found == {name: nodes[name] for name in found}
    assert nodes["w"] == (2, 12) and f"{names['w'].item():g}" == "1.4"
    shown = texts(DRAWN / "graph.svg")
    for value, gradient in nodes.values():
        assert str(value) in shown and str(gradient) in shown
    assert any(text.endswith("= 1.4") for text in shown)


def test_the_tree_reaches_all_and_the_table_counts_it(capsys):
    names = run_block("def tree", capsys)
    assert names["tree"](8) == pictures.tree(8)
    alt = re.search(r"!\[(.*)\]\(pictures/tree.svg\)", PAGE).group(1)
    messages = [message for messages in pictures.tree(8) for message in messages]
    assert re.findall(r"(\d) to (\d)", re.sub("sends to", "to", alt.replace("rank ", ""))) == [
        (str(sender), str(to)) for sender, to in messages
    ]
    for ranks in range(2, 34):
        for broadcast, count in (
            (names["one_by_one"], ranks - 1),
            (names["tree"], ceil(log2(ranks))),
        ):
            rounds = broadcast(ranks)
            assert len(rounds) == count
            has, sums = [True] + [False] * (ranks - 1), [10**rank for rank in range(ranks)]
            for messages in rounds:
                busy = [rank for message in messages for rank in message]
                assert len(busy) == len(set(busy))  # each rank is in one message of a round
                for sender, to in messages:
                    assert has[sender] and not has[to]
                    has[to] = True
            for messages in names["reduce"](rounds):
                for sender, to in messages:
                    sums[to] += sums[sender]
            assert all(has) and sums[0] == sum(10**rank for rank in range(ranks))


def test_the_times_follow_the_formulas():
    """Those of the table with the formulas, for each row of the table with the numbers."""
    late, fast, sizes = 10e-6, 10e9, (4e3, 100e6)
    rows = re.findall(
        r"^ +(\d+)  (\S+, \S+(?: by one)?) +(\d+) .* ([\d.]+) ms +([\d.]+) ms$", PAGE, re.M
    )
    assert len(rows) == 10
    for n, name, count, *times in ((int(row[0]), row[1], int(row[2]), *row[3:]) for row in rows):
        call, way = name.split(", ")
        rounds = ceil(log2(n)) if way == "tree" else n - 1
        rounds *= 1 + (call == "all-reduce")
        assert count == rounds
        for size, time in zip(sizes, times, strict=True):
            share = size / n if way == "ring" else size
            assert isclose(float(time), 1000 * rounds * (late + share / fast), abs_tol=0.0051)
