"""benchmarks/speed.py as a whole."""

import re

import launch

ROWS = [
    "data   1000 samples/s, single_gpu.py : bare loop",
    "data   1000 samples/s, single_gpu.py : with loss sum",
    "data   1000 samples/s, sample by sample : with loss sum",
    "start  seconds, single_gpu.py : import torch",
    "start  seconds, multigpu.py : mp.spawn, 2 processes",
    "whole  seconds, single_gpu.py : in another",
    "whole  seconds, multigpu.py, 2 processes : in another",
    "whole  seconds, multigpu_torchrun.py, 2 processes : in another",
]


def test_each_row_has_its_figures(tmp_path):
    """The other checkout has scripts that do nothing."""
    other = tmp_path / "another"
    other.mkdir()
    for name, processes in (("single_gpu", 1), ("multigpu", 2), ("multigpu_torchrun", 1)):
        in_one_piece = "print('Rank: 0\\n', end='')\n"
        (other / f"{name}.py").write_text(in_one_piece * processes)
    options = ("--rounds", 1, "--epochs", 1, "--against", "another")
    output = launch.run(launch.python(launch.ROOT / "benchmarks" / "speed.py", *options), 600)
    for row in ROWS:
        figures = re.search(rf"^{re.escape(row)}" + r" +(\d+\.\d+)" * 3 + "$", output, re.M)
        assert figures and all(float(each) > 0 for each in figures.groups()), output
        if row.endswith("another") and "torchrun" not in row:
            assert float(figures[3]) > 1, output
