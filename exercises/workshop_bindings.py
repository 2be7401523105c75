"""The check of `bindings`: faked topologies, and a faked set of cores."""

import json
import os
import sys
from pathlib import Path

from exercises.workshop_looks import commands, looked_at, run, what_went_wrong

# The cores next to each GPU, and those that the job was given.
TOPOLOGIES = {
    "one GPU on each NUMA node": (["0-7", "8-15"], "0-15"),
    "two GPUs on each NUMA node, the far ones first": (["8-15", "8-15", "0-7", "0-7"], "0-15"),
    "GPUs of two NUMA nodes in turn": (["0-3,8-11", "4-7,12-15"] * 2, "0-15"),
    "a job that was given a part of the cores": (["0-7", "0-7", "8-15", "8-15"], "2-5,10-13"),
}


def table(near):
    """What `nvidia-smi topo -m` prints."""
    names = [f"GPU{gpu}" for gpu in range(len(near))]
    lines = ["\t".join(["", *names, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"])]
    for gpu, cores in enumerate(near):
        links = ["X" if other == gpu else "SYS" for other in range(len(near))]
        numa = str(sorted(set(near)).index(cores))
        lines.append("\t".join([names[gpu], *links, cores, numa, "N/A"]))
    return "\n".join([*lines, "", "Legend:", "", "  X    = Self", "  SYS  = Through the CPUs"])


def numbers(text):
    pairs = (part.split("-") for part in text.split(","))
    return {
        core for first, *last in pairs for core in range(int(first), int([first, *last][-1]) + 1)
    }


def listed(cores):
    return ",".join(map(str, sorted(cores))) or "none"


def bound_wrongly(near, allowed, got):
    """What is wrong with the cores that the local ranks got."""
    for rank, mine in enumerate(got):
        who, next_to = f"local rank {rank} is on cores {listed(mine)}", numbers(near[rank])
        if mine - allowed:
            return f"{who}, and the job was given {listed(allowed)}"
        if mine - next_to:
            return f"{who}, and those next to GPU {rank} are {listed(next_to)}"
        for other in range(rank):
            if both := mine & got[other]:
                return f"local ranks {other} and {rank} share cores {listed(both)}"
        there = len(next_to & allowed) // near.count(near[rank])
        if len(mine) < there:
            return f"{who}: {there - len(mine)} more are there for it, and stand idle"


def binds_to_its_gpu(path, folder):
    for number, (name, (near, allowed)) in enumerate(TOPOLOGIES.items()):
        place, smi = Path(folder) / str(number), f"cat <<'END'\n{table(near)}\nEND"
        options = commands(Path(folder) / f"bin{number}", {"nvidia-smi": smi})
        options |= {"nproc": len(near), "seconds": 4}
        done = looked_at(__file__, "binding", path, place, allowed, **options)
        files = [place / f"cores{rank}" for rank in range(len(near))]
        problem = what_went_wrong(*done)
        if not problem and all(file.exists() for file in files):
            problem = bound_wrongly(
                near, numbers(allowed), [set(json.loads(f.read_text())) for f in files]
            )
        if problem:
            return f"On {name}: {problem}"


def look_at_binding(path):
    """A kernel that lets nobody ask for no core, as the real one."""
    rank = os.environ["LOCAL_RANK"]
    cores = numbers(sys.argv.pop(1))

    def bind(pid, wanted):
        nonlocal cores
        if not set(wanted):
            raise OSError(22, "Invalid argument: no core")
        cores = set(wanted)

    os.sched_getaffinity, os.sched_setaffinity = lambda pid: set(cores), bind
    os.cpu_count = lambda: 16
    os.environ["RANK"] = str(int(rank) + 8)  # as on the second or third node
    run(path)
    Path(f"cores{rank}").write_text(json.dumps(sorted(cores)))
