"""The benchmark of train_llm.py runs; that its figures are right, people judge."""

import re
import sys

import launch
import pytest

sys.path.insert(0, str(launch.ROOT / "benchmarks"))
import llm_speed

BENCHMARK = """
import sys
sys.path[:0] = [{root!r}, {root!r} + "/benchmarks"]
from pathlib import Path
import llm_speed
llm_speed.SIZES = {{"gpt2": (1, 32, 2, 2)}}
llm_speed.LENGTH = 32
if len(sys.argv) > 1:
    llm_speed.prepare(Path("."), words=5000)
else:
    inside = llm_speed.script_rows(Path("."), "gpt2", rounds=2, number=4)
    if inside.processes == 1:
        llm_speed.save_rows(inside)
    inside.trainer = None
    llm_speed.torch.distributed.destroy_process_group()
"""


@pytest.mark.long
def test_the_benchmark_knows_the_script(tmp_path):
    """Its steps, its save and its own loop run, on a tiny model; the figures are not looked at."""
    (tmp_path / "driver.py").write_text(BENCHMARK.format(root=str(launch.ROOT)))
    launch.run(launch.python("driver.py", "prepare"))
    output = launch.run(launch.python("driver.py"), 120)
    for name in "script", "bare":
        for accumulation in 4, 1:
            assert re.search(
                rf"^{name}: gpt2, 1 GPU, accumulation {accumulation} .* tokens/s", output, re.M
            )
    assert re.search(r"^save .*torch.save \S+ s, a step waits \S+ s", output, re.M)
    output = launch.run(launch.torchrun("driver.py"), 120)
    assert (
        len(re.findall(r"^script: gpt2, 2 GPU, accumulation [14] .* tokens/s", output, re.M)) == 2
    )


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
