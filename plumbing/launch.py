"""Which launcher started this process, and what the launcher has to set."""

import os
import sys

import torch.distributed as dist

LAUNCHER_SETS = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT".split()
# What other launchers set to how many there are, and where the six above come from then.
OTHERS_SET = {
    "OMPI_COMM_WORLD_SIZE": "mpirun has them as OMPI_COMM_WORLD_RANK and so on, but no address",
    "SLURM_STEP_NUM_TASKS": "srun has them as SLURM_PROCID and so on: start "
    "slurm/multinode_srun.sbatch",
    "PMI_SIZE": "mpirun has them as PMI_RANK and so on, but no address",
    "PET_NNODES": "that is for torchrun: start torchrun, not python",
    "WORLD_SIZE": "srun has them as SLURM_LOCALID and so on, mpirun as OMPI_COMM_WORLD_LOCAL_RANK"
    " and so on, and in a pod of Kubernetes torchrun sets them",
}
PAGE = "docs/clusters.md, Launchers"
NUMBERS_ON_A_MACHINE = "LOCAL_RANK OMPI_COMM_WORLD_LOCAL_RANK MPI_LOCALRANKID SLURM_LOCALID".split()


def rank() -> int:
    """Return the rank of this process in its group, or 0 if it has none."""
    return dist.get_rank() if dist.is_initialized() else 0


def one_of_several() -> str | None:
    """Return what shows that this process is not all of its job, as NAME=value, or None."""
    values = {name: os.environ.get(name, "1") for name in OTHERS_SET}
    alone = ("", "0", "1", "1:1")
    said = (f"{name}={value}" for name, value in values.items() if value not in alone)
    return next(said, None)


def number_here() -> int:
    """Return the number of this process on its machine, or 0 if no launcher has set it."""
    return int(next((os.environ[name] for name in NUMBERS_ON_A_MACHINE if name in os.environ), 0))


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
    missing = " ".join(name for name in LAUNCHER_SETS if name not in os.environ)
    several = one_of_several()
    name = several and several.partition("=")[0]
    if missing and several:
        return f"{several}, but {missing} not set: {OTHERS_SET[name]}. See {PAGE}"
    if missing:
        command = f"torchrun --standalone --nproc_per_node=gpu {sys.argv[0]}"
        return f"{missing} not set. Start with: {command} (no GPU: 2)"
    # The torchruns of one job on several machines share a name for it. --standalone makes up a
    # long one, and without --rdzv-id it is "none".
    name_of_job = os.environ.get("TORCHELASTIC_RUN_ID")
    nameless = name_of_job and (name_of_job == "none" or len(name_of_job) == 36)
    of_one_machine = os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]
    if several and name != "WORLD_SIZE" and of_one_machine and nameless:
        return f"{several}, but torchrun was told of one machine: see {PAGE} (or env -u {name} …)"
    return None
