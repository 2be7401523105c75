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

numbers = itertools.count()  # of the calls of all_gather_by_store


class Refused(ValueError):
    """Something that a reader has to change, in words. (A mistake in our code is no Refused.)"""


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

    in_training: whether DDP is alive. It uses the group, and to destroy the group first can hang.
    """
    if not dist.is_initialized():
        if problem is not None:
            exit_before_group(problem)
        return
    problems = all_gather((socket.gethostname(), problem))
    problem = next((problem for _, problem in problems if problem is not None), None)
    if problem is None:
        return
    if dist.get_node_local_rank(launch.rank()) == 0:
        hosts = {host for host, other in problems if other == problem}
        where = (
            "" if hosts == {host for host, _ in problems} else f"on {', '.join(sorted(hosts))}: "
        )
        print(f"ERROR: {where}{problem}", file=sys.stderr)
    all_gather(None)  # once one process has ended, torchrun ends the others
    if in_training:
        output.finish_wandb()
        os._exit(2)
    dist.destroy_process_group()
    sys.exit(2)


def exit_before_group(problem: str):
    """End this process with exit status 2. The first process of a machine prints why."""
    if launch.number_here() > 0:
        # torchrun ends this one when the first has ended. Other launchers may not do that.
        time.sleep(60 if dist.is_torchelastic_launched() else 5)
    else:
        print(f"ERROR: {problem}", file=sys.stderr)
    sys.exit(2)


def exit_alone(problem: str):
    """End this one rank with exit status 2. Whatever started the ranks then ends the others."""
    print(f"ERROR: {problem}", file=sys.stderr, flush=True)
    output.finish_wandb()
    os._exit(2)


def all_exit_if_gpu_shared():
    """End all ranks if two of them use one GPU, which NCCL cannot do.

    They tell each other through the store, because NCCL would fail before it could carry a message.
    """
    if devices.count_gpus() == 0:
        return
    here = socket.gethostname(), devices.name_of_gpu(devices.current_device())
    problem = devices.shared_gpu(all_gather_by_store(here))
    if problem is None:
        return
    if dist.get_node_local_rank(launch.rank()) == 0:
        print(f"ERROR: {problem}", file=sys.stderr)
    with suppress(Exception):  # the store may end with the first process that leaves
        all_gather_by_store(None)
    os._exit(2)


def all_gather_by_store(value) -> list:
    """Return the values of all ranks, as all_gather does, without a collective of the backend."""
    store, number = dist.distributed_c10d._get_default_store(), next(numbers)
    keys = [f"gathered {number} {rank}" for rank in range(dist.get_world_size())]
    store.set(keys[launch.rank()], json.dumps(value))
    return [json.loads(store.get(key)) for key in keys]  # get waits until the key is set
