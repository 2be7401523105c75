"""The benchmark of what people would use instead: rows that can be had run, the others are told."""

import re

import launch
import peers
import pytest

PEERS = str(launch.ROOT / "benchmarks" / "peers.py")
ONE_ROW = """
import sys
sys.path[:0] = [{root!r}, {root!r} + "/benchmarks"]
from pathlib import Path
import llm_speed, peers
llm_speed.SIZES, llm_speed.LENGTH = {{"gpt2": (1, 32, 2, 2)}}, 32
peers.WARM_UP, peers.BLOCK, peers.BLOCKS = 2, 2, 2
missing = peers.missing({row!r})
if not missing:
    llm_speed.prepare(Path("."), words=5000)
    peers.one_row({row!r}, Path("."))
print("missing:", *missing)
"""


WHOLE = """
import functools, sys
sys.path[:0] = [{root!r}, {root!r} + "/benchmarks"]
import llm_speed, peers
llm_speed.SIZES, llm_speed.LENGTH = {{"gpt2": (1, 32, 2, 2)}}, 32
peers.BLOCKS = 1
llm_speed.script_rows = functools.partial(llm_speed.script_rows, number=4)
if {fails!r} in sys.argv and "--child" in sys.argv:
    sys.exit(3)
if "--child" in sys.argv:
    llm_speed.main()
else:
    prepare = llm_speed.prepare
    llm_speed.prepare = lambda folder: prepare(folder, words=5000)
    llm_speed.__file__ = __file__  # it starts that
    peers.main()
"""


def test_rows_are_compared_and_drawn(tmp_path):
    (tmp_path / "driver.py").write_text(WHOLE.format(root=str(launch.ROOT), fails="none"))
    options = ("--only", "script", "nano", "--turns", "1", "--picture", "peers.png")
    output = launch.run(launch.forked("driver.py", *options), 300)
    last = re.findall(r"^(.+?) +([\d,]+) tokens/s  (\d\.\d\d)$", output, re.MULTILINE)
    speeds = {name: float(speed.replace(",", "")) for name, speed, _ in last}
    ratios = {name: float(ratio) for name, _, ratio in last}
    assert set(speeds) == {peers.LABELS[name] for name in ("script", "bare", "nano")}, output
    assert [*speeds.values()] == sorted(speeds.values(), reverse=True)
    for name, ratio in ratios.items():
        assert ratio == pytest.approx(speeds["train_llm.py"] / speeds[name], abs=0.006)
    script = re.findall(r"^script: gpt2, 1 GPU, accumulation 4 +([\d,]+) tokens/s", output, re.M)
    assert [float(script[0].replace(",", ""))] == [speeds["train_llm.py"]]
    assert (tmp_path / "peers.png").read_bytes().startswith(b"\x89PNG")


def test_a_row_that_fails_costs_no_other(tmp_path):
    (tmp_path / "driver.py").write_text(WHOLE.format(root=str(launch.ROOT), fails="nano"))
    options = ("--only", "nano", "script", "--turns", "1")
    status, output = launch.finish(launch.start(launch.forked("driver.py", *options)), 300)
    assert status == 1
    assert re.search(r"^train_llm.py +[\d,]+ tokens/s  1.00$", output, re.MULTILINE), output
    assert "\nFailed, and is not in the medians: nano." in output


@pytest.mark.parametrize("row", ["trainer", "lightning"])
def test_a_peer_makes_the_steps(tmp_path, row):
    """On a tiny model, where it is installed."""
    (tmp_path / "driver.py").write_text(ONE_ROW.format(root=str(launch.ROOT), row=row))
    output = launch.run(launch.forked("driver.py"), 120)
    (missing,) = re.findall("^missing:(.*)$", output, re.MULTILINE)
    if missing:
        pytest.skip(f"needs{missing}, which no requirements name")
    blocks = re.findall(rf"^{row}: .* tokens/s a GPU.* \(([\d,]+), ([\d,]+)\)$", output, re.M)
    assert len(blocks) == 1, output


def test_what_is_not_installed_is_told(tmp_path):
    """Nothing is measured, and nothing fails."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util\n"
        "found = importlib.util.find_spec\n"
        "away = ('accelerate', 'lightning')\n"
        "importlib.util.find_spec = lambda name: None if name in away else found(name)\n"
    )
    rows = ("--only", "trainer", "lightning")
    output = launch.run(launch.python(PEERS, *rows), PYTHONPATH=str(tmp_path))
    assert "trainer    left out: not installed: accelerate\n" in output
    assert "lightning  left out: not installed: lightning\n" in output
    assert "tokens/s" not in output
