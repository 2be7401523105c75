"""The check of `srun`: four ranks that seem to be on two hosts, and a real job if Slurm is here."""

import json
import os
import platform
import re
import shutil
import socket
import sys
from pathlib import Path

import torch.distributed as dist

from exercises.workshop_looks import answer, commands, looked_at, run, what_went_wrong
from plumbing import launch

HOSTS, JOBS = ("gpu07", "gpu08"), (30123456, 30123457)
SCONTROL = """\
case "$1 $2" in
"show host"*) echo gpu07; echo gpu08 ;;
"show node"*) echo "NodeName=$3 NodeAddr=$3" ;;
*) exit 1 ;;
esac
"""


def meets_under_srun(path, folder):
    faked = {"scontrol": SCONTROL, "hostname": 'echo "$SLURMD_NODENAME"'}
    options = {"nproc": 4} | commands(Path(folder) / "bin", faked)
    places = []
    for job in JOBS:
        place = Path(folder) / str(job)
        done = looked_at(__file__, "srun", path, place, job, "look", seconds=5, **options)
        files = [place / f"met{rank}" for rank in range(4)]
        if problem := what_went_wrong(*done):
            return f"Started by srun, without torchrun's variables: {problem}"
        if not all(file.exists() for file in files):
            return "Not every rank calls init_process_group"
        places.append([json.loads(file.read_text()) for file in files])
    if problem := met_wrongly(*places):
        return problem
    place = Path(folder) / "meet"
    done = looked_at(__file__, "srun", path, place, JOBS[0], "meet", seconds=6, **options)
    gpus = dict(re.findall(r"Rank (\d+) of 4 takes GPU (\d+)", done[1]))
    if problem := what_went_wrong(*done):
        return f"Two nodes with two ranks each do not meet: {problem}"
    if gpus != {"0": "0", "1": "1", "2": "0", "3": "1"}:
        taken = ", ".join(f"rank {rank} GPU {gpu}" for rank, gpu in sorted(gpus.items()))
        return (
            f"Two nodes with two GPUs each, which are 0 and 1 on both: {taken or 'none is named'}"
        )
    return does_not_meet_on_real_nodes(path)


def met_wrongly(first, second):
    """What is wrong with where the ranks of two jobs would have met."""
    who = [(met["rank"], met["world_size"]) for met in first]
    if who != [(rank, 4) for rank in range(4)]:
        said = ", ".join(f"{rank} of {size}" for rank, size in who)
        return f"Four processes on two nodes take themselves for ranks {said}"
    for rank, met in reversed(list(enumerate(first))):  # who is not on that host tells it best
        if met["address"] != HOSTS[0]:
            return (
                f"Rank 0 is on {HOSTS[0]}, and rank {rank}, on {HOSTS[rank // 2]}, would look for "
                f"it at {met['address']}"
            )
    ports = [met["port"] for met in first]
    if len(set(ports)) > 1:
        return f"The ranks of one job would meet at different ports: {', '.join(map(str, ports))}"
    if not str(ports[0]).isdigit() or not 1024 <= int(ports[0]) <= 65535:
        return f"Job {JOBS[0]} would meet at port {ports[0]}: ports are 1024 to 65535"
    if ports[0] == second[0]["port"]:
        return (
            f"Jobs {JOBS[0]} and {JOBS[1]} would both meet at port {ports[0]}: on one node the "
            "second would find it taken, or the first job's ranks"
        )


def does_not_meet_on_real_nodes(path):
    """Start two ranks on two nodes of a Slurm, if one is here and has them free."""
    two = ["srun", "--immediate=5", "--nodes=2", "--ntasks=2", "--time=1"]
    if not shutil.which("srun") or not answer(*two, "true", seconds=7)[0]:
        return None
    well, output = answer(*two, sys.executable, path, seconds=12, CUDA_VISIBLE_DEVICES="")
    if not well or len(re.findall(r"Rank \d of 2 takes GPU 0", output)) != 2:
        problem = what_went_wrong({0} if well else {1}, output)
        return f"On two nodes of your Slurm: {problem or 'not each rank of two takes GPU 0'}"


def look_at_srun(path):
    """Four ranks on two hosts, as srun would start them; they only seem to be on other hosts."""
    job, way = sys.argv.pop(1), sys.argv.pop(1)
    rank = int(os.environ["RANK"])
    real = f"tcp://localhost:{os.environ['MASTER_PORT']}"
    host = HOSTS[rank // 2]
    for name in launch.LAUNCHER_SETS:
        del os.environ[name]
    values = {"PROCID": rank, "LOCALID": rank % 2, "NTASKS": 4, "NODEID": rank // 2, "NNODES": 2}
    values |= {"NPROCS": 4, "STEP_NUM_TASKS": 4, "JOB_NUM_NODES": 2, "NTASKS_PER_NODE": 2}
    values |= {"TASKS_PER_NODE": "2(x2)", "JOB_ID": job, "JOBID": job, "GPUS_ON_NODE": 2}
    values |= dict.fromkeys(("JOB_NODELIST", "NODELIST", "STEP_NODELIST"), "gpu[07-08]")
    values |= {"LAUNCH_NODE_IPADDR": "10.9.9.9", "SRUN_COMM_HOST": "10.9.9.9"}  # the login node's
    os.environ |= {f"SLURM_{name}": str(value) for name, value in values.items()}
    os.environ["SLURMD_NODENAME"] = host
    socket.gethostname = socket.getfqdn = platform.node = lambda *_: host
    join = dist.init_process_group

    def look(backend=None, init_method=None, *args, **options):
        if not (init_method or "").startswith("tcp://"):
            if "MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ:
                return join(backend, init_method, *args, **options)  # it says what is missing
            init_method = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        address, _, port = init_method.removeprefix("tcp://").rpartition(":")
        own = int(options.get("rank", os.environ.get("RANK", -1)))
        size = int(options.get("world_size", os.environ.get("WORLD_SIZE", -1)))
        met = {"rank": own, "world_size": size, "address": address, "port": port}
        Path(f"met{rank}").write_text(json.dumps(met))
        if way == "look":
            os._exit(0)
        options |= {"rank": own, "world_size": size}
        return join(backend, real, *args, **options)

    dist.init_process_group = look
    run(path)
