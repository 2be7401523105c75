"""benchmarks/timeline.py as a whole."""

import re

import launch
import pytest

TINY = """
import sys
sys.path[:0] = [{root!r}, {root!r} + "/benchmarks"]
import llm_speed, timeline
llm_speed.SIZES, llm_speed.LENGTH = {{"gpt2": (1, 32, 2, 2)}}, 32
prepare = llm_speed.prepare
llm_speed.prepare = lambda folder: prepare(folder, words=5000)
timeline.__file__ = __file__  # it starts itself
timeline.main()
"""


@pytest.mark.exclusive
def test_steps_are_watched_and_drawn(tmp_path):
    (tmp_path / "driver.py").write_text(TINY.format(root=str(launch.ROOT)))
    output = launch.run(launch.forked("driver.py", "--picture", "step.png"), 120)
    rows = re.findall(r"^ +([12])  ([\d. ]+)$", output, re.MULTILINE)
    assert [number for number, _ in rows] == ["1", "2"], output
    for _, cells in rows:
        sending, attention, products, triton, rest, waiting, alone, nothing, step = map(
            float, cells.split()
        )
        assert min(attention, products, rest) > 0 == triton
        assert 0 <= waiting <= step and 0 <= alone <= sending
        parts = sending + attention + products + rest + nothing
        assert parts == pytest.approx(step, rel=0.2), "medians of parts, each by itself"
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
