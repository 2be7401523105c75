"""The benchmarks of train_translation.py run; that their figures are right, people judge."""

import sys
from pathlib import Path


def test_paragraphs_with_one_id_are_a_pair(tmp_path, monkeypatch):
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
