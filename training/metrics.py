"""What a run tells: where its time goes, its lines, metrics.jsonl, loss.png and wandb."""

import json
import resource
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

from plumbing import output
from training.job import all_patiently, explain

PEAK_TFLOPS = {  # of dense bfloat16 matrix products, from the vendors' datasheets
    "B200": 2250,
    "MI300X": 1307,
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,
    "H200 NVL": 835,
    "H200": 989,
    "A100": 312,
    "L40S": 362,
    "L40": 181,
    "L4": 121,
    "RTX 4090": 165,
}


class Stopwatch:
    """Adds up the seconds that the steps spend on data, on saving and on communication.

    A GPU works through a queue, and the host does not wait for it: what happens on the GPU is
    marked by events in that queue, whose times are read when the queue has been waited for anyway.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.reset()

    def reset(self):
        self.begin = time.perf_counter()
        self.seconds = {"data": 0.0, "communication": 0.0, "save": 0.0}
        self.ready, self.events = None, []

    def add(self, name, begin):
        self.seconds[name] += time.perf_counter() - begin

    def mark(self):
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event

    def gradients_arrived(self):
        """Communication is what the step waits for once its last gradient is ready to be sent."""
        self.events.append((self.ready, self.mark()))

    def read(self):
        """Return (seconds since the reset, fraction of them for each part), and reset."""
        for begin, end in self.events:
            on_cpu = self.device.type == "cpu"
            self.seconds["communication"] += (
                end - begin if on_cpu else begin.elapsed_time(end) / 1e3
            )
        seconds = time.perf_counter() - self.begin
        parts = {name: part / seconds for name, part in self.seconds.items()}
        parts = {"compute": 1 - sum(parts.values()), **parts}
        self.reset()
        return seconds, parts


def peak_flops(device: torch.device) -> float | None:
    """The FLOP/s that the device's vendor states, or None for a device that is not in the table."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return next((1e12 * peak for key, peak in PEAK_TFLOPS.items() if key in name), None)


def memory_used(device: torch.device) -> int:
    """The most memory, in bytes, that this process has used: on its GPU if it has one."""
    if device.type == "cpu":
        unit = 1 if sys.platform == "darwin" else 1024
        return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return torch.accelerator.max_memory_allocated(device)


class Log:
    """Where a run tells how it goes: a bar, lines, `folder`/metrics.jsonl and wandb.

    Training is worth more than its log: what fails here is told once at most, and training goes on.
    """

    def __init__(self, folder: Path, steps_run: int, total_steps: int):
        self.folder = folder
        self.total_steps = total_steps
        # A bar on rank 0 only, and only on a terminal (None).
        hide = None if dist.get_rank() == 0 else True
        self.bar = tqdm(total=total_steps, initial=steps_run, disable=hide, unit="step")
        self.wrote = True

    def write(self, line: str):
        self.bar.write(line)

    def log(self, step: int, line: str, metrics: dict):
        """Print the line, on rank 0, and log the metrics there or, in a group, of every rank."""
        metrics = {"global_step": step, **metrics}
        if "train/loss" in metrics:
            speed = metrics["train/tokens_per_second"]
            self.bar.set_postfix_str(f"loss {metrics['train/loss']:.4f}, {speed:,.0f} tokens/s")
        if dist.get_rank() == 0:
            self.write(f"Step {step}/{self.total_steps} | {line}")
            try:
                with open(self.folder / "metrics.jsonl", "a") as file:
                    print(json.dumps({"timestamp": time.time(), **metrics}), file=file)
            except OSError as error:
                if self.wrote:
                    self.write(f"WARNING: {self.folder}/metrics.jsonl ends here: {explain(error)}")
                self.wrote = False
        output.log_to_wandb(metrics)

    def close(self):
        """Draw the curves."""
        self.bar.close()
        if dist.get_rank() == 0:
            try:
                plot(self.folder)
            except Exception as error:
                print(f"There is no new loss.png: {explain(error)}")


def plot(folder: Path):
    """Draw the losses in metrics.jsonl, also those of the runs before, into loss.png."""
    from matplotlib.figure import Figure  # it takes a second, and is needed at the end only

    curves = {"train/loss": {}, "validation/loss": {}}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        with suppress(ValueError):  # a line that was cut off when a run was killed
            metrics = json.loads(line)
            step = metrics["global_step"]
            for name in curves.keys() & metrics.keys():
                # A run that went back to a snapshot replaces what came after it.
                while curves[name] and next(reversed(curves[name])) >= step:
                    curves[name].popitem()
                curves[name][step] = metrics[name]
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name, curve in curves.items():
        axes.plot(curve.keys(), curve.values(), label=name, marker=".")
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=folder.name)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(folder / "loss.png", dpi=120)


def line_of_step(metrics: dict) -> str:
    """What the terminal shows of them."""
    mfu = f"{metrics['train/mfu']:.1%}" if metrics["train/mfu"] else "unknown"
    times = (f"{key[5:]} {part:.0%}" for key, part in metrics.items() if key.startswith("time/"))
    return (
        f"Loss: {metrics['train/loss']:.4f} | LR: {metrics['train/lr']:.2e}"
        f" | Grad norm: {metrics['train/grad_norm']:.2f}"
        f" | Tokens/s: {metrics['train/tokens_per_second']:,.0f} | MFU: {mfu}"
        f" | Memory: {metrics['train/memory_gib']:.1f} GiB | Time: {', '.join(times)}"
    )


def all_start_wandb(args, folder: Path, run_id: str):
    """Log to Weights & Biases from here on: rank 0 or, in a group, every rank to its own run."""
    if args.wandb == "disabled":
        return  # then wandb is not even imported
    logs = dist.get_rank() == 0 or args.wandb_group is not None
    # It may take a minute on one rank, for which no collective should wait.
    all_patiently(
        "wandb", args.wandb, start_wandb if logs else lambda *_: None, args, folder, run_id
    )


def start_wandb(args, folder: Path, run_id: str):
    rank = dist.get_rank()
    output.begin_wandb_run(
        dict.fromkeys(("train/*", "validation/*", "time/*"), "global_step"),
        mode=args.wandb,
        config={key: str(value) for key, value in vars(args).items()},
        dir=folder,
        name=f"{folder.name}-{rank}",
        id=f"{run_id}-{rank}",  # a job that resumes continues the same runs
        group=args.wandb_group,
    )
