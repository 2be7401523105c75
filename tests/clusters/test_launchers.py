"""However people start it: what another launcher has set is read, and no process trains apart."""

import launchers
import re
import shutil
import signal
import sys
import uuid

import launch
import pytest
import torch
from launch import CHECK, LLM, MULTI, MULTINODE, SINGLE, TORCHRUN_SCRIPT, free_port, python, run

POD = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29711"}
ALL_SIX = POD | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
# What a launcher has set, and what the line says of where the missing variables come from.
FOREIGN = {
    "srun": (
        {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"},
        "start slurm/multinode_srun.sbatch",
    ),
    "Open MPI": ({"OMPI_COMM_WORLD_SIZE": "2"}, "mpirun has them as OMPI_COMM_WORLD_RANK"),
    "another MPI": ({"PMI_SIZE": "2"}, "mpirun has them as PMI_RANK"),
    "TrainJob": ({"PET_NNODES": "1:2"}, "start torchrun, not python"),
    "PyTorchJob": (POD, "SLURM_LOCALID and so on, mpirun as OMPI_COMM_WORLD_LOCAL_RANK"),
}
EACH = pytest.mark.parametrize("env, cure", FOREIGN.values(), ids=FOREIGN)


@pytest.fixture
def environment(monkeypatch):
    """Set variables for the test alone; those of a launcher that started pytest are not there."""
    others = (*launchers.OTHERS_SET, *launchers.NUMBERS_ON_A_MACHINE, "TORCHELASTIC_RUN_ID")
    for name in (*launchers.LAUNCHER_SETS, *others):
        monkeypatch.delenv(name, raising=False)
    return lambda env: [monkeypatch.setenv(name, value) for name, value in env.items()]


@EACH
def test_a_part_of_a_job_is_told_what_is_missing_and_where_it_comes_from(environment, env, cure):
    environment(env)
    line = launchers.wrong_start()
    missing = " ".join(name for name in launchers.LAUNCHER_SETS if name not in env)
    assert f", but {missing} not set: " in line and cure in line
    assert "standalone" not in line, "that would be a job of its own"
    assert "this script is a job by itself" in launchers.not_alone(spawns=True)


@pytest.mark.parametrize("value", ["1", "1:1", "0", ""])
@EACH
def test_one_process_is_no_part_of_a_job(environment, env, cure, value):
    """A step of one task, an mpirun of one process, a pod alone."""
    (name,) = env.keys() & launchers.OTHERS_SET.keys()
    environment({name: value})
    assert launchers.not_alone(spawns=False) is None
    assert "Start with: torchrun --standalone" in launchers.wrong_start()


def test_who_knows_its_place_may_start(environment):
    """As slurm/multinode_srun.sbatch and the mpirun of docs/clusters.md have it, with all six."""
    environment(ALL_SIX | {"SLURM_STEP_NUM_TASKS": "2", "OMPI_COMM_WORLD_SIZE": "2"})
    assert launchers.wrong_start() is None


def test_several_torchruns_with_a_job_each_are_refused(environment):
    """`srun --ntasks=2 torchrun --standalone …`: each would train alone, and say OK."""
    for name in "none", str(uuid.uuid4()):  # as torchrun calls a job by default, and --standalone
        environment(ALL_SIX | {"TORCHELASTIC_RUN_ID": name, "SLURM_STEP_NUM_TASKS": "2"})
        assert "but torchrun was told of one machine" in launchers.wrong_start()
    environment({"WORLD_SIZE": "4"})
    assert launchers.wrong_start() is None, "torchrun knows of both machines"


def test_an_elastic_job_may_go_on_with_one_machine(environment):
    """`srun torchrun --nnodes=1:2 --rdzv-id=456 …`, and one of two nodes has died."""
    environment(ALL_SIX | {"TORCHELASTIC_RUN_ID": "456", "SLURM_STEP_NUM_TASKS": "2"})
    assert launchers.wrong_start() is None


def test_the_inner_launcher_counts(environment):
    """mpirun in a batch file of Slurm: each process has the batch step's number there, 0."""
    environment({"SLURM_LOCALID": "0", "OMPI_COMM_WORLD_SIZE": "2"})
    environment({"OMPI_COMM_WORLD_LOCAL_RANK": "1"})
    assert launchers.number_here() == 1


def refused(command, **env):
    """The one line of a process that ends with exit status 2 and writes nothing."""
    output = run(command, 20, 2, **env)
    (line,) = output.splitlines()
    assert line.startswith("ERROR: ") and not list(launch.Path().glob("*.pt"))
    return line


@pytest.mark.long
@EACH
def test_check_cluster_never_says_ok_for_a_part(tmp_path, env, cure):
    line = refused(python(CHECK), **env)
    if "PET_NNODES" in env:
        assert "1:2 machines, but no address where they meet" in line
    else:
        assert (
            f"{launchers.LAUNCHER_SETS[-1]} not set" in line or "LOCAL_WORLD_SIZE not set" in line
        )
        assert cure in line


def test_check_cluster_needs_an_address_for_several_machines(tmp_path):
    """`--nnodes=2` alone would wait at 127.0.0.1, on each machine."""
    line = refused(python(CHECK, "--nnodes=2"))
    assert "2 machines, but no address where they meet: give all the same --rdzv-" in line


@pytest.mark.long
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
    assert said in refused(python(script), **FOREIGN[launcher][0])


@pytest.mark.long
def test_torchruns_own_variables_are_for_torchrun(tmp_path):
    """A pod that says 2 processes: `python train_llm.py` would be a job of one."""
    assert "RANK WORLD_SIZE" in refused(python(LLM), PET_NPROC_PER_NODE="2")


@pytest.mark.long
@pytest.mark.parametrize("script", [MULTINODE, LLM])
def test_torch_distributed_launch_is_named(tmp_path, script):
    """The forerunner of torchrun gives each process an option that no script has."""
    launcher = launch.python("-m", "torch.distributed.launch", "--nproc_per_node=2", script)
    output = run(launcher, 60, 1)
    (line,) = re.findall("ERROR: (.*)", output)
    assert line.endswith("that is of torch.distributed.launch: start with torchrun instead")


@pytest.mark.long
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


@pytest.mark.long
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
    return ["timeout", "-k", "5", "60", "mpirun", *alone, "-n", "2", *map(str, command)]


@pytest.mark.long
@pytest.mark.parametrize("script", [SINGLE, MULTINODE, CHECK, LLM])
def test_open_mpi_alone_is_refused_once(tmp_path, script):
    """Two processes of one machine: the first says why, and mpirun ends the other."""
    output = run(mpirun(*python(script)), 30, 2)
    (line,) = re.findall("^ERROR: .*", output, re.MULTILINE)
    assert "OMPI_COMM_WORLD_SIZE=2" in line and "Traceback" not in output
    assert not list(launch.Path().rglob("*.pt"))


@pytest.mark.long
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


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_a_script_trains_on_without_a_stdout(tmp_path, closed):
    """And no file that it opens becomes its stdout."""
    command = " ".join(python(SINGLE, 2, 1))
    run(["bash", "-c", f"exec {command} {closed}"])
    assert torch.load("checkpoint.pt", weights_only=True)


STARTS = {
    "single_gpu.py": python(SINGLE, 12, 1),
    "multigpu.py": python(MULTI, 12, 1, "--nproc=2"),
    "multinode.py": launch.torchrun(MULTINODE, 12, 1),
}


@pytest.mark.long
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
