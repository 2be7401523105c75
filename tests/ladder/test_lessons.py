"""A lesson is the difference between one script and the next. Here it is kept small and true."""

import ast
import re
import subprocess
from itertools import pairwise

import pytest
from launch import ROOT

from plumbing import launch

LADDER = ["single_gpu.py", "multigpu.py", "multigpu_torchrun.py", "multinode.py"]

# What each script changes in the one before it. All else must stay the same, letter for letter.
LESSONS = {
    ("single_gpu.py", "multigpu.py"): {
        "docstring",
        "imports",
        "ddp_setup",
        "Trainer.__init__",
        "Trainer._run_epoch",
        "Trainer._save_checkpoint",
        "Trainer.train",
        "prepare_dataloader",
        "parse_args",
        "main",
        "__main__",
    },
    ("multigpu.py", "multigpu_torchrun.py"): {
        "docstring",
        "imports",
        "ddp_setup",
        "Trainer.__init__",
        "Trainer._save_checkpoint",
        "Trainer._save_snapshot",
        "Trainer._load_snapshot",
        "Trainer._resume",
        "Trainer.train",
        "parse_args",
        "main",
        "__main__",
    },
    ("multigpu_torchrun.py", "multinode.py"): {
        "docstring",
        "Trainer._load_snapshot",
        "main",
    },
}

# The house of real runs: who may import whom, since arrows go down only. An entry script first.
ROOMS = {path.stem: {path.stem, "training"} for path in [ROOT / "llm", ROOT / "translation"]}
ROOMS = {name: rooms for name, rooms in ROOMS.items() if (ROOT / name).exists()}
ROOMS |= {f"train_{name}.py": {name, "training"} for name in ROOMS} | {"training": {"training"}}
HOUSE = {
    str(path.relative_to(ROOT)): rooms
    for name, rooms in ROOMS.items()
    for path in ([ROOT / name] if name.endswith(".py") else sorted((ROOT / name).glob("*.py")))
}

# The sizes of the ladder, and of a function anywhere: it fits on a screen.
LINES = {"single_gpu.py": 93, "multigpu.py": 126, "multigpu_torchrun.py": 159, "multinode.py": 167}
EXERCISES = [f"exercises/{path.name}" for path in (ROOT / "exercises").glob("*.py")]
PLUMBING = [f"plumbing/{path.name}" for path in sorted((ROOT / "plumbing").glob("*.py"))]
LINES_OF_A_FUNCTION = 50

# And of a lesson: lines that are new, and lines that are gone, at most.
DIFFS = dict(zip(LESSONS, [(45, 11), (58, 23), (15, 6)], strict=True))

ORDER = ["docstring", "imports", "ddp_setup", "Trainer", "load_train_objs"]
ORDER += ["prepare_dataloader", "parse_args", "main", "__main__"]

OURS = {path.stem for path in ROOT.glob("*.py")}
OURS |= {path.parent.name for path in ROOT.glob("*/__init__.py")}

LAUNCHER_SETS = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}
LAUNCHER_SETS |= {"MASTER_ADDR", "MASTER_PORT"}
PLUMBING_SETS = {"GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS"}
OTHERS_SET = {
    name for each in launch.LAUNCHERS for name in (each.size, each.rank, *each.local_ranks)
}
OTHERS_SET |= {*launch.INDEXES, "PET_NPROC_PER_NODE", "TORCHELASTIC_RUN_ID"}

# What by its purpose is done once on each machine, or counts machines.
ONCE_A_MACHINE = {
    "plumbing/processes.py": {"warn_if_perhaps_one_of_several"},
    "plumbing/agree.py": {"print_on_each_machine", "exit_before_group"},
    "plumbing/locks.py": {"all_own"},
}
ONCE_A_MACHINE |= {"training/job.py": {"all_count_machines"}}
ONCE_A_MACHINE |= {"llm/data.py": {"prepare_tokens"}}
ONCE_A_MACHINE |= {"train_translation.py": {"all_load_datasets"}}
# What all ranks call and is not named so: a script's first steps, when no rank can wait for another
# yet.
ALL_BY_NATURE = {"arguments.parse_args", "processes.require_torchrun"}
# What torch.distributed does without a word to another rank.
ALONE = {"is_initialized", "get_rank", "get_world_size", "get_node_local_rank"}
ALONE |= {"is_torchelastic_launched", "destroy_process_group"}


