"""Exercises on what a real job adds: accumulation, validation, BatchNorm, threads.

This file also runs as a script: as one rank of the reader's program, with a look at what it does.
"""

import builtins
import os
import sys
from functools import partial
from pathlib import Path

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from exercises.exercise import TORCHRUN, Exercise
from exercises.watch import differs, job, numbers_of, run, stopped, watched

ACCUMULATION = '''\
"""Each step takes 64 samples, in micro-batches, because so many at once do not fit."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS, MICRO_BATCHES = 5, 4

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)  # the same samples and the same model on all ranks
samples = torch.randn(STEPS, 64, 20)
model = DDP(torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

for batch in samples:
    share = batch.chunk(world_size)[rank]
    optimizer.zero_grad()
    for number, source in enumerate(share.chunk(MICRO_BATCHES)):
        targets = source[:, :4].argmax(1)
        is_last = number + 1 == MICRO_BATCHES
        with nullcontext() if is_last else model.no_sync():
            loss = F.cross_entropy(model(source), targets)
            (loss / MICRO_BATCHES).backward()
    optimizer.step()

print(f"rank {rank}: last loss {loss.item():.4f}", flush=True)
del model  # DDP goes before the group that it talks through
dist.destroy_process_group()
'''

EXACT = ("samples", 100), ("a loss of", 1.48514), ("an accuracy of", 0.29)  # one process

VALIDATION = '''\
"""The ranks validate a model on 100 samples, each on its share, and add up what they found."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)  # the same samples and the same model on all ranks
source = torch.randn(100, 20)
dataset = TensorDataset(source, source[:, :4].argmax(1))
model = torch.nn.Linear(20, 4).eval()

share = range(rank, len(dataset), world_size)  # each once; some ranks have one more
loader = DataLoader(dataset, batch_size=16, sampler=share)

totals = torch.zeros(3)  # sum of the losses, right answers, samples
with torch.no_grad():
    for source, targets in loader:
        output = model(source)
        totals[0] += F.cross_entropy(output, targets, reduction="sum")
        totals[1] += (output.argmax(1) == targets).sum()
        totals[2] += len(source)
dist.all_reduce(totals)

loss, accuracy = (totals[:2] / totals[2]).tolist()
print(f"rank {rank}: {totals[2]:.0f} samples, loss {loss:.5f}, accuracy {accuracy:.4f}", flush=True)
dist.destroy_process_group()
'''

BATCHNORM = '''\
"""Trains a net with a BatchNorm of its own on 64 samples a step, shared out among the ranks."""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # collectives that pass gradients back, too
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class BatchNorm(torch.nn.Module):
    """Each feature gets mean 0 and variance 1 over the batch. (Without running statistics.)"""

    def forward(self, x):
        moments = torch.stack([x.mean(0), (x * x).mean(0)])
        moments = dist.nn.functional.all_reduce(moments) / world_size
        mean, mean_of_squares = moments
        variance = mean_of_squares - mean * mean
        return (x - mean) / (variance + 1e-5).sqrt()


dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)  # the same samples and the same model on all ranks
samples = 20 * torch.randn(30, 64, 20)  # large numbers: without a norm the net learns nothing
layers = torch.nn.Linear(20, 32), BatchNorm(), torch.nn.ReLU(), torch.nn.Linear(32, 4)
model = DDP(torch.nn.Sequential(*layers))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

for batch in samples:
    source = batch.chunk(world_size)[rank]
    targets = source[:, :4].argmax(1)
    loss = F.cross_entropy(model(source), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

print(f"rank {rank}: last loss {loss.item():.4f}", flush=True)
del model  # DDP goes before the group that it talks through
dist.destroy_process_group()
'''

THREADS = '''\
"""Several processes train on the cores of one machine. Nobody has set OMP_NUM_THREADS."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

processes = int(os.environ["LOCAL_WORLD_SIZE"])  # on this machine
torch.set_num_threads(max(1, os.cpu_count() // processes))  # by default: about one for each core

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(20, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(32, 20)).square().mean().backward()
    optimizer.step()

threads = torch.get_num_threads()
print(f"rank {dist.get_rank()} of {processes} on this machine: {threads} threads", flush=True)
del model  # DDP goes before the group that it talks through
dist.destroy_process_group()
'''


