"""Which launcher started this process, and what the launcher has to set."""

import os
import sys
from typing import NamedTuple

import torch.distributed as dist

LAUNCHER_SETS = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT".split()
PAGE = "docs/clusters.md, Launchers"


class Launcher(NamedTuple):
    """The variables by which a launcher gives a process its place in a job."""

    size: str  # how many processes or machines there are
    rank: str  # which of them this one is
    local_ranks: tuple  # which of those on its machine, by one of these names
    cure: str  # how to start a script that has several processes


MPI = " has them as {rank} and so on, but no address"
NODES = "that counts machines: start torchrun on each, with --node-rank=${rank}"
# The first one that counts more than one process is taken for the one that started this process: an
# mpirun may run in a batch file of Slurm. The source of the names is above each.
LAUNCHERS = [
    # docs.open-mpi.org: Environment variables set for MPI applications
    Launcher(
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK",
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        "mpirun" + MPI,
    ),
    # mvapich.cse.ohio-state.edu: the user guides of MVAPICH2 (MV2) and of later ones (MVP)
    Launcher(
        "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", ("MV2_COMM_WORLD_LOCAL_RANK",), "mpirun" + MPI
    ),
    Launcher(
        "MVP_COMM_WORLD_SIZE", "MVP_COMM_WORLD_RANK", ("MVP_COMM_WORLD_LOCAL_RANK",), "mpirun" + MPI
    ),
    # docs.olcf.ornl.gov: the Summit user guide, jsrun under LSF
    Launcher(
        "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK", ("JSM_NAMESPACE_LOCAL_RANK",), "jsrun" + MPI
    ),
    # flux-framework.readthedocs.io: flux-environment(7)
    Launcher("FLUX_JOB_SIZE", "FLUX_TASK_RANK", ("FLUX_TASK_LOCAL_ID",), "flux run" + MPI),
    # horovod.readthedocs.io: the environment of horovodrun
    Launcher("HOROVOD_SIZE", "HOROVOD_RANK", ("HOROVOD_LOCAL_RANK",), "horovodrun" + MPI),
    # slurm.schedmd.com: srun, output environment variables
    Launcher(
        "SLURM_STEP_NUM_TASKS",
        "SLURM_PROCID",
        ("SLURM_LOCALID",),
        "srun has them as {rank} and so on: start slurm/multinode_srun.sbatch",
    ),
    # github.com/pmodels/mpich and intel.com, MPI Library developer reference: MPI_…
    # docs.alcf.anl.gov, Aurora: PALS_… of the mpiexec of an HPE Cray
    Launcher("PMI_SIZE", "PMI_RANK", ("MPI_LOCALRANKID", "PALS_LOCAL_RANKID"), "mpirun" + MPI),
    # docs.skypilot.co: Environment variables
    Launcher("SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK", (), NODES),
    # dstack.ai/docs: Distributed tasks
    Launcher("DSTACK_NODES_NUM", "DSTACK_NODE_RANK", (), NODES),
    # docs.aws.amazon.com/batch: Multi-node parallel jobs, environment variables
    Launcher("AWS_BATCH_JOB_NUM_NODES", "AWS_BATCH_JOB_NODE_INDEX", (), NODES),
    # www.kubeflow.org/docs/components/trainer
    Launcher("PET_NNODES", "PET_NODE_RANK", (), "that is for torchrun: start torchrun, not python"),
    # PyTorch itself, and launchers that set only some of its variables
    Launcher(
        "WORLD_SIZE",
        "RANK",
        ("LOCAL_RANK",),
        "srun has them as SLURM_LOCALID and so on, mpirun as OMPI_COMM_WORLD_LOCAL_RANK and so on,"
        " and in a pod of Kubernetes torchrun sets them",
    ),
]
# The number of a process where nothing says how many there are. Each may be a job of its own.
# Sources: kubernetes.io, Indexed Job; volcano.sh, Job; docs.openpmix.org; AWS Batch, array jobs.
INDEXES = "JOB_COMPLETION_INDEX VC_TASK_INDEX PMIX_RANK AWS_BATCH_JOB_ARRAY_INDEX".split()


