"""All exercises in their order, by the step of the ladder that they belong to."""

from exercises import machines, one_process, torchrun, two_processes

PARTS = {
    "One process": one_process.EXERCISES,
    "Several processes": two_processes.EXERCISES,
    "torchrun and snapshots": torchrun.EXERCISES,
    "Several machines": machines.EXERCISES,
}
