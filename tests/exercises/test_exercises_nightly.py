"""Every exercise knows wrong cures, and tells what each of them is."""

import pytest
from test_exercises import ALL, ATTEMPTS
from test_exercises_long import judged

from exercises.exercise import edited


@pytest.mark.parametrize(
    "exercise, cure, says",
    [(each, *wrong) for each in ALL for wrong in ATTEMPTS[each.name]["wrong"]],
    ids=lambda value: getattr(value, "name", "wrong"),
)
def test_a_wrong_cure_is_told_what_it_is(exercise, cure, says, tmp_path):
    assert says in judged(exercise, edited(exercise.solution(), cure), tmp_path)
