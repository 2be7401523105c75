"""What is refused before training."""

import importlib
import sys

import pytest

from plumbing import arguments


@pytest.mark.parametrize("script", ["single_gpu", "multigpu"])
def test_a_folder_that_cannot_be_written(script, monkeypatch, capsys):
    """At the start, and not at the first save: /proc is a folder in which even root makes no file.

    The scripts with --snapshot_path refuse such a path (tests/ladder/test_bad_input.py)."""
    module = importlib.import_module(script)
    monkeypatch.chdir("/proc")
    monkeypatch.setattr(sys, "argv", [f"{script}.py", "1"])
    with pytest.raises(SystemExit) as end:
        module.parse_args()
    assert end.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith("ERROR: cannot write in /proc (No such file or directory): ")
    assert told.endswith(": start it in a different folder\n") and told.count("\n") == 1


OWN = {"timeout": 600, "lr": 1e-3, "momentum": 0.0, "data": "", "amp": True, "layers": 2}


@pytest.mark.parametrize(
    "typed, name, value",
    [
        ("--lr 0.05", "lr", 0.05),
        ("--lr 1e-2", "lr", 0.01),
        ("--lr 1", "lr", 1.0),
        ("--momentum -0.5", "momentum", -0.5),
        ("--data my/file.pt", "data", "my/file.pt"),
        ("--amp no", "amp", False),
        ("--amp True", "amp", True),
        ("--layers 0", "layers", 0),
        ("--layers -1", "layers", -1),
    ],
)
def test_a_default_of_any_kind_makes_an_option(typed, name, value, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["mine.py", *typed.split()])
    args = vars(arguments.parse_args("A script.", OWN))
    assert args[name] == value and type(args[name]) is type(value)
    assert {key: args[key] for key in OWN if key != name} == {k: OWN[k] for k in OWN if k != name}


@pytest.mark.parametrize(
    "typed, problem",
    [
        ("--lr fast", "lr: give a number, such as 0.001 or 1e-3, not 'fast'"),
        ("--lr nan", "lr: give a number, such as 0.001 or 1e-3, not 'nan'"),
        ("--amp maybe", "amp: give yes or no, not 'maybe'"),
        ("--layers 2.5", "layers: give a whole number from -2147483648 to 2147483647, not '2.5'"),
        ("--timeout 0", "timeout: give a whole number from 1 to 2147483647, not '0'"),
    ],
)
def test_what_is_of_a_different_kind_is_refused(typed, problem, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["mine.py", *typed.split()])
    assert arguments.parse_args("A script.", OWN).mistake == problem


def test_help_shows_own_options_with_and_without_a_text(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["mine.py", "--help"])
    with pytest.raises(SystemExit):
        arguments.parse_args("A script.", OWN, {"lr": "learning rate, 100 % of it"})
    shown = " ".join(capsys.readouterr().out.split())
    assert "--lr LR learning rate, 100 % of it (0.001)" in shown
    assert "--amp AMP (yes)" in shown and "--data DATA ()" in shown
