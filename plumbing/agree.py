"""What all ranks decide together, such as to end. A rank that left alone would keep others waiting.

Every rank has to call a function that begins with `all_`.
"""

import itertools
import json
import os
import socket
import sys
import time
from contextlib import suppress

import torch.distributed as dist

from plumbing import devices, launch, output

# Each call of all_gather_by_store takes the next number, because a key must not be used twice.
gather_numbers = itertools.count()


class Refused(ValueError):
    """Raised with a message for the reader, who has to change something.

    A mistake in our own code raises a different error.
    """


def all_gather(value) -> list:
    """Return the values of all ranks, in the order of ranks. A value has to be picklable."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def all_new_job_id() -> str:
    """Return a random name for this job, the same on all ranks."""
    return all_gather(os.urandom(4).hex())[0]


def all_exit_if(problem: str | None, in_training: bool = False):
    """If any rank has a problem, end all ranks with exit status 2. Each machine prints why, once.

    in_training: whether a DDP exists. It uses the group, and destroying the group first can hang.
    """
    if not dist.is_initialized():
        if problem is not None:
            exit_before_group(problem)
        return
    problems = all_gather((socket.gethostname(), problem))
    problem = next((found for _, found in problems if found is not None), None)
    if problem is None:
        return
    hosts = {host for host, other in problems if other == problem}
    if hosts < {host for host, _ in problems}:
        problem = f"on {', '.join(sorted(hosts))}: {problem}"
    print_on_each_machine(problem)
    all_gather(None)  # once one process has ended, torchrun ends the others
    if in_training:
        output.leave(2)
    dist.destroy_process_group()
    sys.exit(2)


def print_on_each_machine(problem: str):
    if dist.get_node_local_rank(launch.rank()) == 0:
        print(f"ERROR: {problem}", file=sys.stderr)


def exit_before_group(problem: str):
    """End this process with exit status 2. The first process of a machine prints why."""
    if launch.one_of_several() and launch.number_here() > 0:
        # Most launchers end this one when the first has ended. The first may be slow to start.
        time.sleep(30)
    else:
        print(f"ERROR: {problem}", file=sys.stderr)
    sys.exit(2)


def exit_alone(problem: str):
    """End this one rank with exit status 2. Whatever started the ranks then ends the others."""
    print(f"ERROR: {problem}", file=sys.stderr)
    output.leave(2)


def all_exit_if_devices_clash():
    """End all ranks if two use one GPU, which NCCL refuses, or if only some have a GPU.

    The ranks tell each other through the store, because NCCL would fail before it could carry a
    message.
    """
    device = devices.current_device()
    here = socket.gethostname(), device.type, devices.name_of_gpu(device)
    problem = devices.clash(all_gather_by_store(here))
    if problem is None:
        return
    print_on_each_machine(problem)
    with suppress(Exception):  # the store may end with the first process that leaves
        all_gather_by_store(None)
    output.leave(2)


def all_gather_by_store(value) -> list:
    """Return the values of all ranks, as all_gather does, without a collective of the backend."""
    store, number = dist.distributed_c10d._get_default_store(), next(gather_numbers)
    keys = [f"gathered {number} {rank}" for rank in range(dist.get_world_size())]
    store.set(keys[launch.rank()], json.dumps(value))
    return [json.loads(store.get(key)) for key in keys]  # get waits until the key is set
