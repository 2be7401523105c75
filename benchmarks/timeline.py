"""Show where the time of a step of train_llm.py goes: on one GPU, on two, on four, …

Run:  python benchmarks/timeline.py --picture step.svg

torch.profiler watches steps of GPT-2 (124M, 64 x 1024 tokens, no accumulation) on the first 1,
2, 4, … GPUs of this machine. The table has milliseconds of a step on rank 0: how long kernels of
each kind ran; of those that send gradients, how long they waited for other ranks, and how long they
ran while nothing computed; and how long nothing ran at all. The picture has one of these steps for
each number of GPUs. In a good one there are no gaps, and little is sent while nothing computes.

Without a GPU it watches operators instead of kernels, on one process and two. gloo sends in the
background, and no operator shows that.
"""

import argparse
import json
import math
import re
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import llm_speed
import torch
from scaling import job_sizes
from torch.profiler import ProfilerActivity, profile

WARM_UP, STEPS = 12, 6
# A kernel is of the first kind whose pattern is in its name; of the last kind if there is none.
KINDS = {
    "sending": "nccl|gloo|c10d",
    "attention": "^(?!triton).*(sdpa|flash|fmha|attention)",
    "matrix products": r"gemm|nvjet|cutlass|xmma|::(add)?mm\b",
    "GELU, norms, loss": "triton",
    "the rest": "",
}
COLORS = ("#b3261e", "#e0912f", "#1f4e9e", "#5b9bd5", "#7a7a7a")


@dataclass
class Event:
    begin: float  # microseconds, by a clock that all processes of this machine share
    end: float
    name: str

    @property
    def kind(self) -> str:
        return next(kind for kind, names in KINDS.items() if re.search(names, self.name))


def read(path: Path) -> list[Event]:
    """What ran, in order: the kernels and copies of a GPU or, without one, operators."""
    trace = json.loads(path.read_text())
    zero = trace.get("baseTimeNanoseconds", 0) / 1000
    on_gpu, on_cpu = [], []
    for each in trace["traceEvents"]:
        kinds = {"kernel": on_gpu, "gpu_memcpy": on_gpu, "gpu_memset": on_gpu, "cpu_op": on_cpu}
        if each.get("cat") in kinds:
            begin = zero + each["ts"]
            kinds[each["cat"]].append(Event(begin, begin + each["dur"], each["name"]))
    events = sorted(on_gpu or on_cpu, key=lambda event: (event.begin, -event.end))
    return events if on_gpu else innermost(events)


def innermost(operators: list[Event]) -> list[Event]:
    """Operators call others. Cut them into parts, of which each belongs to the innermost one."""
    parts, running, now = [], [], 0.0
    for operator in [*operators, Event(math.inf, math.inf, "")]:
        while running and running[-1].end <= operator.begin:
            ended = running.pop()
            parts.append(Event(now, ended.end, ended.name))
            now = ended.end
        if running:
            parts.append(Event(now, operator.begin, running[-1].name))
        running.append(operator)
        now = operator.begin
    return [part for part in parts if part.end > part.begin]


def whole_steps(events: list[Event]) -> list[list[Event]]:
    """The events step by step: each ends with the last of AdamW before another matrix product."""
    steps, start, last = [], 0, None
    for number, event in enumerate(events):
        if re.search("(?i)adam", event.name):
            last = number
        elif event.kind == "matrix products" and last is not None:
            steps.append(events[start : last + 1])
            start, last = last + 1, None
    return steps[1:]  # the profiler began in the first one


def covered(events: list[Event]) -> float:
    """Microseconds in which at least one of these events, which are in order, runs."""
    total, until = 0.0, 0.0
    for event in events:
        total += max(0.0, event.end - max(event.begin, until))
        until = max(until, event.end)
    return total


