"""What is refused before training."""

import importlib
import sys

import pytest


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
