"""Which statements a lesson adds: what a script of the ladder has and the one before has not."""

import ast
import copy
import difflib
import io
import tokenize
from dataclasses import dataclass

from launch import ROOT


@dataclass(frozen=True)
class Statement:
    where: str  # the name of the function or method that contains it
    text: str  # its source from its first column on; of an `if`, `with` or `def` up to the colon
    kind: str  # "line", or why it needs no proof: "import", "docstring", "print", "new function"
    first: int  # its line numbers
    last: int
    column: int
    before: tuple[str, ...] = ()  # the statements in its place in the script before


def statements(source: str) -> list[tuple[str, Statement]]:
    """All statements in their order, each with its code without comments, which is compared."""
    lines = source.splitlines()
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    found = []

    def add(node, where, kind, last, code):
        column = node.col_offset - code.startswith("@")
        text = "\n".join(lines[node.lineno - 1 : last[0]])
        text = text[column : len(text) - len(lines[last[0] - 1]) + last[1]]
        text = text.replace("\n" + " " * column, "\n")
        found.append((code, Statement(where, text, kind, node.lineno, last[0], column)))

    def visit(node, where):
        for decorator in getattr(node, "decorator_list", []):
            end = decorator.end_lineno, decorator.end_col_offset
            add(decorator, where, "line", end, f"@{ast.unparse(decorator)}")
        body = getattr(node, "body", [])
        if not body:
            add(node, where, kind_of(node), (node.end_lineno, node.end_col_offset), code_of(node))
            return
        start, end = (node.lineno, node.col_offset), (body[0].lineno, body[0].col_offset)
        colon = [each.end for each in tokens if start <= each.start < end and each.string == ":"]
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            where = f"{where}.{node.name}".removeprefix("__main__.")
        add(node, where, "line", colon[-1], code_of(node))
        for part in [*body, *getattr(node, "orelse", [])]:
            visit(part, where)

    for node in ast.parse(source).body:
        visit(node, "__main__")
    return found


def of(script: str) -> list[Statement]:
    """All statements of a script in their order."""
    return [statement for _, statement in statements((ROOT / script).read_text())]


def kind_of(node) -> str:
    match node:
        case ast.Import() | ast.ImportFrom():
            return "import"
        case ast.Expr(value=ast.Constant(value=str())):
            return "docstring"
        case ast.Expr(value=ast.Call(func=ast.Name(id="print"))):
            return "print"
    return "line"


def code_of(node) -> str:
    if not hasattr(node, "body"):
        return ast.unparse(node)
    alone = copy.copy(node)
    alone.body, alone.orelse, alone.decorator_list = [ast.Pass()], [], []
    return ast.unparse(alone)


def difference(old_script: str, new_script: str) -> list[Statement]:
    """What the new script has and the old one has not, of all kinds."""
    (old, before), (new, after) = (
        zip(*statements((ROOT / script).read_text()), strict=True)
        for script in (old_script, new_script)
    )
    functions = {each.where for each in before}
    found = []
    for tag, i, i_end, j, j_end in difflib.SequenceMatcher(None, old, new, False).get_opcodes():
        if tag == "equal":
            continue
        for each in after[j:j_end]:
            new_function = each.text.startswith("def ") and each.where not in functions
            kind = "new function" if new_function else each.kind
            gone = tuple(statement.text for statement in before[i:i_end])
            found.append(Statement(**vars(each) | {"kind": kind, "before": gone}))
    return found


def added(old_script: str, new_script: str) -> list[Statement]:
    """The statements that a lesson adds or changes, and that so need a proof."""
    return [each for each in difference(old_script, new_script) if each.kind == "line"]


def without(script: str, statement: Statement, replacement: str) -> str:
    """The text of the script with something else, or nothing, in place of the statement."""
    lines = (ROOT / script).read_text().splitlines()
    new = [" " * statement.column + line for line in replacement.splitlines()]
    return "\n".join([*lines[: statement.first - 1], *new, *lines[statement.last :], ""])