def row(ranks: list[list[Event]]) -> dict[str, float]:
    """The milliseconds of one step on the first of these ranks, by what they are spent on."""
    step = ranks[0]
    sent = [[event for event in rank if event.kind == "sending"] for rank in ranks]
    computing = [event for event in step if event.kind != "sending"]
    found = {kind: sum(e.end - e.begin for e in step if e.kind == kind) for kind in KINDS}
    # An all-reduce begins when the last rank does, and until then the others wait in it.
    starts = [max(event.begin for event in same) for same in zip(*sent, strict=True)]
    found["of it waiting"] = sum(
        max(0.0, start - event.begin) for start, event in zip(starts, sent[0], strict=True)
    )
    found["of it alone"] = covered(step) - covered(computing)
    whole = step[-1].end - step[0].begin
    found["nothing"] = whole - covered(step)
    found["step"] = whole
    return {name: microseconds / 1000 for name, microseconds in found.items()}


def watch(folder: Path):
    """A rank of a job: train, and write a trace of some steps."""
    inside = llm_speed.Inside(folder, "gpt2")
    inside.trainer.args.log_freq = 10**9  # a report waits for the GPU
    inside.begin(1)
    llm_speed.seconds(inside.steps, WARM_UP)
    watched = ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU
    with profile(activities=[watched]) as traced:
        llm_speed.seconds(inside.steps, STEPS)  # waits for the GPU in the end
    traced.export_chrome_trace(str(folder / f"{inside.processes}-{inside.trainer.rank}.json"))
    del inside  # DDP has to go before the group that it talks through
    torch.distributed.destroy_process_group()


def draw(path: str, steps: dict[int, list[Event]]):
    """One step for each number of processes: a lane that computes, and under it one that sends."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(9, 0.8 + 1.1 * len(steps)), layout="constrained")
    axes = figure.subplots()
    places = {}
    for number, (count, step) in enumerate(steps.items()):
        for kind, color in zip(KINDS, COLORS, strict=True):
            lane = -2.6 * number - (1.05 if kind == "sending" else 0)
            bars = [
                ((event.begin - step[0].begin) / 1000, (event.end - event.begin) / 1000)
                for event in step
                if event.kind == kind
            ]
            axes.broken_barh(bars, (lane, 1), color=color, linewidth=0, rasterized=True)
            places[lane + 0.5] = f"{count}: {'sends' if kind == 'sending' else 'computes'}"
    axes.set_yticks([*places], places.values())
    axes.set(xlabel="milliseconds of a step", ylabel="processes", xlim=(0, None))
    patches = [Patch(color=color, label=kind) for kind, color in zip(KINDS, COLORS, strict=True)]
    figure.legend(handles=patches, loc="outside upper center", ncols=len(KINDS), frameon=False)
    figure.savefig(path, dpi=110)


def main():
    layout = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(description=__doc__, **layout)
    parser.add_argument("--picture", help="a file to draw into")
    parser.add_argument("--watch", type=Path, help=argparse.SUPPRESS)  # how it starts itself
    args = parser.parse_args()
    if args.watch:
        return watch(args.watch)
    gpus = torch.cuda.device_count()
    print(f"torch {torch.__version__} |", end=" ")
    print(torch.cuda.get_device_name() if gpus else "CPU", "| milliseconds of a step")
    shown = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        llm_speed.prepare(folder)
        for count in job_sizes(gpus or 2):
            torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"]
            command = [sys.executable, *torchrun, __file__, "--watch", folder]
            llm_speed.run(command, CUDA_VISIBLE_DEVICES=",".join(map(str, range(count))))
            ranks = [whole_steps(read(folder / f"{count}-{rank}.json")) for rank in range(count)]
            rows = [row(list(step)) for step in zip(*ranks, strict=True)]
            medians = {key: statistics.median(each[key] for each in rows) for key in rows[0]}
            if count == 1:
                print("ranks  " + "  ".join(medians))
            cells = (f"{value:{len(key)}.2f}" for key, value in medians.items())
            print(f"{count:5}  " + "  ".join(cells), flush=True)
            shown[count] = ranks[0][len(ranks[0]) // 2]
    if args.picture:
        draw(args.picture, shown)


if __name__ == "__main__":
    main()
