"""benchmarks/llm_speed.py as a whole, on a tiny model; that its figures are right, people judge."""

import re

import launch

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


def test_the_benchmark_knows_the_script(tmp_path):
    """Its steps, its save and its own loop run, on a tiny model; the figures are not looked at."""
    (tmp_path / "driver.py").write_text(BENCHMARK.format(root=str(launch.ROOT)))
    launch.run(launch.forked("driver.py", "prepare"))
    output = launch.run(launch.forked("driver.py"), 120)
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
