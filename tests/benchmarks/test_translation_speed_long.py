"""benchmarks/translation_speed.py as a whole, on a tiny model."""

import re

import launch
import pytest

BENCHMARK = """
import sys
sys.path.insert(0, {folder!r})
import translation_speed
translation_speed.ROUNDS, translation_speed.STEPS, translation_speed.WARM_UP = 2, 4, 2
translation_speed.main()
"""


@pytest.mark.parametrize("processes", [1, 2])
def test_the_benchmark_knows_the_translation(tmp_path, processes):
    (tmp_path / "driver.py").write_text(BENCHMARK.format(folder=str(launch.ROOT / "benchmarks")))
    command = launch.python if processes == 1 else launch.torchrun
    pairs = [f"number {number}\tnumero {number}\n" for number in range(200)]
    (tmp_path / "pairs.tsv").write_text("en\tit\n" + "".join(pairs))
    options = "--dataset pairs.tsv --d-model 16 --layers 1 --heads 2 --d-ff 32 --batch-size 8"
    output = launch.run(command("driver.py", *options.split()), 120)
    for name in "script", "bare":
        assert re.search(rf"^{name} +[\d,]+ target tokens/s a GPU \(", output, re.M), output
    assert re.search(r"^script : bare \d\.\d{3}$", output, re.M)
