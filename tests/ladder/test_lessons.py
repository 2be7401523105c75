"""A lesson is the difference between one script and the next. Here it is kept small and true."""

import ast
import re
from itertools import pairwise

import pytest
from launch import ROOT

LADDER = ["single_gpu.py", "multigpu.py", "multigpu_torchrun.py", "multinode.py"]

# What each script changes in the one before it. All else must stay the same, letter for letter.
LESSONS = {
    ("single_gpu.py", "multigpu.py"): {
        "docstring",
        "imports",
        "count_gpus",
        "start_store",
        "ddp_setup",
        "Trainer.__init__",
        "Trainer._run_epoch",
        "Trainer._save_checkpoint",
        "Trainer.train",
        "Trainer.start_wandb",
        "prepare_dataloader",
        "parse_args",
        "main",
        "__main__",
    },
    ("multigpu.py", "multigpu_torchrun.py"): {
        "docstring",
        "imports",
        "start_store",
        "end_with_launcher",
        "ddp_setup",
        "exit_on",
        "Trainer.__init__",
        "Trainer._save_checkpoint",
        "Trainer._save_snapshot",
        "Trainer._load_snapshot",
        "Trainer._resume",
        "Trainer.train",
        "Trainer.start_wandb",
        "parse_args",
        "main",
        "__main__",
    },
    ("multigpu_torchrun.py", "multinode.py"): {
        "docstring",
        "exit_on_difference",
        "Trainer._load_snapshot",
        "Trainer.start_wandb",
        "main",
    },
}

# What train_llm.py takes from multinode.py as it is. It names nearly all else the same, too.
KEPT = {"count_gpus", "end_with_launcher", "exit_on", "exit_on_difference", "__main__"}

ORDER = ["docstring", "imports", "ddp_setup", "Trainer", "load_train_objs"]
ORDER += ["prepare_dataloader", "parse_args", "main", "__main__"]

LAUNCHER_SETS = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}
LAUNCHER_SETS |= {"MASTER_ADDR", "MASTER_PORT"}
A_SCRIPT_SETS = {"GLOO_SOCKET_IFNAME"}


def name_of(node):
    match node:
        case ast.FunctionDef() | ast.ClassDef():
            return node.name
        case ast.Import() | ast.ImportFrom():
            return "imports"
        case ast.Assign(targets=[ast.Name(id="LAUNCHER")]):  # amid the imports
            return "imports"
        case ast.Expr(value=ast.Constant(value=str())):
            return "docstring"
        case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
            return "__main__"
    return "other code"


def parts(script):
    """Every line of `script` by the part that it belongs to, with the comments above the part."""
    lines = (ROOT / script).read_text().splitlines()
    found, end = {}, 0
    for node in ast.parse("\n".join(lines)).body:
        in_class = isinstance(node, ast.ClassDef)
        for part in node.body if in_class else [node]:
            name = f"{node.name}.{name_of(part)}" if in_class else name_of(part)
            text = "\n".join(lines[end : part.end_lineno]).strip()
            found[name] = f"{found[name]}\n{text}" if name in found else text
            end = part.end_lineno
    assert not "".join(lines[end:]).strip(), f"{script} goes on after its last statement"
    return found


@pytest.mark.parametrize("old, new", LESSONS)
def test_only_the_lesson_changes(old, new):
    """A script changes what its lesson names, all of that, and not a letter besides."""
    before, after = parts(old), parts(new)
    changed = {name for name in before | after if before.get(name) != after.get(name)}
    assert changed == LESSONS[old, new]


def test_each_step_of_the_ladder_has_its_lesson():
    """The table of lessons leaves out no step."""
    assert list(LESSONS) == list(pairwise(LADDER))


def test_train_llm_keeps_what_it_can():
    """What a real run does not have to change is letter for letter that of multinode.py."""
    before, after = parts("multinode.py"), parts("train_llm.py")
    assert {name for name in before if before[name] == after.get(name)} == KEPT
    shared = [name for name in before if name in after]
    # Two methods of the same steps come later, since they are reached from others here.
    assert set(shared) >= set(before) - {"Trainer._run_epoch", "Trainer._save_snapshot"}
    assert [name for name in after if name in before] == shared


@pytest.mark.parametrize("script", LADDER)
def test_a_script_has_the_order_of_all_scripts(script):
    """A reader finds each part at the same place in every script, and nothing runs on import."""
    names = [name_of(node) for node in ast.parse((ROOT / script).read_text()).body]
    order = [name for name in dict.fromkeys(names) if name in ORDER]
    assert order == [name for name in ORDER if name in names]
    assert set(ORDER) - set(names) <= {"ddp_setup"}, "only one process needs no set-up"
    assert "other code" not in names


@pytest.mark.parametrize("old, new", LESSONS)
def test_neighbours_keep_the_order_of_definitions(old, new):
    """Functions and methods that two neighbours share do not change places."""
    before, after = parts(old), parts(new)
    assert [name for name in before if name in after] == [name for name in after if name in before]


@pytest.mark.parametrize("script", LADDER)
def test_nothing_depends_on_the_local_rank(script):
    """Who prints, logs or saves is asked of the global rank: every node has a local rank 0."""
    for node in ast.walk(ast.parse((ROOT / script).read_text())):
        asked = getattr(node, "test", node)  # of an if, a while, an assert
        if asked is not node or isinstance(node, (ast.Compare, ast.BoolOp, ast.UnaryOp)):
            assert "local_rank" not in ast.unparse(asked).lower()


@pytest.mark.parametrize("script", [*LADDER, "train_llm.py"])
def test_the_environment_is_read_in_ddp_setup_only(script):
    """Where a process is in its job comes from the launcher, and enters at one place."""
    readers = {name for name, text in parts(script).items() if re.search(r"environ|getenv", text)}
    assert readers <= {"ddp_setup"}


@pytest.mark.parametrize("script", [*LADDER, "train_llm.py"])
def test_no_script_knows_that_it_is_tested(script):
    """Scripts that people read hold no test variable, mock hook or dry-run branch."""
    source = (ROOT / script).read_text()
    assert not re.findall(r"(?i)(?<![a-z])tests?(?![a-z])|pytest|mock|fake|dry.?run", source)
    setup = ast.parse(parts(script).get("ddp_setup", ""))
    strings = {node.value for node in ast.walk(setup) if isinstance(node, ast.Constant)}
    variables = {text for text in strings if re.fullmatch(r"[A-Z][A-Z0-9_]+", str(text))}
    assert variables <= LAUNCHER_SETS | A_SCRIPT_SETS
