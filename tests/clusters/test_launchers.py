"""However people start it: what another launcher has set is read, and no process trains apart."""

import uuid

import launch
import pytest
import torch
from launch import CHECK, SINGLE, python, run

from plumbing import launch as launchers

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
    "MVAPICH2": ({"MV2_COMM_WORLD_SIZE": "2"}, "mpirun has them as MV2_COMM_WORLD_RANK"),
    "MVAPICH 4": ({"MVP_COMM_WORLD_SIZE": "2"}, "mpirun has them as MVP_COMM_WORLD_RANK"),
    "jsrun": ({"JSM_NAMESPACE_SIZE": "2"}, "jsrun has them as JSM_NAMESPACE_RANK"),
    "Flux": ({"FLUX_JOB_SIZE": "2"}, "flux run has them as FLUX_TASK_RANK"),
    "Horovod": ({"HOROVOD_SIZE": "2"}, "horovodrun has them as HOROVOD_RANK"),
    "SkyPilot": ({"SKYPILOT_NUM_NODES": "2"}, "--node-rank=$SKYPILOT_NODE_RANK"),
    "dstack": ({"DSTACK_NODES_NUM": "2"}, "--node-rank=$DSTACK_NODE_RANK"),
    "AWS Batch": ({"AWS_BATCH_JOB_NUM_NODES": "2"}, "--node-rank=$AWS_BATCH_JOB_NODE_INDEX"),
}


EACH = pytest.mark.parametrize("env, cure", FOREIGN.values(), ids=FOREIGN)


@pytest.fixture
def environment(monkeypatch):
    """Set variables for the test alone; those of a launcher that started pytest are not there."""
    others = [name for each in launchers.LAUNCHERS for name in (each.size, *each.local_ranks)]
    others += [*launchers.INDEXES, "TORCHELASTIC_RUN_ID"]
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
    (name,) = env.keys() & {each.size for each in launchers.LAUNCHERS}
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
    environment({"OMPI_COMM_WORLD_LOCAL_RANK": "", "MPI_LOCALRANKID": "2"})
    assert launchers.number_here() == 2


def test_each_launcher_of_the_table_is_tried():
    tried = {name for env, _ in FOREIGN.values() for name in env}
    assert {each.size for each in launchers.LAUNCHERS} <= tried


@pytest.mark.parametrize("name", [n for each in launchers.LAUNCHERS for n in each.local_ranks])
def test_the_number_on_a_machine_is_read(environment, name):
    environment({name: "3"})
    assert launchers.number_here() == 3
    environment({"LOCAL_RANK": "2"})
    assert launchers.number_here() == 2


@pytest.mark.parametrize("name", launchers.INDEXES)
def test_a_number_without_a_count_is_a_warning(environment, name):
    """As in an indexed job of Kubernetes, where each pod may be a job of its own."""
    environment({name: "0"})
    assert launchers.not_alone(spawns=False) is None
    assert launchers.perhaps_one_of_several().startswith(f"WARNING: {name}=0. ")
    environment({"SLURM_STEP_NUM_TASKS": "1"})  # that says how many there are
    assert launchers.perhaps_one_of_several() is None


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"])
def test_a_variable_that_is_no_number_is_named(environment, name):
    environment(ALL_SIX | {name: "one"})
    assert launchers.wrong_start().startswith(f"{name}=one is not a number")


def test_an_empty_variable_counts_as_not_set(environment):
    environment(dict.fromkeys(launchers.LAUNCHER_SETS, ""))
    launchers.drop_empty_variables()
    assert not any(name in launchers.os.environ for name in launchers.LAUNCHER_SETS)
    environment({"LOCAL_RANK": "0"})
    launchers.drop_empty_variables()
    assert launchers.os.environ["LOCAL_RANK"] == "0"


def refused(command, **env):
    """The one line of a process that ends with exit status 2 and writes nothing."""
    output = run(command, 20, 2, **env)
    (line,) = output.splitlines()
    assert line.startswith("ERROR: ") and not list(launch.Path().glob("*.pt"))
    return line


def test_check_cluster_needs_an_address_for_several_machines(tmp_path):
    """`--nnodes=2` alone would wait at 127.0.0.1, on each machine."""
    line = refused(launch.forked(CHECK, "--nnodes=2"))
    assert "2 machines, but no address where they meet: give all the same --rdzv-" in line


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_a_script_trains_on_without_a_stdout(tmp_path, closed):
    """And no file that it opens becomes its stdout."""
    command = " ".join(python(SINGLE, 2, 1))
    run(["bash", "-c", f"exec {command} {closed}"])
    assert torch.load("checkpoint.pt", weights_only=True)
