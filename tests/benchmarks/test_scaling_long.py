"""benchmarks/scaling.py as a whole."""

import math
import re

import launch
import pytest
import scaling

SCALING = str(launch.ROOT / "benchmarks" / "scaling.py")


def measured(output):
    """{accumulation and buckets: (together, predicted)} of the last size, in ms."""
    rows = re.findall(r"^ +\d+ +\d+ +(\d \d) +\S+ +(\S+) +(\S+) +\S+%$", output, re.MULTILINE)
    return {key: (float(together), float(predicted)) for key, together, predicted in rows}


def test_it_measures_predicts_and_draws(tmp_path):
    options = ("--width", 64, "--picture", "picture.png")
    output = launch.run(launch.python(SCALING, *options), 120)
    assert measured(output).keys() == {"1 1", "4 1", "1 4", "4 4"}
    table = re.findall(r"^ +(\d+) +(?:[\d.]+% *){4}$", output, re.MULTILINE)
    assert [int(nodes) for nodes in table] == scaling.NODES
    assert (tmp_path / "picture.png").stat().st_size > 10_000
    lost = [float(each) for each in re.findall(r"([\d.]+)% of the time is lost", output)]
    assert lost[-1] == pytest.approx(lost[-2] * math.sqrt(1024 / 128), rel=0.1)