def name_of(node):
    match node:
        case ast.FunctionDef() | ast.ClassDef():
            return node.name
        case ast.Import() | ast.ImportFrom():
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


@pytest.mark.parametrize("old, new", LESSONS)
def test_a_lesson_is_short(old, new):
    """The diff between neighbours has few lines."""
    command = ["git", "diff", "--no-index", "--numstat", old, new]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    added, removed = map(int, output.split()[:2])
    assert added <= DIFFS[old, new][0] and removed <= DIFFS[old, new][1], output


@pytest.mark.parametrize("script", LINES)
def test_a_script_of_the_ladder_is_short(script):
    assert len((ROOT / script).read_text().splitlines()) <= LINES[script]


@pytest.mark.parametrize("script", [*LADDER, *PLUMBING, *HOUSE, *EXERCISES])
def test_a_function_fits_on_a_screen(script):
    for function in functions((ROOT / script).read_text()).values():
        assert function.end_lineno - function.lineno < LINES_OF_A_FUNCTION, function.name


@pytest.mark.parametrize("script", [*LADDER, "datautils.py"])
def test_arrows_go_down_only(script):
    """A script needs plumbing/ and datautils.py, which needs nothing of ours."""
    assert rooms_of(script) == ({"plumbing", "datautils"} if script in LADDER else set())


@pytest.mark.parametrize("script", PLUMBING)
def test_plumbing_needs_nothing_else_of_ours(script):
    """The package can be carried to a cluster without the rest."""
    assert rooms_of(script) <= {"plumbing"}


@pytest.mark.parametrize("script", HOUSE)
def test_arrows_go_down_only_in_real_runs(script):
    """A script needs its package, this needs training/, and this plumbing/."""
    assert rooms_of(script) <= HOUSE[script] | {"plumbing"}


def test_no_two_modules_need_each_other():
    """Who reads a module finds what it needs in modules that do not need it."""
    modules = {name_of_module(script): script for script in [*PLUMBING, *HOUSE]}
    needs = {name: imported(script) & modules.keys() for name, script in modules.items()}
    assert "plumbing.agree" in needs["plumbing.files"] and "plumbing.files" in needs["plumbing"]
    while free := {name for name in needs if not needs[name]}:
        needs = {name: needs[name] - free for name in needs.keys() - free}
    assert needs == {}


def name_of_module(script):
    return script.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def rooms_of(script):
    """The files and packages of ours that a file imports."""
    return {name.partition(".")[0] for name in imported(script)} & OURS


