"""Every exercise fails as it is handed out, passes as solved, and knows honest cures."""

import dataclasses
import sys
import time
from pathlib import Path

import pytest
from test_exercises import ALL, ATTEMPTS, each_exercise

from exercises import __main__ as cli
from exercises.exercise import edited, first_complaint
from exercises.ranks import ROOT


def judged(exercise, text, folder):
    """What the check says of a reader's file, within its time."""
    path = Path(folder) / f"reader{exercise.suffix}"
    path.write_text(text)
    began = time.monotonic()
    message = exercise.judge(path)
    assert time.monotonic() - began < 40  # 20 s with two cores for itself
    return message or ""


@each_exercise
def test_as_handed_out_it_fails_with_the_announced_line(exercise, tmp_path):
    message = judged(exercise, exercise.handed_out(), tmp_path)
    assert ATTEMPTS[exercise.name]["says"] in message
    assert len(message.splitlines()) <= 3 and "Traceback" not in message


def by_solution():
    """The exercises, those together that are solved by one program and ask for runs of it."""
    found = {}
    for each in ALL:
        key = each.solution() if hasattr(each.check, "asked") else each.name
        found.setdefault(key, []).append(each)
    return found.values()


@pytest.mark.parametrize(
    "exercises", by_solution(), ids=lambda exercises: "-".join(each.name for each in exercises)
)
def test_the_solution_passes(exercises, tmp_path):
    """Where one program solves several exercises, each run of it is looked at for all of these."""
    one, *others = exercises
    if others:
        asked = [every for each in exercises for every in each.check.asked]
        one = dataclasses.replace(one, check=first_complaint(*dict.fromkeys(asked)))
    assert judged(one, one.solution(), tmp_path) == ""


@pytest.mark.parametrize(
    "exercise, cure",
    [(each, cure) for each in ALL for cure in ATTEMPTS[each.name]["cures"]],
    ids=lambda value: getattr(value, "name", "cure"),
)
def test_another_honest_cure_passes(exercise, cure, tmp_path):
    assert judged(exercise, edited(exercise.solution(), cure), tmp_path) == ""


def test_a_file_that_is_no_program_is_told(tmp_path):
    """And one that hangs or prints nothing, in one line."""
    exercise = next(each for each in ALL if each.name == "loss")
    assert "line 2" in judged(exercise, "x = 1\nif x print(x)\n", tmp_path)
    assert "Traceback" not in judged(exercise, "import os\nos._exit(0)\n", tmp_path)


def test_a_reader_solves_one(monkeypatch, tmp_path, capsys):
    """The list, the task, the hint, the solution, the tick, and beginning anew."""
    monkeypatch.setattr(cli, "WORK", tmp_path / "work")
    monkeypatch.setattr(cli, "SOLVED", tmp_path / "work" / "solved.json")

    def typed(*args):
        monkeypatch.setattr(sys, "argv", ["exercises", *args])
        status = cli.main()
        return status, capsys.readouterr().out

    assert typed("writer")[0] == 1
    path = cli.file_of(cli.find("writer"))
    assert path.read_text() == cli.find("writer").handed_out()
    assert "✓" not in typed()[1]
    assert typed("writer", "--hint")[1].count("\n") == 1
    assert "+        if self.rank != 0:" in typed("writer", "--solution")[1]
    path.write_text((ROOT / "multigpu.py").read_text())
    assert typed("writer")[0] == 0 and "✓ " in typed()[1]
    assert typed("writer", "--reset")[0] == 0 and "✓" not in typed()[1]
    assert path.read_text() == cli.find("writer").handed_out()
