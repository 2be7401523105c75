"""Which samples are in which step: the same ones on any number of processes."""

import itertools
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import Sampler

from plumbing import agree


class StepSampler(Sampler):
    """Which samples are in which step: a function of seed, step, global batch and length alone.

    Yields the batches of this rank from step `first_step` on, without end. A step has
    `global_batch_size` samples, the last one of an epoch has those that remain. Then some batches
    are not full, and -1 stands for no sample, so that all batches have one shape.
    """

    def __init__(self, length: int, batch_size: int, global_batch_size: int, seed: int):
        self.length = length
        self.batch_size = batch_size
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.first_step = 0
        self.order = (None, None)

    @property
    def steps_per_epoch(self):
        return math.ceil(self.length / self.global_batch_size)

    def size(self, step):
        """How many samples are in `step`, on all ranks together."""
        begin = step % self.steps_per_epoch * self.global_batch_size
        return min(self.global_batch_size, self.length - begin)

    def accumulation(self, step):
        """How many batches each rank makes in `step`: one gradient is accumulated over them."""
        return math.ceil(self.size(step) / (self.batch_size * dist.get_world_size()))

    def samples(self, step):
        """The indices of the samples of `step`, on all ranks together."""
        epoch, step = divmod(step, self.steps_per_epoch)
        if self.order[0] != epoch:
            self.order = epoch, self.order_of(epoch)
        return self.order[1][step * self.global_batch_size :][: self.global_batch_size]

    def order_of(self, epoch):
        generator = torch.Generator().manual_seed(self.seed + epoch)
        return torch.randperm(self.length, generator=generator)

    def __iter__(self):
        for step in itertools.count(self.first_step):
            mine = self.samples(step)[dist.get_rank() :: dist.get_world_size()]
            missing = self.accumulation(step) * self.batch_size - len(mine)
            yield from F.pad(mine, (0, missing), value=-1).view(-1, self.batch_size).tolist()


def all_exit_on_remainder(args):
    """A step consists of whole batches, equally many on each rank."""
    together, problem = args.batch_size * dist.get_world_size(), None
    if (args.global_batch_size or together) % together:
        parts = f"{args.batch_size} in a batch x {dist.get_world_size()} processes"
        number = f"{args.global_batch_size} is not a multiple of {together} ({parts})"
        problem = f"global-batch-size: {number}: change one of them"
    agree.all_exit_if(problem)