def imported(script):
    """The modules that a file imports, those of a package that it takes by `from` included."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / script).read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            package = ROOT / node.module.replace(".", "/")
            for alias in node.names:
                is_module = (package / f"{alias.name}.py").exists()
                found.add(f"{node.module}.{alias.name}" if is_module else node.module)
    return found


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


def functions(text):
    """The functions of a program, also those in classes, by name."""
    nodes = ast.walk(ast.parse(text))
    return {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}


def depends_on_the_local_rank(tree):
    for node in ast.walk(tree):
        asked = getattr(node, "test", node)  # of an if, a while, an assert
        if asked is not node or isinstance(node, (ast.Compare, ast.BoolOp, ast.UnaryOp)):
            if re.search("local_?rank|number_here", ast.unparse(asked).lower()):
                return True
    return False


@pytest.mark.parametrize("script", LADDER)
def test_nothing_depends_on_the_local_rank(script):
    """Who prints, logs or saves is asked of the global rank: every node has a local rank 0."""
    assert not depends_on_the_local_rank(ast.parse((ROOT / script).read_text()))


@pytest.mark.parametrize("script", [*PLUMBING, *HOUSE])
def test_what_is_done_once_on_each_machine(script):
    """It is known by name, and all else asks for the global rank here as well."""
    text = (ROOT / script).read_text()
    asking = {name for name, node in functions(text).items() if depends_on_the_local_rank(node)}
    assert asking == ONCE_A_MACHINE.get(script, set())
    kinds = (ast.FunctionDef, ast.ClassDef)
    rest = [node for node in ast.parse(text).body if not isinstance(node, kinds)]
    assert not any(map(depends_on_the_local_rank, rest))


def test_what_all_ranks_have_to_call_is_named_so():
    """Nobody copies a function that waits for the other ranks under `if rank == 0`.

    A function waits if it calls torch.distributed, or a function of any module that waits.
    """
    calls = {}
    for script in [*PLUMBING, "training/buckets.py"]:
        calls |= calls_of(script)
    together = {
        name
        for name, called in calls.items()
        for module, _, method in (call.rpartition(".") for call in called)
        if (module.partition(".")[0] == "dist" and method not in ALONE) or method == "backward"
    }
    assert {
        "agree.all_gather",
        "agree.all_gather_by_store",
        "buckets.all_fix_bucket_order",
    } <= together
    while more := {name for name in calls if calls[name] & together} - together:
        together |= more
    named_so = {name for name in calls if name.partition(".")[2].startswith("all_")}
    assert together - named_so == ALL_BY_NATURE
    assert named_so <= together, "a name that lies"


def calls_of(script):
    """What each function of a module calls. Names of ours have their module: `agree.all_gather`."""
    tree = ast.parse((ROOT / script).read_text())
    own = name_of_module(script).rpartition(".")[2]
    named = functions(ast.unparse(tree))
    homes = {name: f"{own}.{name}" for name in named}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("plumbing."):
            module = node.module.removeprefix("plumbing.")
            homes |= {alias.asname or alias.name: f"{module}.{alias.name}" for alias in node.names}
    found = {}
    for name, function in named.items():
        called = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
        called = map(ast.unparse, called)
        found[f"{own}.{name}"] = {homes.get(call, call) for call in called}
    return found


@pytest.mark.parametrize("script", PLUMBING)
def test_no_barrier_in_plumbing(script):
    """On a GPU it warns about a group without device_id: a refusal would be more than its line."""
    assert "barrier" not in (ROOT / script).read_text()


@pytest.mark.parametrize("script", [*LADDER, *HOUSE])
def test_the_environment_is_read_in_ddp_setup_only(script):
    """Where a process is in its job comes from the launcher, and enters at one place.

    The other place is plumbing/, which is not asked here.
    """
    readers = {name for name, text in parts(script).items() if re.search(r"environ|getenv", text)}
    assert readers <= {"ddp_setup"}


@pytest.mark.parametrize("script", [*LADDER, *PLUMBING, *HOUSE])
def test_no_script_knows_that_it_is_tested(script):
    """Scripts that people read hold no test variable, mock hook or dry-run branch."""
    source = (ROOT / script).read_text()
    if script == "llm/documents.py":
        source = re.sub(r"test\|testing|called test", "", source)  # the name of a split
    assert not re.findall(r"(?i)(?<![a-z])tests?(?![a-z])|pytest|mock|fake|dry.?run", source)
    where = source if script in PLUMBING else parts(script).get("ddp_setup", "")
    nodes = ast.walk(ast.parse(where))
    strings = {str(node.value) for node in nodes if isinstance(node, ast.Constant)}
    words = {word for text in strings if text == text.upper() for word in text.split()}
    variables = {word for word in words if re.fullmatch(r"[A-Z][A-Z0-9_]+", word)}
    assert variables <= LAUNCHER_SETS | PLUMBING_SETS | OTHERS_SET
