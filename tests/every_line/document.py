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

Is each line of the ladder needed? A program removed each line that a lesson adds, or put back the
line of the lesson before, or a wrong value, and ran the script. The third column shows what went
wrong: **in bold** the check that noticed it, then what the check saw. The last column shows how
many seconds this took. The tables leave out imports, docstrings, `print`s, and the first line of a
new function.

Some rows show only a part of a line, which is for something else than the whole line in the row
before. A few rows are about a line that the script before contains, too, because this script shows
better what the line is for.

A line that only gives a name to something ends in an error at the next line that uses the name. No
run needs a GPU: where a line is about one, other functions replace those of torch that choose it.

The tests compare the tables with the scripts: a new line without a proof fails, and so does a proof
whose line is gone. To find out by yourself, do the
[exercises](../README.md#exercises).
"""
COLUMNS = "| line | is for | without it | seconds |\n|---|---|---|---|\n"


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def code(text: str) -> str:
    """The line without its comments, in one row."""
    lines = (re.sub(r"\s+# .*", "", line) for line in text.splitlines())
    return f"`{cell(' '.join(lines))}`"


def shown(proof) -> str:
    """What the first column shows: the line, or the part of it that the proof is of."""
    return code(proof.part or proof.line)


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
        f"| {shown(proof)} | {proof.purpose} | {said(proof, message)} | {seconds:.0f} |",
        seconds,
    )


def document() -> str:
    parts = [INTRODUCTION]
    for script, before in PREVIOUS.items():
        proofs = [proof for proof in PROOFS if proof.script == script]
        rows = [row(proof) for proof in proofs]
        counts = f"{len(rows)} rows, {sum(took for _, took in rows):.0f} s on two CPU cores"
        table = COLUMNS + "\n".join(text for text, _ in rows)
        parts.append(f"## From {before} to {script}\n\n{counts}.\n\n{table}\n")
    return "\n".join([*parts, "---\n\nBack to the [tutorial](../README.md).\n"])


if __name__ == "__main__":
    PATH.write_text(document())
