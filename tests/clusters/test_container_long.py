"""The image, without Docker: what it installs is installed, and a script runs there."""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from launch import ROOT, copy_scripts, run
from test_container import instructions

# As `docker run --user` does: a user that the system does not know. It may read all that root may,
# as pytest's folders and perhaps Python itself are root's alone, but it can write in its own only.
STRANGER = ["setpriv", "--reuid=12345", "--regid=12345", "--clear-groups"]


STRANGER += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]


# What programs want of their user: a name, which getpass else seeks in /etc/passwd, and a home.
NAME = "import getpass; getpass.getuser()"


HOME = "import pathlib, tempfile; tempfile.TemporaryFile(dir=pathlib.Path.home())"


def test_a_script_runs_with_what_the_image_has():
    """Install as the image does, then train as a user that is not root in a folder of its own."""
    user = STRANGER if os.getuid() == 0 else []
    if subprocess.run([*user, "true"]).returncode != 0:
        pytest.skip("root may not become another user here")
    with tempfile.TemporaryDirectory() as folder:  # not kept, as it is large
        context, workspace = Path(folder, "context"), Path(folder, "workspace")
        path = os.pathsep.join([f"{folder}/venv/bin", os.environ["PATH"]])
        run([sys.executable, "-m", "venv", f"{folder}/venv"])

        context.mkdir()
        for source, target in map(str.split, instructions("COPY")):
            assert f"!{source}" in (ROOT / ".dockerignore").read_text().splitlines()
            shutil.copy(ROOT / source, context / target)
        for command in instructions("RUN"):
            assert command.startswith("pip install ")  # what else could be run on any machine?
            # What the set-up line of README.md has downloaded need not be downloaded again, and
            # most of what is installed here is never imported.
            command = command.replace("--no-cache-dir", "--no-compile")
            run(["sh", "-c", command], seconds=600, cwd=context, PATH=path)

        workspace.mkdir()
        copy_scripts(workspace)
        if user:
            os.chown(workspace, 12345, 12345)
        env = ["env", "-i", f"PATH={path}", "CUDA_VISIBLE_DEVICES="]
        env += [setting for line in instructions("ENV") for setting in shlex.split(line)]
        run([*user, *env, "python", "-c", NAME], cwd=workspace)
        run([*user, *env, "python", "-c", HOME], cwd=workspace)
        output = run([*user, *env, "python", "single_gpu.py", "1", "1"], cwd=workspace)
        assert output.endswith("Epoch 0 | Training checkpoint saved at checkpoint.pt\n")
        assert (workspace / "checkpoint.pt").stat().st_size > 0
