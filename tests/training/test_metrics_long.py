"""training/metrics.py, in runs of train_llm.py: what only tells costs nothing."""

import os
import re
import stat
import sys
from pathlib import Path

import launch
import pytest
from launch import LLM
from llm_runs import llm, metrics
from test_metrics import SHORT, assert_trains, trained


@pytest.mark.parametrize("where", [">&- 2>&-", "> /dev/full 2>&1", "2>/dev/full | head -n 1"])
def test_nobody_can_read(local, tmp_path, where):
    """Closed streams or a full disk: the run is trained and saved."""
    assert_trains(local, where)


def test_letters_that_the_terminal_does_not_have(local, tmp_path):
    """They are written in another way."""
    (tmp_path / "è.txt").write_text((local / "text.txt").read_text() + "é日本" * 1000)
    options = ("--dataset-name", "è.txt", *SHORT)
    output = launch.run(list(llm(local, *options)), PYTHONIOENCODING="ascii")
    assert trained() and r"Data: \xe8.txt" in output


def test_metrics_that_cannot_be_written_are_told_once(local, tmp_path):
    """The run goes on, and its snapshots are there."""
    Path("outputs/default/metrics.jsonl").mkdir(parents=True)
    output = launch.run(llm(local, *SHORT))
    assert trained()
    assert len(re.findall("WARNING: outputs/default/metrics.jsonl ends here: .*", output)) == 1
    assert "There is no new loss.png: " in output


WANDB = """
class Run:
    def define_metric(self, *args, **kinds): pass
    def log(self, *args, **kinds): raise OSError(28, "No space left on device")
    def finish(self, *args, **kinds): raise OSError(28, "No space left on device")
def init(**kinds):
    import os, time
    if os.environ["RANK"] == "1":
        time.sleep(12)
    return Run()
"""


def test_a_wandb_that_is_slow_and_broken(local, tmp_path):
    """One rank's takes longer than any rank waits for another, and nothing can be logged."""
    Path("wandb.py").write_text(WANDB)
    options = (*SHORT, "--timeout", 8, "--wandb", "offline", "--wandb-group", "all")
    launch.run(llm(local, *options, nproc=2), PYTHONPATH=str(tmp_path))
    assert trained() and list(metrics("outputs/default", "train/loss")) == [1, 2, 3]


def test_others_may_read_the_model(local, tmp_path):
    """All files of it, as far as the user's umask lets them."""
    command = " ".join(map(str, [sys.executable, LLM, *llm(local, *SHORT)[2:]]))
    for umask, mode in (("022", 0o644), ("027", 0o640)):
        launch.run(["bash", "-c", f"umask {umask}; {command} --experiment_name u{umask}"])
        files = list(Path(f"outputs/u{umask}/final").iterdir())
        assert {stat.S_IMODE(os.stat(file).st_mode) for file in files} == {mode} and len(files) > 3
