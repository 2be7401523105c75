"""Every exercise fails as it is handed out, passes as solved, and knows right and wrong cures."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from exercises.catalogue import PARTS
from exercises.ranks import ROOT

ALL = [exercise for part in PARTS.values() for exercise in part]


FILES = sorted(path.stem for path in Path(__file__).parent.glob("attempts_*.py"))


ATTEMPTS = {}


for file in FILES:
    ATTEMPTS |= importlib.import_module(file).ATTEMPTS


each_exercise = pytest.mark.parametrize("exercise", ALL, ids=lambda exercise: exercise.name)


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


def test_the_readme_leads_from_each_step_to_its_exercises():
    text = (ROOT / "README.md").read_text()
    (sentence,) = re.findall(r"Do (\d.*? after step 4)\.", text)
    numbers = [(int(a), int(b)) for a, b in re.findall(r"(\d+) (?:to|and) (\d+) after", sentence)]
    ends, want = 0, []
    for part in list(PARTS.values())[:4]:
        want.append((ends + 1, ends := ends + len(part)))
    assert numbers == want