def pretend(cores):
    """Let this process see a machine of so many cores, on which nobody set OMP_NUM_THREADS. Return
    a function that tells how many threads it would have: none is started for this."""
    threads, import_as_ever = [cores], builtins.__import__  # torch takes one for each core

    def set_threads(number):
        if number < 1:
            raise RuntimeError("set_num_threads expects a positive integer")
        threads.append(number)

    def first_import(name, *args, **options):
        """Torch was imported before: read for it what it reads then, and only then."""
        if name.partition(".")[0] == "torch":
            builtins.__import__ = import_as_ever
            set_threads(int(os.environ.get("OMP_NUM_THREADS", cores)))
        return import_as_ever(name, *args, **options)

    os.environ.pop("OMP_NUM_THREADS", None)
    os.cpu_count = os.process_cpu_count = lambda: cores
    os.sched_getaffinity = lambda process: set(range(cores))
    torch.set_num_threads, torch.get_num_threads = set_threads, lambda: threads[-1]
    builtins.__import__ = first_import
    return lambda: {"threads": threads[-1]}


def look_at_ddp():
    """Look at what DDP computes and sends. Return a function that tells it."""
    models, sent, outputs = [], [], []
    init = DistributedDataParallel.__init__

    def count_and_send(_, bucket):
        sent.append(bucket.is_last())
        return allreduce_hook(torch.distributed.group.WORLD, bucket)

    def init_and_look(self, *args, **options):
        init(self, *args, **options)
        self.register_comm_hook(None, count_and_send)
        self.register_forward_hook(lambda *given: outputs.append(given[-1].abs().sum().item()))
        models.append(self.module)  # not DDP, which has to go before the group

    def tell():
        weights = [weight.flatten().tolist() for weight in models[-1].parameters()]
        return {"sent": sum(sent), "weights": sum(weights, []), "output": outputs[0]}

    DistributedDataParallel.__init__ = init_and_look
    return lambda: tell() if models and outputs else {}


def trained(path, folder, nproc):
    """What is wrong, if the ranks do not come to their end, and what `look_at_ddp` told of each."""
    states = run(path, os.path.join(folder, f"{nproc} ranks"), nproc, __file__)
    seen = [state["seen"] if state else {} for state in states]
    without = None if all(seen) else "No model is trained with DDP any more"
    return stopped(states) or without, seen, states


def away(one, other):
    """How far two ranks' weights are from each other."""
    pairs = zip(one["weights"], other["weights"], strict=True)
    return max(abs(here - there) for here, there in pairs)


def sends_too_often(path, folder):
    message, seen, _ = trained(path, folder, 2)
    if message:
        return message
    times = f"sent {seen[0]['sent']} times in 5 steps"
    if seen[0]["sent"] > 5:
        return f"Gradients are {times}, once a step is enough"
    if not (apart := away(*seen)) < 1e-5:
        return f"The ranks end with other weights, up to {apart:.4f} apart: gradients are {times}"
    at_once = Path(folder) / "at_once.py"
    at_once.write_text(ACCUMULATION.replace("MICRO_BATCHES = 5, 4", "MICRO_BATCHES = 5, 1"))
    _, want, _ = trained(str(at_once), folder, 1)
    if not (apart := away(seen[0], want[0])) < 1e-5:
        return (
            f"Gradients are {times}, but the weights are up to {apart:.4f} away from those of one"
            " process that takes each batch at once"
        )


def is_not_one_process(path, folder):
    """One and two processes have to learn the same, and more than without a norm."""
    message, one, states = trained(path, folder, 1)
    two = ()
    if not message:
        message, two, _ = trained(path, folder, 2)
    if message:
        return message
    loss = (numbers_of(states)[0] or [float("nan")])[-1]
    if not loss < 1:
        return f"The loss ends at {loss:.3g}, with a norm below 1: does anything normalise?"
    if (apart := away(*one, two[0])) < 1e-2:
        return None
    first, wanted = sum(rank["output"] for rank in two), one[0]["output"]
    same = abs(first - wanted) < 1e-3 * wanted
    why = "outputs are equal at first, but not the gradients" if same else "outputs differ at once"
    return f"Two processes with 32 samples each end up to {apart:.3f} away from one with 64: {why}"


