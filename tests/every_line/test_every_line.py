"""Each line that a lesson adds is taken out, and a check has to say what is missing."""

from collections import Counter

import document
import launch
import pytest
from lines import added, difference, of
from proofs import PREVIOUS, PROOFS

NAMED = {"import", "docstring", "print", "new function"}  # what a lesson adds and no proof is of


@pytest.mark.parametrize("script", PREVIOUS)
def test_each_line_has_a_proof(script):
    """A new line without a proof fails here, and so does a proof of a line that is gone.

    A line has one proof, or several of which each shows something else that the line is for.
    """
    lines = [(each.where, each.text) for each in added(PREVIOUS[script], script)]
    assert max(Counter(lines).values()) == 1
    proofs = [each for each in PROOFS if each.script == script]
    assert {(each.where, each.line) for each in proofs if not each.earlier} == set(lines)
    earlier = {(each.where, each.line) for each in proofs if each.earlier}
    assert earlier <= {(each.where, each.text) for each in of(script)} - set(lines)
    assert max(Counter((each.where, each.line, each.purpose) for each in proofs).values()) == 1
    assert all(each.part in each.line for each in proofs)
    assert {each.kind for each in difference(PREVIOUS[script], script)} <= NAMED | {"line"}


@pytest.mark.parametrize("proof", PROOFS, ids=lambda proof: f"{proof.where}: {proof.line[:40]}")
def test_without_its_line_the_script_is_another_program(proof, tmp_path):
    with open(proof.edited(tmp_path)) as edited:
        text = edited.read()
    compile(text, proof.script, "exec")
    assert text != (launch.ROOT / proof.script).read_text()


def test_the_document_has_each_line_and_what_it_is_for():
    rows = [line for line in document.PATH.read_text().splitlines() if line.startswith("| `")]
    assert len(rows) == len(PROOFS)
    for text, proof in zip(rows, PROOFS, strict=True):
        assert text.startswith(f"| {document.shown(proof)} | {proof.purpose} |")


# What README says would happen without a line, and the check that sees it happen.
CLAIMS = {
    "and no gradient would be averaged": "ranks train apart",
    "every rank trains on all 2048 samples": "ranks saw the same samples",
    "Without the call every epoch visits the samples in the same order": "epoch repeated",
    "if all ranks dropped the same neurons": "dropout equal on ranks",
    "each rank prints the loss of its own share": "loss is that of one rank",
    "Without the guard, every rank would write the same": "two writers of one file",
    "the names of DDP's weights begin with `module.`": "keys with module",
    "destroyed while the DDP model still exists": "DDP outlives its group",
    "ends the script with the command to type": "without torchrun no command is printed",
    "The other ranks wait for it in their next collective": "still waiting after the timeout",
    "the report contains only an exit status": "traceback not in the report of torchrun",
    "Without the state a resumed run continues": "optimizer state lost",
    "each resume trains one epoch twice": "epochs trained again",
    "With a different seed the run would not equal": "other samples than an unbroken run",
    "Adam can be loaded into AdamW without an error": "a different optimizer resumes",
    "If the script wrote over that file": "a full disk harmed the last snapshot",
    "the ranks would begin with different epochs": "ranks train apart",
    "50 epochs would be lost without a message": "training thrown away",
}


def test_what_the_readme_says_to_break_has_a_proof():
    text = " ".join((launch.ROOT / "README.md").read_text().split())
    assert [claim for claim in CLAIMS if claim not in text] == []
    assert set(CLAIMS.values()) <= {proof.check.says for proof in PROOFS}
