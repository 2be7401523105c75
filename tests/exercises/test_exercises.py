"""Every exercise fails as it is handed out, passes as solved, and knows right and wrong cures."""

import importlib
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from exercises import __main__ as cli
from exercises.catalogue import PARTS
from exercises.exercise import edited
from exercises.ranks import ROOT

ALL = [exercise for part in PARTS.values() for exercise in part]
FILES = sorted(path.stem for path in Path(__file__).parent.glob("attempts_*.py"))
ATTEMPTS = {}
for file in FILES:
    ATTEMPTS |= importlib.import_module(file).ATTEMPTS

each_exercise = pytest.mark.parametrize("exercise", ALL, ids=lambda exercise: exercise.name)


def judged(exercise, text, folder):
    """What the check says of a reader's file, within its time."""
    path = Path(folder) / f"reader{exercise.suffix}"
    path.write_text(text)
    began = time.monotonic()
    message = exercise.judge(path)
    assert time.monotonic() - began < 40  # 20 s with two cores for itself
    return message or ""


def test_there_are_enough_and_each_is_tried():
    assert len(ALL) >= 24 and len({each.name for each in ALL}) == len(ALL)
    assert set(ATTEMPTS) == {each.name for each in ALL}
    assert all(each["says"] and each["cures"] and each["wrong"] for each in ATTEMPTS.values())


@each_exercise
def test_it_is_another_program_and_the_text_is_short(exercise):
    assert exercise.handed_out() != exercise.solution()
    assert len(re.findall(r"[.?!](?:\s|$)", exercise.task)) <= 4
    file, _, anchor = exercise.reads.partition("#")
    headings = re.findall("^#+ (.*)", (ROOT / file).read_text(), re.M) if file else []
    slugs = {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}
    assert not anchor or anchor in slugs


@each_exercise
def test_what_needs_ranks_is_not_started_by_python(exercise):
    text = exercise.solution()
    alone = "mp.spawn(" in text or not re.search("init_process_group|LOCAL_RANK", text)
    assert (exercise.start == "python") == (alone and exercise.suffix == ".py")


@pytest.mark.long
@each_exercise
def test_as_handed_out_it_fails_with_the_announced_line(exercise, tmp_path):
    message = judged(exercise, exercise.handed_out(), tmp_path)
    assert ATTEMPTS[exercise.name]["says"] in message
    assert len(message.splitlines()) <= 3 and "Traceback" not in message


@pytest.mark.long
@each_exercise
def test_the_solution_passes(exercise, tmp_path):
    assert judged(exercise, exercise.solution(), tmp_path) == ""


@pytest.mark.long
@pytest.mark.parametrize(
    "exercise, cure",
    [(each, cure) for each in ALL for cure in ATTEMPTS[each.name]["cures"]],
    ids=lambda value: getattr(value, "name", "cure"),
)
def test_another_honest_cure_passes(exercise, cure, tmp_path):
    assert judged(exercise, edited(exercise.solution(), cure), tmp_path) == ""


@pytest.mark.long
@pytest.mark.parametrize(
    "exercise, cure, says",
    [(each, *wrong) for each in ALL for wrong in ATTEMPTS[each.name]["wrong"]],
    ids=lambda value: getattr(value, "name", "wrong"),
)
def test_a_wrong_cure_is_told_what_it_is(exercise, cure, says, tmp_path):
    assert says in judged(exercise, edited(exercise.solution(), cure), tmp_path)


@pytest.mark.long
def test_a_file_that_is_no_program_is_told(tmp_path):
    """And one that hangs or prints nothing, in one line."""
    exercise = next(each for each in ALL if each.name == "loss")
    assert "line 2" in judged(exercise, "x = 1\nif x print(x)\n", tmp_path)
    assert "Traceback" not in judged(exercise, "import os\nos._exit(0)\n", tmp_path)


def command(*args, status, cwd=ROOT):
    done = subprocess.run(
        [sys.executable, "-m", "exercises", *args], cwd=cwd, capture_output=True, text=True
    )
    assert done.returncode == status and "Traceback" not in done.stderr, done
    return done.stdout + done.stderr


def test_the_command_refuses_in_one_line():
    for wrong in "0", "99", "nonsense":
        assert command(wrong, status=2).count("\n") == 1
    assert "which exercise" in command("--hint", status=2)


@pytest.mark.long
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


def test_the_readme_leads_from_each_step_to_its_exercises():
    text = (ROOT / "README.md").read_text()
    (sentence,) = re.findall(r"Do (\d.*? after step 4)\.", text)
    numbers = [(int(a), int(b)) for a, b in re.findall(r"(\d+) (?:to|and) (\d+) after", sentence)]
    ends, want = 0, []
    for part in list(PARTS.values())[:4]:
        want.append((ends + 1, ends := ends + len(part)))
    assert numbers == want
