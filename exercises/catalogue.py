"""All exercises in their order, by the step of the ladder that they belong to."""

from exercises import further, hangs, machines, one_process, torchrun, two_processes, workshop

PARTS = {
    "After step 1: one process": one_process.EXERCISES,
    "After step 2: several processes": two_processes.EXERCISES,
    "After step 3: torchrun and snapshots": torchrun.EXERCISES,
    "After step 4: several machines": machines.EXERCISES,
    "Larger batches, exact figures, threads": further.EXERCISES,
    "The hang lab: find the rank and the line": hangs.EXERCISES,
    "A workshop on a Slurm cluster": workshop.EXERCISES,
}
