"""The benchmarks of train_translation.py run; that their figures are right, people judge."""

import re
import sys
from pathlib import Path

import launch
import pytest

BENCHMARK = """
import sys
sys.path.insert(0, {folder!r})
import translation_speed
translation_speed.ROUNDS, translation_speed.STEPS, translation_speed.WARM_UP = 2, 4, 2
translation_speed.main()
"""


@pytest.mark.long
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


def test_paragraphs_with_one_id_are_a_pair(tmp_path, monkeypatch):
    sys.path.insert(0, str(launch.ROOT / "benchmarks"))
    import help_pairs

    page = '<p id="a">{}<span hidden="true"> on a <b>Mac</b></span>,\n{}</p><p id="b">SUM</p>'
    for folder, words in ("en-US", ("Open", "then close")), ("it", ("Aprite", "poi chiudete")):
        Path(folder).mkdir()
        Path(folder, "page.html").write_text(page.format(*words))
    monkeypatch.setattr(sys, "argv", ["help_pairs.py", "en-US", "it"])
    help_pairs.main()
    assert Path("help.tsv").read_text().splitlines() == [
        "en\tit",
        "Open, then close\tAprite, poi chiudete",
    ]
