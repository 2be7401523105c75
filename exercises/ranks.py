"""Start the ranks of a script without a launcher, with a time limit, and leave nothing behind."""

import multiprocessing
import os
import resource
import runpy
import socket
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LATE = "still running"  # in place of the exit status of a process that was ended at the limit

# Ranks are forked from a process that has imported torch and what optimizers import. That takes
# 0.1 s, where a new Python needs 3 s.
multiprocessing.set_forkserver_preload(["torch._dynamo"])


def free_port():
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return server.getsockname()[1]


def alone(rank=0, world_size=1, port=None):
    """The environment of one rank on this machine, as torchrun would set it."""
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(world_size))
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port or free_port())}
    return {"RANK": str(rank), "LOCAL_RANK": str(rank)} | sizes | address


def quickly(script, *args, nproc=1, cwd=".", seconds=60, largest_file=None, last=(), **env):
    """Run `nproc` ranks of a ladder script (or a copy) without a launcher, from a process that has
    imported torch already. Return (set of exit statuses, output).

    No file may become larger than `largest_file` bytes: to a process, as if the disk were full.
    The last rank has the arguments `last` besides.
    """
    Path(cwd).mkdir(exist_ok=True)
    log = Path(cwd) / f"output-{len(list(Path(cwd).glob('output-*')))}.log"
    where = {"cwd": os.path.abspath(cwd), "log": log.name, "largest_file": largest_file}
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        ranks = [
            process_of(
                _run_rank,
                script,
                [*map(str, args), *map(str, last if rank == nproc - 1 else ())],
                alone(rank, nproc, port) | env,
                folder,
                **where,
            )
            for rank in range(nproc)
        ]
        try:
            for process in ranks:
                process.start()
            limit = time.monotonic() + seconds
            for process in ranks:
                process.join(max(0, limit - time.monotonic()))
        finally:
            late = [process for process in ranks if process.is_alive()]
            for process in late:
                process.kill()
                process.join()
    statuses = {LATE if process in late else process.exitcode for process in ranks}
    return statuses, log.read_text() if log.exists() else ""


def process_of(function, *args, **options):
    """A process that will call the function, forked from one that has imported torch already."""
    context = multiprocessing.get_context("forkserver")
    return context.Process(target=function, args=args, kwargs=options)


def on_the_cpu():
    """Such a process has the environment of the first that was started so: mend it."""
    import torch

    from plumbing import processes

    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    processes.stay_on_this_machine()


def enter(cwd, log):
    """Let this process work in the folder `cwd`, and print to the end of a file there."""
    os.chdir(cwd)
    file = os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.dup2(file, 1)
    os.dup2(file, 2)


def leave_the_lock_to_rank_0(rank):
    """Of multigpu.py only the parent reads the command line, and locks the folder. Here each rank
    reads it, so all but rank 0 have the lock already."""
    from plumbing import locks

    if rank > 0:
        locks.held[".checkpoint.pt.lock"] = open(os.devnull)  # noqa: SIM115


def _run_rank(script, args, env, folder, cwd, log, largest_file):
    sys.path.insert(0, str(ROOT))
    on_the_cpu()
    enter(cwd, log)
    if largest_file:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    sys.argv = [script, *args]
    if "mp.spawn(" not in Path(script).read_text():
        os.environ.update(env)
        runpy.run_path(script, run_name="__main__")
        return
    script = runpy.run_path(script)
    rank, world_size = int(env["RANK"]), int(env["WORLD_SIZE"])
    leave_the_lock_to_rank_0(rank)
    script["main"](rank, world_size, f"file://{folder}/store", script["parse_args"]())
