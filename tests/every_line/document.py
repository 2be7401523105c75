"""Write docs/every-line.md: each line that a lesson adds, what it is for, what happens without it.

Run:  PYTHONPATH=tests:. python tests/every_line/document.py      (two minutes on two cores)
"""

import re
import tempfile
import time
from pathlib import Path

from launch import ROOT
from proofs import PREVIOUS, PROOFS

from exercises import ways

PATH = ROOT / "docs" / "every-line.md"
INTRODUCTION = """\
# Every line, and what happens without it

Is each line of the ladder needed? Each that a lesson adds was taken out, put back to the lesson
before or given a wrong value, and the script was run. The third column tells what went wrong: **in
bold** the check that noticed, then what it saw. The last one, the seconds that this took. Imports,
docstrings and `print`s are left out, and so is the first line of a function that is new.

A line that only names something for the next ones ends in an error there. No run needs a GPU: where
a line is about one, the functions of torch that choose it have a stand-in.

The tables are written by a program, and tests hold them: a new line without a proof fails, and so
does a proof whose line is gone. To find out by yourself, do the
[exercises](../README.md#exercises).
"""
COLUMNS = "| line | is for | without it | seconds |\n|---|---|---|---|\n"


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def code(text: str) -> str:
    """The line without its comments, in one row."""
    lines = (re.sub(r"\s+# .*", "", line) for line in text.splitlines())
    return f"`{cell(' '.join(lines))}`"


def masked(message: str) -> str:
    """Without its figures and random names, which differ between machines."""
    return re.sub(r"\b(?:[0-9a-f]{8}|\d[\d.e-]*)\b", "#", cell(message))


def said(proof, message: str) -> str:
    where = " (as on a Mac)" if proof.way is ways.as_on_a_mac else ""
    return f"**{proof.check.says}**{where}: {cell(message)}"


def row(proof) -> tuple[str, float]:
    """One row of the table, and the seconds that it took."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        _, message = proof.try_without(Path(folder))
        seconds = time.monotonic() - began
    return (
        f"| {code(proof.line)} | {proof.purpose} | {said(proof, message)} | {seconds:.0f} |",
        seconds,
    )


def document() -> str:
    parts = [INTRODUCTION]
    for script, before in PREVIOUS.items():
        proofs = [proof for proof in PROOFS if proof.script == script]
        rows = [row(proof) for proof in proofs]
        counts = f"{len(rows)} lines, {sum(took for _, took in rows):.0f} s on two CPU cores"
        table = COLUMNS + "\n".join(text for text, _ in rows)
        parts.append(f"## From {before} to {script}\n\n{counts}.\n\n{table}\n")
    return "\n".join([*parts, "---\n\nBack to the [tutorial](../README.md).\n"])


if __name__ == "__main__":
    PATH.write_text(document())