def shares_cores_badly(path, folder):
    for cores, processes in ((8, 2), (2, 3)):
        place = os.path.join(folder, str(cores))
        states = run(path, place, processes, __file__, CORES=str(cores))
        machine = f"{processes} processes on {cores} cores"
        if message := stopped(states):
            return f"With {machine}: {message}"
        found, fair = [state["seen"]["threads"] for state in states], max(1, cores // processes)
        if found != [fair] * processes:
            why = "get in each other's way" if sum(found) > cores else "leave cores idle"
            ran = f"{' + '.join(map(str, found))} threads"
            return f"{machine} run {ran} and {why}: it should be {fair} in each"
    return None


EXERCISES = [
    Exercise(
        "accumulation",
        """Each step adds up the gradients of four micro-batches. Here the ranks exchange them after
        each micro-batch, and the step is four times too large. Exchange once a step, and have the
        weights that one process would have from the whole batch, with DDP.""",
        ACCUMULATION,
        (
            ("from contextlib import nullcontext\n\n", ""),
            (
                "        is_last = number + 1 == MICRO_BATCHES\n"
                "        with nullcontext() if is_last else model.no_sync():\n"
                "            loss = F.cross_entropy(model(source), targets)\n"
                "            (loss / MICRO_BATCHES).backward()\n",
                "        loss = F.cross_entropy(model(source), targets)\n        loss.backward()\n",
            ),
        ),
        sends_too_often,
        "model.no_sync() keeps backward() from exchanging, if the forward pass is in it, too. The "
        "mean of a batch is the mean of the means of its equal parts",
        "docs/your-own.md#gradient-accumulation",
        start=TORCHRUN,
    ),
    Exercise(
        "validation",
        """Three ranks validate on 100 samples, but count more, so that loss and accuracy change
        with the number of ranks. Make them exact, those of one process, and let each rank do its
        share of the work.""",
        VALIDATION,
        (
            (
                "range(rank, len(dataset), world_size)  # each once; some ranks have one more",
                "DistributedSampler(dataset, shuffle=False)",
            ),
        ),
        partial(job, 3, differs(*EXACT, within=1e-4)),
        "A DistributedSampler deals out equally many samples to all ranks. What does it do if they "
        "cannot be divided? A sampler may also be a list of indices",
        "docs/your-own.md#a-validation-loss",
        start=TORCHRUN.replace("2", "3"),
    ),
    Exercise(
        "batchnorm",
        """BatchNorm takes mean and variance of the rank's own samples, so two processes with 32
        samples learn something else than one with 64. Make them equal, and keep a norm. (On GPUs
        the cure is SyncBatchNorm; it does not run on a CPU.)""",
        BATCHNORM,
        (("        moments = dist.nn.functional.all_reduce(moments) / world_size\n", ""),),
        is_not_one_process,
        "Either the moments are those of all ranks (the collective has to pass gradients back: "
        "torch.distributed.nn.functional), or the norm looks at one sample at a time",
        "docs/your-own.md#batchnorm",
        start=TORCHRUN,
    ),
    Exercise(
        "threads",
        """Two processes are slower than one here: each starts as many threads as the machine has
        cores, and they stand in each other's way. Share the cores out, whatever their number and
        that of the processes on the machine.""",
        THREADS,
        (
            (
                "torch.set_num_threads(max(1, os.cpu_count() // processes))  "
                "# by default: about one for each core\n",
                "",
            ),
        ),
        shares_cores_badly,
        "torch.set_num_threads, or OMP_NUM_THREADS before torch is imported. There may be fewer "
        "cores than processes",
        "docs/how-ddp-works.md#threads-in-each-process",
        start=f"OMP_NUM_THREADS=$(nproc) {TORCHRUN}",
    ),
]

if __name__ == "__main__":
    cores = os.environ.get("CORES")
    watched(sys.argv[1], pretend(int(cores)) if cores else look_at_ddp())
