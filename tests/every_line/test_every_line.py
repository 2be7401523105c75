"""Each line that a lesson adds is taken out, and has to be missed by what says what it is for."""

from collections import Counter

import launch
import oracles
import pytest
from lines import added, difference
from proofs import PREVIOUS, PROOFS

NAMED = {"import", "docstring", "print", "new function"}  # what a lesson adds and no proof is of
TRIED = [proof for proof in PROOFS if proof.oracle]


@pytest.mark.parametrize("script", PREVIOUS)
def test_each_line_has_one_proof(script):
    """A new line without a proof fails here, and so does a proof of a line that is gone."""
    lines = [(each.where, each.text) for each in added(PREVIOUS[script], script)]
    proofs = [(each.where, each.line) for each in PROOFS if each.script == script]
    assert Counter(proofs) == Counter(lines) and max(Counter(lines).values()) == 1
    assert {each.kind for each in difference(PREVIOUS[script], script)} <= NAMED | {"line"}


@pytest.mark.parametrize("proof", PROOFS, ids=lambda proof: f"{proof.where}: {proof.line[:40]}")
def test_a_proof_has_an_oracle_or_says_why_not(proof, tmp_path):
    """And the script without the line is a program, and another one."""
    assert [bool(each) for each in (proof.oracle, proof.needs, proof.unproven)].count(True) == 1
    assert not proof.needs or proof.needs.partition(":")[0] in {"gpu", "hosts", "race"}
    with open(proof.edited(tmp_path)) as edited:
        text = edited.read()
    compile(text, proof.script, "exec")
    assert text != (launch.ROOT / proof.script).read_text()


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """single_gpu.py in one process, with a batch that is the others' together."""
    run = oracles.in_ranks(launch.SINGLE, tmp_path_factory.mktemp("one"), world_size=1)
    assert run.statuses == {0}, run.output
    return run


@pytest.mark.long
@pytest.mark.parametrize("way", dict.fromkeys(oracle.way for oracle in oracles.ORACLES))
@pytest.mark.parametrize("script", PREVIOUS)
def test_nothing_is_wrong_with_the_whole_script(script, way, one, tmp_path):
    """No oracle has anything to say."""
    run = way(str(launch.ROOT / script), tmp_path)
    asked = [oracle for oracle in oracles.ORACLES if oracle.way is way]
    said = {oracle.says: oracle(run, one) for oracle in asked}
    assert said == dict.fromkeys(said), run.output


@pytest.mark.long
@pytest.mark.parametrize("proof", TRIED, ids=lambda proof: f"{proof.where}: {proof.line[:40]}")
def test_without_the_line(proof, one, tmp_path):
    """What the line is for goes wrong, and is said; the script does not just crash."""
    run, message = proof.try_without(tmp_path, one)
    assert message and proof.says in message, run.output
    assert run.statuses == {0} or proof.oracle in oracles.CRASHES, run.output
