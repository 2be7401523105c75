"""Each line that a lesson adds is taken out, and a check has to say what is missing."""

import document
import launch
import pytest
from proofs import PREVIOUS, PROOFS

from exercises.checks import MAY_CRASH, MAY_HANG
from exercises.ranks import LATE


def ways(script):
    """For each way in which the proofs have the script run, the checks that look at that run."""
    found = {}
    for proof in PROOFS:
        if proof.script == script:
            found.setdefault(proof.way or proof.check.ways[0], set()).add(proof.check)
    return found.items()


@pytest.mark.parametrize(
    "script, way, asked", [(script, *each) for script in PREVIOUS for each in ways(script)]
)
def test_nothing_is_wrong_with_the_whole_script(script, way, asked, tmp_path):
    """No check has anything to say, so what it says without a line is the line's doing."""
    run = way(str(launch.ROOT / script), tmp_path)
    said = {check.says: check(run) for check in asked}
    assert said == dict.fromkeys(said), run.output


@pytest.mark.parametrize("proof", PROOFS, ids=lambda proof: f"{proof.where}: {proof.line[:40]}")
def test_without_the_line(proof, tmp_path):
    """What the line is for goes wrong, and is said; the script does not just crash."""
    run, message = proof.try_without(tmp_path)
    assert message and proof.says in message, run.output
    no_crash = run.statuses <= ({0, LATE} if proof.check in MAY_HANG else {0})
    assert no_crash or proof.check in MAY_CRASH, run.output
    # What Python and torch say of an error differs between their versions.
    said = document.said(proof, message if no_crash else "")
    assert document.masked(said) in document.masked(document.PATH.read_text()), message
