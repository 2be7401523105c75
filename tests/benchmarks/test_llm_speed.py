"""The benchmark of train_llm.py runs; that its figures are right, people judge."""

import llm_speed
import pytest


def test_a_job_is_held_against_its_gpus_alone(capsys):
    alone = [
        {("script", 4): 100.0, ("script", 1): 90.0},
        {("script", 4): 80.0, ("script", 1): 90.0},
    ]
    llm_speed.print_efficiency(2, alone, {("script", 4): 72.0, ("script", 1): 88.2})
    assert capsys.readouterr().out == (
        "2 GPUs, accumulation 4: 90.0% of the slowest alone, 80.0% of their mean\n"
        "2 GPUs, accumulation 1: 98.0% of the slowest alone, 98.0% of their mean\n"
    )


def test_the_speeds_of_a_child_are_read(capsys):
    line = "script: gpt2, 2 GPU, accumulation 4             548,001 tokens/s a GPU, MFU 47.38% (1)"
    assert llm_speed.run(["echo", line]) == {("script", 4): 548_001.0}
    assert capsys.readouterr().out == line + "\n"


def test_a_child_that_fails_has_shown_what_it_printed(capfd):
    with pytest.raises(llm_speed.subprocess.CalledProcessError):
        llm_speed.run(["sh", "-c", "echo ERROR: it was this; exit 3"])
    assert capfd.readouterr().out == "ERROR: it was this\n"
