"""Measure how DDP scales on the GPUs that are here, and predict it for many nodes.

Run:  python benchmarks/scaling.py                          on 1, 2, 4, … GPUs of this machine
      torchrun --nproc_per_node=8 --nnodes=2 … benchmarks/scaling.py     on these machines
      python benchmarks/scaling.py --bandwidth 50 --latency 10           with a network like this

A step is what one process needs alone, and the sending of gradients that is not hidden behind the
backward pass. An all-reduce of B bytes between n ranks takes, in a ring and in a tree,

  2 (n - 1) latency + 2 (n - 1) / n * B / bandwidth        2 log2(n) latency + 2 B / bandwidth

of which the faster one counts. The latency of a link follows from the smallest message that was
measured, its bandwidth from the largest. Over several nodes it is an all-reduce within each, then
one between them. Two processes need a little more than that, since both wait for the slower one:
that difference in milliseconds is added to each larger job unchanged.

It prints the measured beside the predicted, then the efficiency (what a GPU makes in the job, of
what it makes alone) on 1 to 1,024 nodes, and what failures of nodes cost there.

It does not know of networks that others use too, of slow cards and late data, and it sends one
bucket at a time, as NCCL does. docs/performance.md says how far it was right.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from check_cluster import seconds_per_all_reduce
from plumbing.devices import count_gpus

ACCUMULATIONS, BUCKETS, ROUNDS = (1, 4), (1, 4), 4
NODES = [2**power for power in range(11)]


# ---- The model ------------------------------------------------------------------------------


@dataclass
class Link:
    latency: float  # seconds for a message
    bandwidth: float  # bytes per second


def sending(ranks: int, size: float, link: Link) -> float:
    """Seconds for an all-reduce of `size` bytes between `ranks`."""
    ring = 2 * (ranks - 1) * link.latency + 2 * (ranks - 1) / ranks * size / link.bandwidth
    tree = 2 * math.log2(ranks) * link.latency + 2 * size / link.bandwidth
    return min(ring, tree)


def fit(ranks: int, curve: list[tuple[int, float]]) -> Link:
    """The link on whose ring the smallest and the largest message take as long as measured.

    `curve` is [(bytes, seconds)]. What lies between may be off the line: algorithms change there.
    """
    (small, quick), (large, slow) = curve[0], curve[-1]
    per_byte = (slow - quick) / (large - small)
    bandwidth = 2 * (ranks - 1) / ranks / per_byte
    return Link((quick - small * per_byte) / 2 / (ranks - 1), bandwidth)


def fit_links(run: dict) -> dict:
    """Those of a run: within a node, and between nodes, where all GPUs of a node share one."""
    links = {place: fit(*measured) for place, measured in run["curves"].items()}
    if "between nodes" in links:
        links["between nodes"].bandwidth *= run["gpus"]
    return links


def not_hidden(backward: float, bucket_seconds: list[float]) -> float:
    """Seconds that the sending of buckets goes on after the backward pass.

    Bucket i of k can be sent when i / k of the pass is done and the one before has been sent.
    """
    done = 0.0
    for number, seconds in enumerate(bucket_seconds, 1):
        done = max(done, backward * number / len(bucket_seconds)) + seconds
    return done - backward


def predict(run: dict, key: str, nodes: int, gpus: int, links: dict) -> float:
    """Seconds of a step on `nodes` with `gpus` each; key: accumulation and number of buckets."""
    alone, backward, _ = run["steps"][key]
    buckets, counts = int(key.split()[1]), {"within a node": gpus, "between nodes": nodes}
    size = run["bytes"] / buckets
    seconds = sum(sending(n, size, links[place]) for place, n in counts.items() if n > 1)
    return alone + not_hidden(backward, [seconds] * buckets)


def best_interval(snapshot: float, between_failures: float) -> tuple[float, float]:
    """(seconds from a snapshot to the next, share of the time that is lost), at the best.

    `snapshot` is how long training waits for one. A failure costs half an interval on average.
    Source: J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 1974.
    """
    interval = math.sqrt(2 * snapshot * between_failures)
    return interval, snapshot / interval + interval / 2 / between_failures


# ---- Measuring ------------------------------------------------------------------------------


class Perceptron(nn.Module):
    """For a machine without GPUs: eight layers, of which a step takes a tenth of a second."""

    def __init__(self, width):
        super().__init__()
        layers = [layer for _ in range(8) for layer in (nn.Linear(width, width), nn.ReLU())]
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x)


def workload(device, width):
    """A model, and what gives its loss for a batch."""
    torch.manual_seed(0)
    if device.type == "cpu":
        batch = torch.randn(128, width)
        return Perceptron(width), lambda model: model(batch).square().mean()
    from llm_speed import LENGTH, SIZES, Nano

    layers, width, heads, batch_size = SIZES["gpt2"]
    rows = torch.randint(0, 50257, (batch_size, LENGTH + 1), device=device)

    def loss_of(model):
        with torch.autocast(device.type, torch.bfloat16):
            return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    return Nano(layers, width, heads).to(device), loss_of


class Steps:
    """Steps of training, timed: on the device, and of the slowest rank."""

    def __init__(self, model, loss_of, device):
        self.model, self.loss_of, self.device = model, loss_of, device
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)

    def now(self):
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter()

    def step(self, accumulation, send):
        """(seconds of a step, seconds of its last backward pass). Gradients are sent, or not."""
        begin = self.now()
        for left in reversed(range(accumulation)):
            with nullcontext() if send and not left else self.model.no_sync():
                loss = self.loss_of(self.model)
                backward = self.now() if not left else 0.0
                loss.backward()
        backward = self.now() - backward
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        return self.now() - begin, backward

    def medians(self, accumulation):
        """{send: medians of (step, backward)}; steps that send and steps that don't take turns."""
        times = {False: [], True: []}
        for turn in range(ROUNDS + 1):
            for send in times:
                found = [self.step(accumulation, send) for _ in range(5)]
                dist.barrier()
                times[send] += found[1:] if turn else []  # the first may wait for the others
        for send, found in times.items():
            medians = [statistics.median(column) for column in zip(*found, strict=True)]
            slowest = torch.tensor(medians, device=self.device, dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            times[send] = slowest.tolist()
        return times


def job_sizes(most: int) -> list[int]:
    """1, 2, 4, …, and as many as there are."""
    return sorted({2**power for power in range(most.bit_length())} | {most})


def measure(args) -> dict:
    """What a step costs with and without sending, and an all-reduce, between these processes."""
    local_rank, on_gpu = int(os.environ["LOCAL_RANK"]), count_gpus() > 0
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    gpus, rank = int(os.environ["LOCAL_WORLD_SIZE"]), dist.get_rank()
    run = {"gpus": gpus, "nodes": dist.get_world_size() // gpus, "curves": {}, "steps": {}}
    run["name"] = torch.cuda.get_device_name() if on_gpu else "CPU"
    model, loss_of = workload(device, args.width)
    run["bytes"] = size = 4 * sum(weight.numel() for weight in model.parameters())

    here = rank - local_rank
    groups = {"within a node": range(here, here + gpus)}
    groups["between nodes"] = range(local_rank, dist.get_world_size(), gpus)
    sizes = [1024 * 4**power for power in range(12) if 1024 * 4**power <= 4 * size]
    for place, ranks in groups.items():
        if len(ranks) > 1:
            group = dist.new_group([*ranks], use_local_synchronization=True)
            curve = [(each, seconds_per_all_reduce(each, group, device)) for each in sizes]
            run["curves"][place] = (len(ranks), curve)

    for buckets in BUCKETS:
        if on_gpu:  # with several buckets in pieces, or no gradient would be there before the last
            torch._dynamo.reset()
            torch._dynamo.config.optimize_ddp = buckets > 1
            model.compile()
        ddp = DDP(model, bucket_cap_mb=1.01 * size / buckets / 2**20, gradient_as_bucket_view=True)
        steps = Steps(ddp, loss_of, device)
        for accumulation in ACCUMULATIONS:
            times = steps.medians(accumulation)
            (alone, backward), (together, _) = times[False], times[True]
            run["steps"][f"{accumulation} {buckets}"] = [alone, backward, together]
        del ddp, steps
    if rank == 0 and args.to:
        Path(args.to).write_text(json.dumps(run))
    dist.destroy_process_group()
    return run


# ---- What it prints -------------------------------------------------------------------------


def print_measured(runs: list[dict], links: dict) -> dict:
    """Measured steps beside predicted ones. Return what the smallest job needs beyond the model."""
    print(
        f"torch {torch.__version__} | {runs[0]['name']} | {runs[0]['bytes'] / 1e6:,.0f} MB", end=""
    )
    print(" of gradients | a step in ms")
    titles = ("nodes", "GPUs each", "accumulation, buckets", "alone", "together", "predicted")
    print("  ".join(titles) + "  efficiency")
    beyond = {}
    for run in runs:
        for key, (alone, _, together) in run["steps"].items():
            predicted = predict(run, key, run["nodes"], run["gpus"], links) + beyond.get(key, 0.0)
            if run["curves"]:
                beyond.setdefault(key, max(0.0, together - predicted))
            times = [f"{1e3 * each:.2f}" for each in (alone, together, predicted)]
            cells = zip((run["nodes"], run["gpus"], key, *times), titles, strict=True)
            print("  ".join(f"{cell:>{max(len(title), 8)}}" for cell, title in cells), end="")
            print(f"  {alone / together:>10.1%}")
    return beyond


def print_predicted(run: dict, links: dict, beyond: dict) -> dict:
    """The efficiency on many nodes: {key: that for each of NODES}."""
    for place, link in links.items():
        print(f"A link {place}: {link.latency * 1e6:.1f} us, {link.bandwidth / 1e9:.2f} GB/s")
    print(f"Predicted efficiency with {run['gpus']} GPUs a node, for accumulation and buckets:")
    print(f"{'nodes':>6}" + "".join(f"  {key:>8}" for key in run["steps"]))
    table = {}
    for key, (alone, *_) in run["steps"].items():
        table[key] = []
        for nodes in NODES:
            more = beyond.get(key, 0.0) if nodes * run["gpus"] > 1 else 0.0
            seconds = predict(run, key, nodes, run["gpus"], links) + more
            table[key].append(alone / seconds)
    for nodes, *row in zip(NODES, *table.values(), strict=True):
        print(f"{nodes:>6}" + "".join(f"  {cell:>8.1%}" for cell in row))
    return table


def print_failures(args):
    print(
        f"If a node fails every {args.mtbf:,.0f} h and training waits {args.snapshot:g} s for a",
        end="",
    )
    print(" snapshot:")
    for nodes in (1, 16, 128, 1024):
        between = args.mtbf * 3600 / nodes
        interval, lost = best_interval(args.snapshot, between)
        print(f"{nodes:>6} nodes: a failure in {between / 3600:,.1f} h; best to save every", end="")
        print(
            f" {interval / 60:,.1f} min; {lost:.2%} of the time is lost, and each restart besides"
        )


def draw(path: str, table: dict, runs: list[dict]):
    """Points for what was measured, lines for what is predicted."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for number, (key, row) in enumerate(table.items()):
        label = "accumulation {}, buckets {}".format(*key.split())
        gpus = [nodes * runs[-1]["gpus"] for nodes in NODES]
        axes.plot(gpus, row, color=f"C{number}", label=label)
        for run in filter(lambda run: run["curves"], runs):
            alone, _, together = run["steps"][key]
            axes.plot(run["nodes"] * run["gpus"], alone / together, "o", color=f"C{number}")
    axes.set(xscale="log", xlabel="GPUs", ylabel="efficiency", title="Measured (points), predicted")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def parse_args():
    layout = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(description=__doc__, **layout)
    option = parser.add_argument
    option("--bandwidth", type=float, help="of a node's network, GB/s (as measured, or 50)")
    option("--latency", type=float, help="between nodes, microseconds (as measured, or 10)")
    option("--mtbf", type=float, default=50_000.0, help="hours from a node's failure to the next")
    option("--snapshot", type=float, default=1.0, help="seconds that training waits for one (1)")
    option("--width", type=int, default=512, help="of the model of a machine without GPUs (512)")
    option("--picture", help="a file to draw into")
    option("--to", help=argparse.SUPPRESS)
    return parser.parse_args()


def main():
    args = parse_args()
    if "LOCAL_RANK" in os.environ:
        runs = [measure(args)]
        if args.to or os.environ["RANK"] != "0":
            return
    else:
        runs = []
        with tempfile.TemporaryDirectory() as folder:
            for ranks in job_sizes(count_gpus() or 2):
                file = Path(folder) / f"{ranks}.json"
                torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
                command = [*torchrun, f"--nproc_per_node={ranks}", __file__, f"--to={file}"]
                subprocess.run([*command, f"--width={args.width}"], check=True, timeout=900)
                runs.append(json.loads(file.read_text()))
    smallest = next((run for run in runs if run["curves"]), runs[0])
    links = fit_links(smallest)
    beyond = print_measured(runs, links)
    network = links.setdefault("between nodes", Link(10e-6, 50e9))
    network.latency = network.latency if args.latency is None else args.latency * 1e-6
    network.bandwidth = network.bandwidth if args.bandwidth is None else args.bandwidth * 1e9
    table = print_predicted(runs[-1], links, beyond)
    print_failures(args)
    if args.picture:
        draw(args.picture, table, runs)


if __name__ == "__main__":
    main()
