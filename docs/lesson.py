"""Code for the text (run by cog): what differs between two scripts, or parts of one."""

import ast
import difflib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def parts(script: str) -> dict[str, list[str]]:
    """The lines of `script` by the name of their part: imports, each function and method, main."""
    source = (ROOT / script).read_text()
    lines = source.splitlines()
    body = ast.parse(source).body
    first = next(node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef))
    found = {"imports": "\n".join(lines[: first.lineno - 1]).rstrip().splitlines()}
    for node in body[body.index(first) :]:
        for part in node.body if isinstance(node, ast.ClassDef) else [node]:
            name = getattr(part, "name", "__main__")
            start = min([part.lineno, *(d.lineno for d in getattr(part, "decorator_list", []))])
            found[name if part is node else f"{node.name}.{name}"] = lines[
                start - 1 : part.end_lineno
            ]
    return found


def changed(old: str, new: str) -> list[str]:
    """The names of the parts that differ, in the order of `new`, those that it drops last."""
    before, after = parts(old), parts(new)
    return [name for name in after | before if before.get(name) != after.get(name)]


def show(old: str, new: str, *names: str):
    """Print the difference in the named parts as one block for Markdown.

    A part that has another name in `new` is named by both: "_save_checkpoint > _save_snapshot".
    """
    print("```diff")
    for number, name in enumerate(names):
        if number > 0:
            print()
        name_before, _, name_after = name.partition(" > ")
        before, after = parts(old).get(name_before, []), parts(new).get(name_after or name, [])
        hunks = list(difflib.unified_diff(before, after, n=1, lineterm=""))[3:]
        print("\n".join("  ⋮" if line.startswith("@@") else line.rstrip() for line in hunks))
    print("```")


def code(script: str, *names: str):
    """Print the named parts of a script as one block for Markdown, methods below their class.

    It is marked `py`: what is marked `python` in the text is a whole program, and is run.
    """
    found = parts(script)
    print("```py")
    class_before = None
    for number, name in enumerate(names):
        class_name = name.rpartition(".")[0]
        if class_name and class_name == class_before:
            above = [""]
        else:
            above = ["", ""] if number > 0 else []
            above += [f"class {class_name}:"] if class_name else []
        print("\n".join(above + found[name]))
        class_before = class_name
    print("```")
