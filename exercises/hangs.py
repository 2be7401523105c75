"""The hang lab: five jobs that stand still. Where does each rank wait, and which is to blame?"""

import sys
import threading
from functools import partial

from exercises.exercise import TORCHRUN, Exercise
from exercises.watch import differs, job, names, numbers_of, run, stopped, watched

ONE_RANK_ONLY = '''\
"""Two ranks look for the mean of their numbers, step by step. Rank 0 writes a report for all."""

import datetime
import json
from pathlib import Path

import torch
import torch.distributed as dist

REPORT = Path("report.json")


def mean_over_ranks(value):
    """The job's value of a number of which each rank has its own."""
    total = torch.tensor([float(value)])
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def train(numbers):
    guess = 0.0
    for _ in range(20):
        gradient = mean_over_ranks(guess - numbers.mean())
        guess -= 0.5 * gradient
    return guess, ((numbers - guess) ** 2).mean()


dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
rank = dist.get_rank()
guess, loss = train(torch.arange(8.0) * (1 + rank))
loss = mean_over_ranks(loss)
if rank == 0:
    REPORT.write_text(json.dumps({"guess": guess, "loss": loss}))
dist.barrier()  # the report is there, before anybody reads it
report = json.loads(REPORT.read_text())
print(f"rank {rank}: guess {report['guess']:.3f}, loss of the job {report['loss']:.3f}", flush=True)
dist.destroy_process_group()
'''

STEPS = '''\
"""Two ranks train on 65 samples, in batches of 8, with DDP."""

import datetime

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)  # the same samples and the same model on both ranks
samples = torch.randn(65, 20)
dataset = TensorDataset(samples, samples[:, :4].argmax(1))
model = DDP(torch.nn.Linear(20, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

share = DistributedSampler(dataset, shuffle=False)  # repeats a sample: 33 for each
loader = DataLoader(dataset, batch_size=8, sampler=share)
steps = 0
for epoch in range(2):
    for source, targets in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(source), targets).backward()
        optimizer.step()
        steps += 1

dist.barrier()  # both are done
weights = model.module.weight.abs().sum().item()
print(f"rank {rank}: {steps} steps, sum of weights {weights:.4f}", flush=True)
del model  # DDP goes before the group that it talks through
dist.destroy_process_group()
'''

ORDER = '''\
"""Three ranks read their records. The counts are added up; of the version, rank 0's is for all."""

import datetime

import torch
import torch.distributed as dist

# The records of each rank, as its own disk has them. They are not yours to change.
RECORDS = {
    0: "samples 40, version 7, words 900",
    1: "version 3, words 500, samples 35",
    2: "samples 25, words 600, version 5",
}


def read(records):
    """A tensor for each name."""
    pairs = (record.split() for record in records.split(", "))
    return {name: torch.tensor([float(value)]) for name, value in pairs}


dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
rank = dist.get_rank()
values = read(RECORDS[rank])
for name, value in sorted(values.items()):
    if name == "version":
        dist.broadcast(value, src=0)
    else:
        dist.all_reduce(value)

said = [values[name].item() for name in ("samples", "version", "words")]
print("rank {}: {:.0f} samples, version {:.0f}, {:.0f} words".format(rank, *said), flush=True)
dist.destroy_process_group()
'''

DEAD_RANK = '''\
"""Three ranks take the mean of the temperatures in their records, a batch at a time."""

import datetime

import torch
import torch.distributed as dist

RECORDS = ["20.5 21.0", "19.0 18.5", "22.0 23.5", "21.5 20.0", "24.0 n/a", "18.0 19.5"]


def parse(record):
    """The values of a record. A sensor without one has written n/a."""
    return torch.tensor([float(word) for word in record.split() if word != "n/a"])


def measure(records):
    """The sum and the number of all values of all ranks."""
    total = torch.zeros(2)
    for record in records:
        values = parse(record)
        batch = torch.tensor([values.sum(), len(values)])
        dist.all_reduce(batch)
        total += batch
    return total


dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
rank = dist.get_rank()
total = measure(RECORDS[rank :: dist.get_world_size()])
dist.barrier()  # all have counted
print(f"rank {rank}: {total[1]:.0f} values, mean {total[0] / total[1]:.3f}", flush=True)
dist.destroy_process_group()
'''

LOCK = '''\
"""Two ranks look squares up, through a cache that keeps the last three of them."""

import datetime
import threading

import torch
import torch.distributed as dist


class Cache:
    """For several threads: nobody may touch `kept` without the lock."""

    def __init__(self, size):
        self.size, self.kept, self.lock = size, {}, threading.Lock()

    def drop_oldest(self):
        del self.kept[next(iter(self.kept))]

    def square(self, number):
        with self.lock:
            if number not in self.kept:
                if len(self.kept) == self.size:
                    self.drop_oldest()
                self.kept[number] = number * number
            return self.kept[number]


dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
rank = dist.get_rank()
numbers = ([1, 2, 1, 3, 2], [1, 2, 3, 4, 5])[rank]
cache = Cache(size=3)
total = torch.tensor([sum(cache.square(number) for number in numbers)])
dist.all_reduce(total)
print(f"rank {rank}: sum {total.item()}, squares kept {len(cache.kept)}", flush=True)
dist.destroy_process_group()
'''


