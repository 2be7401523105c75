"""Processes behind a wrapper, and as process 1 of a container, end when they have to."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import launch
import pytest

WRAPPERS = {
    "bash": '#!/bin/bash\nexport SOME_SETTING=1\npython "$@"\n',
    "exec": '#!/bin/bash\nexec python "$@"\n',
    "two": '#!/bin/bash\nbash -c \'python "$@"; true\' bash "$@"; true\n',
    "setsid": '#!/bin/bash\nsetsid --wait python "$@"; true\n',
    "torch": "#!/usr/bin/env python\nimport subprocess, sys, torch\n"
    "sys.exit(subprocess.call([sys.executable, *sys.argv[1:]]))\n",
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_processes_behind_a_wrapper_end_with_torchrun(tmp_path, wrapper):
    path = Path("wrapper")
    path.write_text(WRAPPERS[wrapper])
    path.chmod(0o755)
    options = ("--standalone", "--no-python")
    job = launch.start(
        launch.torchrun("./wrapper", launch.TORCHRUN_SCRIPT, 3000, 1000, options=options),
        PATH=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    )
    output = launch.wait_for(job, lambda output: output.count("Epoch 3 ") == 2)
    job.kill()
    assert launch.gone(launch.pids(output)), job.log.read_text()


def can_make_namespaces():
    command = ["unshare", "--pid", "--fork", "--mount-proc", "true"]
    return shutil.which("unshare") and subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.skipif(not can_make_namespaces(), reason="needs root and unshare")
@pytest.mark.parametrize(
    "command",
    [
        ["python", launch.SINGLE],
        ["python", launch.MULTI],
        ["torchrun", "--standalone", "--nproc_per_node=2", launch.TORCHRUN_SCRIPT],
        ["sh", "-c", 'cd . && exec python "$@"', "sh", launch.SINGLE],
    ],
    ids=["single_gpu.py", "multigpu.py", "torchrun", "sh -c with exec"],
)
def test_process_1_ends_at_sigterm(tmp_path, command):
    """As `docker stop` sends it to a container without an init."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    container = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    job = launch.start([*container, *command, "3000", "1000"], PATH=path)
    launch.wait_for(job, lambda output: "Epoch 3 " in output)
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text()
    (process_1,) = map(int, children.split())
    os.kill(process_1, signal.SIGTERM)
    status, output = launch.finish(job, 30)
    assert status in (128 + signal.SIGTERM, 1), output
    assert not re.search("Epoch 2999", output)
