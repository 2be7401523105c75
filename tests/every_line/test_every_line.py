"""Each line that a lesson adds is taken out, and a check has to say what is missing."""

import re
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


# What README says of each lesson under "What breaks without it", and the check that sees it break.
CLAIMS = {
    "No sampler": "ranks saw the same samples",
    "No guard": "two writers of one file",
    "No `module`": "keys with module",
    "No snapshot": "training thrown away",
    "No atomic save": "a full disk harmed the last snapshot",
    "The first restart after which rank 0 has moved": "training thrown away",
}


def test_what_the_readme_says_to_break_has_a_proof():
    text = (launch.ROOT / "README.md").read_text()
    said = " ".join(re.findall(r"\*\*What breaks without it\.\*\* (.*(?:\n.+)*)", text))
    claims = re.findall(r"(No \S+(?: save)?|The first restart.*?moved)(?::| throws)", said)
    assert set(claims) == set(CLAIMS)
    assert set(CLAIMS.values()) <= {proof.check.says for proof in PROOFS}
