"""docs/real-runs.md: its picture and its table show the rooms as they are."""

import ast
import re

from launch import ROOT

PAGE = (ROOT / "docs" / "real-runs.md").read_text()


def names_in(file):
    """What is defined in a file: functions, classes and methods."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {n.name for n in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(n, kinds)}


def test_every_answer_is_where_the_table_says():
    """Each row names functions of its file, or of another one that it names beside them."""
    table = PAGE.partition("| question | file | look for |")[2].partition("\n\n")[0]
    rows = [row.strip("| ").split(" | ") for row in table.splitlines()[2:]]
    assert len(rows) >= 10
    for question, file, where in rows:
        found = names_in(file)
        for other in re.findall(r"in ([\w/]+\.py)", where):
            found |= names_in(other)
        if "Trainer." in where:
            found |= names_in("training/trainer.py")
        if "program's own" in where:
            found |= names_in("train_llm.py")
        for name in re.findall("`([^`]+)`", where):
            assert name.rpartition(".")[2] in found, (question, name)


def test_every_module_has_its_place():
    """In the picture, and those of training/ in a chapter."""
    picture = PAGE.partition("## What imports what")[2].partition("## Which file to open")[0]
    for folder in ("training", "llm"):
        for path in (ROOT / folder).glob("[a-z]*.py"):
            assert path.name in picture, path
            assert folder == "llm" or re.search(rf"^## {path.name}: ", PAGE, re.M), path
