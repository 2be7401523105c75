"""All machines run the same program, or the job ends and says which file differs where."""

import shutil
import socket
import sys
from pathlib import Path
from types import ModuleType

import launch
import pytest

from plumbing import versions

SAME = ("Python 3.11.7", "torch 2.13.0")


def of(*machines):
    """What each rank tells: its place, its files with a digest each, its versions."""
    return [versions.Program(place, "run.py", files, SAME) for place, files in machines]


@pytest.mark.parametrize(
    "everyone, odd, same",
    [
        (of(("a:/x", {"m.py": "1"}), ("b:/x", {"m.py": "2"})), "m.py of b:/x", "a:/x"),
        (
            of(("a:/x", {"m.py": "2"}), ("b:/x", {"m.py": "1"}), ("c:/x", {"m.py": "1"})),
            "m.py of a:/x",
            "b:/x",
        ),
        (
            of(*((f"{name}:/x", {"m.py": name, "n.py": name}) for name in "abcdefg")),
            "m.py, n.py of b:/x, c:/x, d:/x, e:/x and 2 more",
            "a:/x",
        ),
    ],
    ids=["two", "one of three", "all"],
)
def test_the_line_names_the_files_and_the_machines_that_are_odd(everyone, odd, same):
    line = versions.different_code(everyone)
    cure = "Bring all machines to one version"
    assert line == f"{odd}: not the same code as on {same}. {cure}"


def test_a_different_script_is_named_as_it_is_called_there():
    mine, other = of(("a:/x", {versions.SCRIPT: "1"}), ("b:/x", {versions.SCRIPT: "1"}))
    assert versions.different_code([mine, other._replace(script="copy.py")]) is None
    other = other._replace(script="multinode.py", files={versions.SCRIPT: "2"})
    assert versions.different_code([mine, other]).startswith("multinode.py of b:/x: not the same")


def test_a_module_that_only_some_ranks_have_imported_is_no_difference():
    both = {"m.py": "1", "plots.py": "1"}
    assert versions.different_code(of(("a:/x", both), ("b:/y", {"m.py": "1"}))) is None


def test_versions_are_compared():
    *mine, other = of(("a:/x", {}), ("b:/x", {}), ("c:/x", {}))
    mine += [other._replace(versions=("Python 3.11.7", "torch 2.14.1"))]
    assert versions.different_versions(mine[:2]) is None
    line = versions.different_versions(mine)
    assert line.startswith("torch 2.13.0 on a, b, torch 2.14.1 on c. ")


def test_the_files_are_those_beside_the_script(monkeypatch, tmp_path):
    """Not what an installer has put there, and also if the script is started through a link."""
    project, elsewhere = tmp_path / "project", tmp_path / "bin"
    library = project / ".venv" / "lib" / "site-packages"
    for path in (library / "big.py", project / "mine.py", project / "run.py", elsewhere / "x.py"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
        module = ModuleType(path.stem)
        module.__file__ = str(path)
        monkeypatch.setitem(sys.modules, f"test {path.stem}", module)
    (elsewhere / "run").symlink_to(project / "run.py")
    started = str(elsewhere / "run")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", started, raising=False)
    found = set(versions.digests())
    assert {versions.SCRIPT, "mine.py", "x.py", "plumbing/versions.py"} <= found
    assert not any("big.py" in name for name in found)


@pytest.fixture
def machines(tmp_path):
    """Three folders with a copy of multinode.py each, as on three machines."""
    folders = [tmp_path / name for name in ("one", "two", "three")]
    for folder in folders:
        folder.mkdir()
        launch.copy_scripts(folder)
    return folders


def together(machines, **env):
    """(status, output) of the rank on each machine."""
    port = launch.free_port()
    sizes = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    jobs = [
        launch.start(
            launch.forked(str(folder / "multinode.py"), 2, 1),
            folder,
            **(launch.alone(rank, 3, port) | sizes | env),
        )
        for rank, folder in enumerate(machines)
    ]
    return [launch.finish(job) for job in jobs]


@pytest.mark.parametrize("file, old, new", [
    ("multinode.py", "lr=0.05", "lr=0.5"),
    ("datautils.py", "class", "# as last week\nclass"),
])  # fmt: skip
def test_no_job_trains_with_two_versions_of_a_program(machines, file, old, new):
    path = machines[1] / file
    path.write_text(path.read_text().replace(old, new, 1))
    for status, output in together(machines):
        assert status == 2 and "Epoch" not in output
        (line,) = [line for line in output.splitlines() if line.startswith("ERROR")]
        where = f"{file} of {socket.gethostname()}:{machines[1]}: not the same code as on"
        assert line.startswith(f"ERROR: {where}") and str(machines[0]) in line
    assert not any(Path(folder, "snapshot.pt").exists() for folder in machines)


def test_what_else_is_in_the_folders_may_differ(machines):
    shutil.copy(machines[0] / "single_gpu.py", machines[0] / "mine.py")
    (machines[1] / "single_gpu.py").unlink()
    assert [status for status, _ in together(machines)] == [0, 0, 0]