def drop_empty_variables():
    """Let a variable that is set to nothing, such as RANK=$UNKNOWN, count as not set.

    PyTorch reads some of them too, and would fail with a traceback about int('').
    """
    for name in LAUNCHER_SETS:
        if os.environ.get(name) == "":
            del os.environ[name]


def value_of(name: str) -> str | None:
    """Return the value of a variable, or None. An empty one counts as not set."""
    return os.environ.get(name) or None


def rank() -> int:
    """Return the rank of this process in its group, or 0 if it has none."""
    return dist.get_rank() if dist.is_initialized() else 0


def launcher_of_several() -> Launcher | None:
    """Return the launcher of which this process is one of several, or None."""
    alone = (None, "0", "1", "1:1")
    return next((each for each in LAUNCHERS if value_of(each.size) not in alone), None)


def one_of_several() -> str | None:
    """Return what shows that this process is not all of its job, as NAME=value, or None."""
    launcher = launcher_of_several()
    return launcher and f"{launcher.size}={value_of(launcher.size)}"


def number_here() -> int:
    """Return the number of this process on its machine, or 0 if no launcher has set it."""
    names = [name for each in LAUNCHERS for name in each.local_ranks]
    # In a batch file an mpirun hands on Slurm's number of the file itself, so that comes last.
    names = ["LOCAL_RANK", *sorted(names, key=lambda name: name == "SLURM_LOCALID")]
    found = next(filter(None, map(value_of, names)), "0")
    return int(found) if found.isdecimal() else 0


def perhaps_one_of_several() -> str | None:
    """Return a warning if this process may be one of several that train apart, or None."""
    counted = any(value_of(each.size) for each in LAUNCHERS if each.size != "WORLD_SIZE")
    name = next(filter(value_of, INDEXES), None)
    if counted or not name:
        return None
    apart = "If there are several, each of them is a job by itself. To train together"
    return f"WARNING: {name}={value_of(name)}. {apart}, see {PAGE}"


def not_alone(spawns: bool) -> str | None:
    """Return why a script that is a whole job must not be started this way, or None.

    spawns: whether the script itself starts more processes.
    """
    several, by_torchrun = one_of_several(), dist.is_torchelastic_launched()
    command = f"start it once, with: python {sys.argv[0]}"
    if by_torchrun and (spawns or several):
        return f"torchrun is not for this script: {command}"
    if several:
        again = f"(For several jobs: env -u {several.partition('=')[0]} python …)"
        return f"{several}, but this script is a job by itself: {command} {again}"
    return None


def wrong_start() -> str | None:
    """Return why this process cannot know its place in a job and how to start it, or None."""
    missing = " ".join(name for name in LAUNCHER_SETS if not value_of(name))
    launcher, several = launcher_of_several(), one_of_several()
    if missing and launcher:
        cure = launcher.cure.format(rank=launcher.rank)
        return f"{several}, but {missing} not set: {cure}. See {PAGE}"
    if missing:
        command = f"torchrun --standalone --nproc_per_node=gpu {sys.argv[0]}"
        return f"{missing} not set. Start with: {command} (no GPU: 2)"
    for name in LAUNCHER_SETS:
        if name != "MASTER_ADDR" and not os.environ[name].isdecimal():
            return f"{name}={os.environ[name]} is not a number. See {PAGE}"
    # The torchruns of one job on several machines share a name for it. --standalone makes up a
    # long one, and without --rdzv-id it is "none".
    name_of_job = os.environ.get("TORCHELASTIC_RUN_ID")
    nameless = name_of_job and (name_of_job == "none" or len(name_of_job) == 36)
    name = launcher and launcher.size
    if several and name != "WORLD_SIZE" and on_one_machine() and nameless:
        return f"{several}, but torchrun was told of one machine: see {PAGE} (or env -u {name} …)"
    return None


def on_one_machine() -> bool:
    """Return whether all ranks of the job run on this machine, as its launcher says."""
    return os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]
