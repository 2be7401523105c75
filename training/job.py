"""Who trains: the group of processes, and what takes hours on one of them."""

import os
import textwrap
import threading
from concurrent.futures import Future, wait
from datetime import timedelta

import torch
import torch.distributed as dist

from plumbing import agree, devices, launch, output, processes


def ddp_setup(timeout: int) -> torch.device:
    """Join the process group and return the device that is this process's own.

    As in multinode.py, but started by python it is a job of one process, and on a GPU there are two
    backends: what lies in main memory goes through gloo, so that to agree is not to wait for the
    GPU. A rank that has waited for another for `timeout` seconds fails, and with it the job.
    """
    store = None
    # Any of these says that a launcher has started this process, or in a pod that torchrun shall.
    names = (*launch.LAUNCHER_SETS, "PET_NPROC_PER_NODE")
    if not launch.one_of_several() and not any(name in os.environ for name in names):
        alone = ("0", "1", "0", "1", "127.0.0.1", "0")
        os.environ.update(zip(launch.LAUNCHER_SETS, alone, strict=True))
        store = dist.HashStore()  # nobody else has to find it
    processes.require_torchrun()
    device, backend = devices.device_of(int(os.environ["LOCAL_RANK"])), "gloo"
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)  # otherwise calls without an index use GPU 0
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    alone = {"store": store, "rank": 0, "world_size": 1} if store else {}
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout), **alone)
    output.print_rank(device)
    return device


def explain(error: BaseException) -> str:
    """The beginning of what an error says, and its kind, unless it was raised to say just that."""
    kind = "" if isinstance(error, ValueError) else f" ({type(error).__name__})"
    return textwrap.shorten(str(error), 240, placeholder=" …") + kind


def all_patiently(option: str, name: str, work, *args):
    """Return `work(*args)` once all ranks are done with theirs, or end the job if one fails.

    It may take hours on one rank (a download, a big dataset), and no collective would wait for so
    long. So the ranks ask each other once a second, while a thread does the work. `option` and
    `name` are what the line of an error begins with.
    """
    future = Future()

    def do():
        try:
            future.set_result(work(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=do, daemon=True).start()  # it does not keep a process that has to end
    while True:
        done = bool(wait([future], timeout=1).done)
        error = future.exception() if done else None
        counts = torch.tensor([not done, error is not None], dtype=int)
        dist.all_reduce(counts)
        busy, failed = counts.tolist()
        if failed or not busy:
            break
    agree.all_exit_if(f"{option} {name}: {explain(error)}" if error else None)
    return future.result()


def all_count_machines() -> int:
    machines = torch.tensor(int(dist.get_node_local_rank() == 0))
    dist.all_reduce(machines)
    return machines.item()