class Guarded(dict):
    """Notes whether it is changed while nobody holds the lock."""

    def __init__(self, kept, lock):
        super().__init__(kept)
        self.held = getattr(lock, "_is_owned", None) or lock.locked
        self.changed_unlocked = False

    def __setitem__(self, key, value):
        self.changed_unlocked |= not self.held()
        super().__setitem__(key, value)

    def __delitem__(self, key):
        self.changed_unlocked |= not self.held()
        super().__delitem__(key)


def look_at_cache():
    """Look two more squares up, and see whether the cache is locked meanwhile."""
    cache = names["cache"]
    locks = [value for value in vars(cache).values() if hasattr(value, "acquire")]
    if not locks:
        return {"unlocked": True}
    cache.kept = Guarded(cache.kept, locks[0])
    look_up = threading.Thread(target=lambda: [cache.square(10), cache.square(11)], daemon=True)
    look_up.start()
    look_up.join(3)
    return {"unlocked": cache.kept.changed_unlocked}


def uses_its_lock(path, folder):
    states = run(path, folder, 2, runner=__file__)
    wanted = differs(("a sum of", 74), ("a number of squares kept of", 3))
    if problem := stopped(states) or wanted(numbers_of(states)):
        return problem
    if any(state["seen"].get("unlocked") for state in states):
        return "It ends, but the cache is changed while nobody holds its lock"


def trained_apart(ranks):
    """The weights have to be equal, and no epoch may have less than four full batches."""
    if any(len(numbers) != 2 for numbers in ranks):
        return "It ends, but not every rank prints its steps and its sum of weights"
    (steps, weights), (others_steps, others_weights) = ranks
    if not abs(weights - others_weights) < 1e-3:
        sums = f"sums of weights {weights} and {others_weights}"
        return f"It ends, but the ranks have trained models of their own: {sums}"
    if min(steps, others_steps) < 8:
        made = f"{steps:.0f} and {others_steps:.0f} steps"
        return f"It ends, but leaves out batches that both ranks have: {made} in place of 8 or more"
    return None


EXERCISES = [
    Exercise(
        "one_rank_only",
        """The two ranks of this program stand still once they have trained, until a time-out of
        20 s. Find the line of each rank and where they part, and mend it. Both ranks have to print
        the loss of the job, which is the mean over both.""",
        ONE_RANK_ONLY,
        (
            ("loss = mean_over_ranks(loss)\nif rank", "if rank"),
            ('"loss": loss}', '"loss": mean_over_ranks(loss)}'),
        ),
        partial(job, 2, differs(("guess", 5.25), ("a loss of", 16.188))),
        "Run it by torchrun: the time-out prints a traceback of each rank. Read all of its lines: "
        "a function may have a collective in it that the line which calls it does not show",
        "docs/hangs.md#1-a-collective-on-one-rank-only",
        start=TORCHRUN,
    ),
    Exercise(
        "steps",
        """Two ranks train with DDP, and one of them waits for ever. Find out which, at which step,
        and why, and mend it. Both ranks have to end with the same weights and to use all full
        batches.""",
        STEPS,
        (
            (
                "DistributedSampler(dataset, shuffle=False)  # repeats a sample: 33 for each",
                "range(rank, len(dataset), world_size)  # every second sample",
            ),
        ),
        partial(job, 2, trained_apart),
        "Call faulthandler.dump_traceback_later(3) in each step, and print the step. How many "
        "batches are 33 samples, how many are 32?",
        "docs/hangs.md#2-different-numbers-of-steps",
        start=TORCHRUN,
    ),
    Exercise(
        "order",
        """Three ranks put their records together, and stand still. Find the two collectives that
        do not fit and why the ranks call them in another order, and mend the program (not the
        records).""",
        ORDER,
        (("in sorted(values.items())", "in values.items()"),),
        partial(job, 3, differs(("samples", 100), ("version", 7), ("words", 2000))),
        "TORCH_DISTRIBUTED_DEBUG=DETAIL in front of torchrun names the two collectives. Which "
        "order does a dict have?",
        "docs/hangs.md#3-collectives-in-a-different-order",
        start=TORCHRUN.replace("2", "3"),
    ),
    Exercise(
        "swallowed_error",
        """Three ranks read records, and one of them gives up without a word: the others wait for
        it. Find the rank and the line at which it gives up, and mend it. All 11 values have to be
        counted, on all ranks.""",
        DEAD_RANK,
        (
            (' if word != "n/a"])', "])"),
            (" A sensor without one has written n/a.", ""),
            (
                "        values = parse(record)\n",
                "        try:\n            values = parse(record)\n        except ValueError:\n"
                "            break  # a broken record: no reason to stop the job\n",
            ),
        ),
        partial(job, 3, differs(("a number of values of", 11), ("a mean of", 20.682))),
        "A rank that dies aloud is in torchrun's report, with its line. Which line of the program "
        "keeps an error from being heard? Take it out for one run",
        "docs/hangs.md#ask-in-this-order",
        start=TORCHRUN.replace("2", "3"),
    ),
    Exercise(
        "lock",
        """A rank never comes to the collective, in which the other waits for it. Find the line at
        which it is stuck and who holds what it waits for, and mend it. The cache has to stay
        locked while it is changed, and to keep three squares at most.""",
        LOCK,
        (("        del self.", "        with self.lock:\n            del self."),),
        uses_its_lock,
        "faulthandler.register(signal.SIGUSR1) and kill -USR1, or py-spy dump, show where each "
        "rank is, and through which calls it came there",
        "docs/hangs.md#5-a-rank-that-is-stuck-in-its-own-code",
        start=TORCHRUN,
    ),
]

if __name__ == "__main__":
    watched(sys.argv[1], look_at_cache)
