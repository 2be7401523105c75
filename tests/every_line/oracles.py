"""What can be wrong with a script of the ladder: each oracle says so in one line, or returns None.

An oracle looks at what a run left. Its name is what is wrong if it says something.
"""

import re
import time
from dataclasses import dataclass
from pathlib import Path

import launch
import torch

OBSERVE = str(Path(__file__).with_name("observe.py"))
EMPTY = ("MyTrainDataset(2048)", "MyTrainDataset(0)")


@dataclass
class Run:
    """What is left of a run of a script: for each rank that came to its end, what it saw."""

    folder: Path
    statuses: set
    output: str
    seconds: float

    @property
    def ranks(self):
        files = sorted(self.folder.glob("rank*/seen.pt"))
        return [torch.load(file, weights_only=True) for file in files]

    @property
    def losses(self):
        """The loss that each rank printed for the first epoch."""
        return [float(loss) for loss in re.findall(r"Epoch 0 \| .*Loss: (\S+)", self.output)]


def in_ranks(script, folder, world_size=2):
    """Run `main` in two processes that have imported torch: 2048 samples are one step."""
    began = time.monotonic()
    args = (script, 3, 2, "--batch_size", 2048 // world_size)
    statuses, output = launch.quickly(OBSERVE, *args, nproc=world_size, cwd=folder, seconds=30)
    return Run(Path(folder), statuses, output, time.monotonic() - began)


def typed(script, folder):
    """Run the script by a command, as a reader does."""
    began = time.monotonic()
    command = launch.python(script, 1, 1, "--batch_size", 1024)
    env = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(launch.ROOT)}
    process = launch.start(command, folder, **env)
    status, output = launch.finish(process, 60)
    return Run(Path(folder), {status}, output, time.monotonic() - began)


def typed_with_no_data(script, folder):
    """Run the script by a command, with a dataset that has no sample."""
    return typed(launch.edited(script, Path(folder) / "empty.py", EMPTY), folder)


def seen_by(way):
    def mark(oracle):
        oracle.way, oracle.says = way, oracle.__name__.replace("_", " ")
        return oracle

    return mark


# Each takes the run and `one`, the run of single_gpu.py in one process with the doubled batch.


@seen_by(in_ranks)
def weights_differ_from_one_process(run, one):
    want = one.ranks[0]["weights"]
    for rank, seen in enumerate(run.ranks):
        away = max((seen["weights"][name] - want[name]).abs().max().item() for name in want)
        if away > 1e-5:
            return f"rank {rank}'s are up to {away:.4f} away"


@seen_by(in_ranks)
def ranks_hold_other_weights(run, one):
    zero, *others = (seen["weights"] for seen in run.ranks)
    for rank, other in enumerate(others, 1):
        away = max((zero[name] - other[name]).abs().max().item() for name in zero)
        if away > 0:
            return f"rank {rank}'s are up to {away:.4f} away from rank 0's"


@seen_by(in_ranks)
def ranks_saw_the_same_samples(run, one):
    zero, other = (seen["epochs"][0]["samples"] for seen in run.ranks)
    if both := set(zero) & set(other):
        return f"{len(both)} of {len(set(zero) | set(other))} samples of epoch 0"


@seen_by(in_ranks)
def epoch_repeated(run, one):
    for rank, seen in enumerate(run.ranks):
        first, second, _ = (epoch["samples"] for epoch in seen["epochs"])
        if first == second:
            return f"rank {rank} had samples {first[:3]}... in this order in epochs 0 and 1"


@seen_by(in_ranks)
def dropout_equal_on_ranks(run, one):
    zero, other = ([epoch["draws"] for epoch in seen["epochs"]] for seen in run.ranks)
    if zero == other:
        return f"both drew {zero[0][0]:.4f} first"


@seen_by(in_ranks)
def loss_is_that_of_one_rank(run, one):
    for loss in run.losses:
        if abs(loss - one.losses[0]) > 1e-5:
            return f"{' and '.join(map(str, run.losses))} printed, one process: {one.losses[0]}"


@seen_by(in_ranks)
def two_writers_of_one_file(run, one):
    writers = [path.parent.name for path in sorted(run.folder.glob("*/checkpoint.pt"))]
    if writers != ["rank0"]:
        return f"checkpoint.pt was written by {' and '.join(writers) or 'no rank'}"


@seen_by(in_ranks)
def keys_with_module(run, one):
    keys = torch.load(run.folder / "rank0" / "checkpoint.pt", weights_only=True).keys()
    if wrong := keys - one.ranks[0]["weights"].keys():
        return f"{min(wrong)!r} in checkpoint.pt"


@seen_by(in_ranks)
def said_more_than_once(run, one):
    if (times := run.output.count("Global batch size: ")) != 1:
        return f"'Global batch size' stands {times} times in the output"


@seen_by(in_ranks)
def DDP_outlives_its_group(run, one):
    if alive := [rank for rank, seen in enumerate(run.ranks) if seen.get("DDP is alive")]:
        return f"ranks {alive} took the group down from under it"


@seen_by(in_ranks)
def group_is_left(run, one):
    if left := [rank for rank, seen in enumerate(run.ranks) if seen["group is left"]]:
        return f"ranks {left} have not taken it down"


@seen_by(in_ranks)
def ends_in_an_error(run, one):
    if run.statuses != {0}:
        errors = re.findall(r"^(?:\[rank\d\]: )?((?:\w+\.)*\w+Error: .*)", run.output, re.MULTILINE)
        return errors[0] if errors else f"no error is named: {run.output[-300:]!r}"


@seen_by(typed)
def the_command_ends_in_an_error(run, one):
    return ends_in_an_error(run, one)


@seen_by(typed)
def not_one_process_for_each_rank(run, one):
    sizes = re.findall(r"Rank: \d+ \| World size: (\d+)", run.output)
    if sizes != ["2", "2"]:
        return f"{len(sizes)} in place of 2 say their rank, of {' '.join(sizes) or 'none'}"


@seen_by(typed_with_no_data)
def error_not_told_in_one_line(run, one):
    lines = run.output.splitlines()
    told = [line for line in lines if not line.startswith("Rank: ")]
    if told != ["ERROR: the dataset has 0 samples, nothing to train on"]:
        return f"{len(told)} lines, the last: {told[-1]}"


ORACLES = [each for each in list(globals().values()) if hasattr(each, "way")]
CRASHES = {ends_in_an_error, the_command_ends_in_an_error, error_not_told_in_one_line}
