"""What a script prints and logs: lines, a progress bar, and a run of Weights & Biases."""

import atexit
import os
import signal
import socket
import sys
import threading
from contextlib import suppress

import torch
import torch.distributed as dist
from tqdm import tqdm

from plumbing import launch, signals, streams

wandb_run = None
wandb_finishes = threading.Lock()


def print_rank(device: torch.device):
    """Print who this process is. From now on each line that it prints is one write."""
    streams.print_whole_lines()
    size = dist.get_world_size() if dist.is_initialized() else 1
    local_rank = dist.get_node_local_rank(fallback_rank=launch.rank())
    where = f"Host: {socket.gethostname()} | Pid: {os.getpid()} | Device: {device}"
    print(f"Rank: {launch.rank()} | World size: {size} | Local rank: {local_rank} | {where}")


def progress_bar(data):
    """Return `data` with a progress bar, which rank 0 draws on a terminal.

    The bar appears once an epoch has taken a second. data: an iterable, such as a DataLoader.
    """
    tqdm.set_lock(threading.RLock())  # its own is a semaphore, which a killed process would leak
    hide = None if launch.rank() == 0 else True  # None: tqdm draws on a terminal only
    return tqdm(data, leave=False, delay=1, disable=hide)


def batch_size_of(train_data) -> int | None:
    """Return the batch size of a DataLoader, or None if the size of its batches may vary."""
    return train_data.batch_size or getattr(train_data.batch_sampler, "batch_size", None)


def sampler_of(train_data):
    """Return the sampler that chooses the samples, also if a batch_sampler groups them."""
    return getattr(train_data.batch_sampler, "sampler", None) or train_data.sampler


def report(epoch: int, loss: float, train_data):
    """Print the line of an epoch, and log it to wandb if start_wandb has begun a run."""
    sizes = f"Batchsize: {batch_size_of(train_data) or 'varies'} | Steps: {len(train_data)}"
    print(f"[rank {launch.rank()}] Epoch {epoch} | {sizes} | Loss: {loss:.6f}")
    log_to_wandb({"epoch": epoch, "loss": loss})


def start_wandb(args, job_id: str | None = None, group: str | None = None):
    """Log to Weights & Biases if args.wandb is not "disabled".

    Without a `group` rank 0 logs, in a run with the id `job_id`. With one every rank logs, in a
    run of its own. A job that resumes with the same id continues the same runs.
    """
    if args.wandb == "disabled" or (launch.rank() != 0 and group is None):
        return
    begin_wandb_run(
        {"*": "epoch"},
        mode=args.wandb,
        config=vars(args),
        id=f"{job_id}-{launch.rank()}" if group else job_id,
        group=group,
    )
    if wandb_run is not None:
        atexit.register(finish_wandb)
        signals.Listener((signal.SIGTERM,), finish_wandb_and_leave).start()


def begin_wandb_run(axes: dict[str, str], **options):
    """Begin a run, or print why there is none: training is worth more than its log.

    axes: which metric is the x-axis of which others. options: those of wandb.init.
    """
    global wandb_run
    try:
        import wandb  # imported here, so that only a run that uses wandb waits for it

        wandb_run = wandb.init(project="ddp-ladder", resume="allow", **options)
        for metrics, axis in axes.items():
            wandb_run.define_metric(metrics, step_metric=axis)
    except Exception as error:
        print(f"Training continues without wandb: {error}")


def log_to_wandb(metrics: dict):
    if wandb_run is not None:
        with suppress(Exception):  # training is worth more than its log
            wandb_run.log(metrics)


def finish_wandb():
    """Write what wandb has not written yet. Without this the end of its log may be lost."""
    with wandb_finishes, suppress(Exception):  # a failure and a signal may come together
        wandb_run.finish()


def finish_wandb_and_leave(number: int):
    leave(128 + number)  # as a shell reports the end of a process by a signal


def leave(status: int):
    """End this process from any thread, without waiting for a DDP or for other ranks."""
    finish_wandb()
    for stream in sys.stdout, sys.stderr:
        with suppress(Exception):
            stream.flush()
    os._exit(status)
