"""Launchers that are really there, each with each script: refused as a part, or joined."""

import re
import shutil
import signal
import sys

import launch
import pytest
import torch
from launch import CHECK, LLM, MULTI, MULTINODE, SINGLE, TORCHRUN_SCRIPT, free_port, python, run
from test_launchers import EACH, FOREIGN, refused

from plumbing import launch as launchers


@EACH
def test_check_cluster_never_says_ok_for_a_part(tmp_path, env, cure):
    line = refused(launch.forked(CHECK), **env)
    if "PET_NNODES" in env:
        assert "1:2 machines, but no address where they meet" in line
    else:
        assert (
            f"{launchers.LAUNCHER_SETS[-1]} not set" in line or "LOCAL_WORLD_SIZE not set" in line
        )
        assert cure in line


@pytest.mark.parametrize(
    ("script", "launcher", "said"),
    [
        (SINGLE, "srun", "this script is a job by itself: start it once, with: python "),
        (MULTI, "Open MPI", "this script is a job by itself: start it once, with: python "),
        (TORCHRUN_SCRIPT, "srun", "RANK WORLD_SIZE LOCAL_RANK "),
        (MULTINODE, "PyTorchJob", "WORLD_SIZE=2, but LOCAL_RANK LOCAL_WORLD_SIZE not set"),
        (LLM, "Open MPI", "OMPI_COMM_WORLD_SIZE=2, but RANK "),
        (LLM.replace("llm", "translation"), "TrainJob", "PET_NNODES=1:2, but RANK "),
    ],
)
def test_no_script_trains_a_part(tmp_path, script, launcher, said):
    assert said in refused(launch.forked(script), **FOREIGN[launcher][0])


def test_torchruns_own_variables_are_for_torchrun(tmp_path):
    """A pod that says 2 processes: `python train_llm.py` would be a job of one."""
    assert "RANK WORLD_SIZE" in refused(launch.forked(LLM), PET_NPROC_PER_NODE="2")


@pytest.mark.parametrize("script", [MULTINODE, LLM])
def test_torch_distributed_launch_is_named(tmp_path, script):
    """The forerunner of torchrun gives each process an option that no script has."""
    launcher = launch.python("-m", "torch.distributed.launch", "--nproc_per_node=2", script)
    output = run(launcher, 60, 1)
    (line,) = re.findall("ERROR: (.*)", output)
    assert line.endswith("that is of torch.distributed.launch: start with torchrun instead")


@pytest.mark.parametrize("left_alone", [False, True])
def test_a_closed_terminal(tmp_path, left_alone):
    """What docs/troubleshooting.md says of nohup, of the option, and of the line without it."""
    options = ["--signals-to-handle=SIGTERM,SIGINT,SIGQUIT"] if left_alone else []
    options = ["--standalone", *options]
    job = launch.start(["nohup", *launch.torchrun(MULTINODE, 10**6, 10**6, options=options)])
    launch.wait_for(job, lambda output: "] Epoch 3 |" in output)
    job.send_signal(signal.SIGHUP)
    if left_alone:
        launch.wait_for(job, lambda output: "] Epoch 90 |" in output)
        job.send_signal(signal.SIGTERM)
    status, output = launch.finish(job)
    assert status in launch.SIGNALLED and ("Received 1 death signal" in output) != left_alone


HEARTBEAT = """
import faulthandler, sys, threading
from torch.distributed import TCPStore

def beat():
    while True:
        store.set("heartbeat", "now")

faulthandler.enable()  # as torchrun does
store = TCPStore("127.0.0.1", 0, is_master=True)
threading.Thread(target=beat, daemon=True).start()
sys.exit(1)
"""


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="there such a thread stops without a word")
def test_a_heartbeat_at_the_end_of_python_aborts_it(tmp_path):
    """What docs/troubleshooting.md says of torchrun's status after a signal, and how it looks."""
    output = run(launch.python("-c", HEARTBEAT), status=-signal.SIGABRT)
    assert "terminate called without an active exception" in output
    assert "Fatal Python error: Aborted" in output


def mpirun(*command):
    """The command of docs/clusters.md, and where these tests need more, that."""
    if not shutil.which("mpirun"):
        pytest.skip("needs Open MPI")
    alone = ["--allow-run-as-root", "--oversubscribe", "--mca", "plm", "isolated"]
    return ["timeout", "-k", "5", "120", "mpirun", *alone, "-n", "2", *map(str, command)]


@pytest.mark.parametrize("script", [SINGLE, MULTINODE, CHECK, LLM])
def test_open_mpi_alone_is_refused_once(tmp_path, script):
    """Two processes of one machine: the first says why, and mpirun ends the other."""
    output = run(mpirun(*python(script)), 120, 2)
    (line,) = re.findall("^ERROR: .*", output, re.MULTILINE)
    assert "OMPI_COMM_WORLD_SIZE=2" in line and "Traceback" not in output
    assert not list(launch.Path().rglob("*.pt"))


def test_open_mpi_trains_as_the_page_says(tmp_path, unbroken):
    """The command of docs/clusters.md, with an address and a port that are free here."""
    page = (launch.ROOT / "docs" / "clusters.md").read_text()
    (command,) = re.findall(r"^\$ (mpirun .*?python multinode.py 50 10')$", page, re.M | re.S)
    launch.copy_scripts(tmp_path)
    command = re.sub("MASTER_ADDR=[^ ]+", "MASTER_ADDR=127.0.0.1", command)
    command = re.sub("MASTER_PORT=[^ ]+", f"MASTER_PORT={free_port()}", command)
    command = command.replace("mpirun -n 8", " ".join(mpirun()))
    returncode, output = launch.finish(launch.start_typed(command))
    assert returncode == 0, output
    launch.assert_same("snapshot.pt", unbroken(2, 50))


STARTS = {
    "single_gpu.py": python(SINGLE, 12, 1),
    "multigpu.py": python(MULTI, 12, 1, "--nproc=2"),
    "multinode.py": launch.torchrun(MULTINODE, 12, 1),
}


@pytest.mark.parametrize("output", [">&-", "| head -n 1"])
@pytest.mark.parametrize("command", STARTS.values(), ids=STARTS)
def test_a_job_trains_on_and_ends_quietly_without_a_reader(tmp_path, command, output, unbroken):
    printed = run(["bash", "-o", "pipefail", "-c", f"{' '.join(command)} {output}"])
    lines = [line for line in printed.splitlines() if "OMP_NUM_THREADS" not in line]
    assert len(lines) == ("head" in output) and "rror" not in printed
    (saved,) = launch.Path().glob("*.pt")
    if MULTINODE in command:
        launch.assert_same(saved, unbroken(2, 12))
    else:
        assert torch.load(saved, weights_only=True)
