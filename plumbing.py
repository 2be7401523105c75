"""What every script needs around its lesson. You may skip this file: no lesson is in it.

docs/plumbing.md says why each function is here. Every rank has to call what begins with `all_`."""

import argparse
import atexit
import fcntl
import gc
import launchers  # before torch: it notes the parent of this process
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import zipfile
from contextlib import suppress
from launchers import count_gpus as count_gpus  # this and the next for the scripts
from launchers import local_job as local_job
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # DDP would import it later, and then it would keep the group alive
from tqdm import tqdm

gc.freeze()  # what torch has made stays: no collection need walk through it again
HELP = {
    "total_epochs": "epochs to train",
    "save_every": "epochs from one save to the next",
    "batch_size": "samples in a step of a process",
    "seed": "fixes the initial weights and the order of samples",
    "nproc": "processes, at most one per GPU",
    "timeout": "seconds to wait for another rank, then fail",
    "snapshot_path": "to save and resume",
}
wandb_run, wandb_finish = None, threading.Lock()
locks = {}  # the open files by their paths: as long as they are open, the locks hold


def parse_args(doc: str, defaults: dict) -> argparse.Namespace:
    """Read the command line. A mistake ends the process, or is told by all_exit_if_args_bad."""
    layout = {"usage": argparse.SUPPRESS, "formatter_class": argparse.RawDescriptionHelpFormatter}
    sizes = "(Defaults in parentheses.) Global batch size = batch_size * number of processes"
    parser = argparse.ArgumentParser(description=doc, epilog=sizes, **layout)
    parser.error = refuse_usage
    for name in ("total_epochs", "save_every"):
        parser.add_argument(name, nargs="?", default=argparse.SUPPRESS, help="as the option")
    for name, default in defaults.items():
        names = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
        parser.add_argument(*names, default=default, help=f"{HELP[name]} ({default})")
    modes = {"choices": ("disabled", "offline", "online"), "default": "disabled"}
    parser.add_argument("--wandb", help="offline needs no account (disabled)", **modes)
    by_torchrun = "timeout" in defaults  # such a script: then one rank must not end alone
    try:
        args = parser.parse_intermixed_args()
        for name in defaults:
            setattr(args, name, checked(name, str(getattr(args, name))))
    except ValueError as mistake:
        if not by_torchrun:
            parser.exit(2, f"{parser.prog}: error: {mistake}\n")
        args = argparse.Namespace(**defaults, mistake=str(mistake))
    if not by_torchrun:
        all_exit_if(launchers.not_alone(spawns="nproc" in defaults))
    return args


def refuse(message: str):
    raise ValueError(message)


def refuse_usage(message: str):
    if "--local-rank" in message:
        refuse(f"{message}: that is of torch.distributed.launch: start with torchrun instead")
    refuse(message)


def checked(name: str, text: str) -> int | str:
    """The value of an argument; if it is wrong, an error that says why."""
    if name == "snapshot_path":
        folder = os.path.dirname(os.path.realpath(text) if os.path.islink(text) else text) or "."
        try:
            tempfile.TemporaryFile(dir=folder).close()  # better told now than at the first save
        except OSError as error:
            refuse(f"{name}: cannot write in {folder} ({error.strerror}): choose another")
        return text or refuse(f"{name}: give the path of a file, not ''")
    least = 0 if name == "seed" else 1
    if not (text.isdecimal() and len(text) < 11 and least <= int(text) < 2**31):
        refuse(f"{name}: give a whole number from {least} to {2**31 - 1}, not {text!r}")
    if name == "nproc" and 0 < count_gpus() < int(text):
        refuse(f"nproc: give at most {count_gpus()}, the number of GPUs here, not {text}")
    return int(text)


def all_exit_if(problem: str | None, in_training: bool = False):
    """If any rank has a problem, end all with exit status 2. Each machine says why, once."""
    grouped = dist.is_initialized()
    if grouped:
        problems = [None] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
        problem = next(filter(None, problems), None)
    if problem is None:
        return
    local_rank = dist.get_node_local_rank(rank()) if grouped else launchers.number_here()
    if not grouped and local_rank > 0:  # the first says why, then torchrun ends the rest
        time.sleep(60 if dist.is_torchelastic_launched() else 5)
    if local_rank == 0:
        print(f"ERROR: {problem}", file=sys.stderr)
    if grouped:
        dist.barrier()  # as soon as one process ends, torchrun ends the others
        if in_training:  # to take the group down from under a DDP that is alive can hang
            finish_wandb()
            os._exit(2)
        dist.destroy_process_group()
    sys.exit(2)


def all_exit_if_args_bad(args: argparse.Namespace, may_differ=("snapshot_path",)):
    """What was typed has to be right, and the same on all machines, or the ranks train apart."""
    all_exit_if(vars(args).get("mistake"))
    typed = [None] * dist.get_world_size()
    dist.all_gather_object(typed, vars(args))
    different = [key for key in vars(args) if any(each[key] != typed[0][key] for each in typed)]
    different = [key.replace("_", "-") for key in different if key not in may_differ]
    all_exit_if(f"{', '.join(different)}: not the same on all machines" if different else None)


def all_exit_if_empty(dataset):
    all_exit_if("the dataset has 0 samples, nothing to train on" if len(dataset) == 0 else None)


def all_exit_if_not_finite(loss: float, model: torch.nn.Module, train_data):
    """NaN must not be saved over good weights. All ranks find the same: they have one loss."""
    if len(train_data) == 0:
        sizes = f"{len(train_data.sampler)} samples for each process, batch size"
        all_exit_if(f"an epoch has no step: {sizes} {train_data.batch_size}", in_training=True)
    if not all(value.isfinite().all() for value in (torch.tensor(loss), *model.parameters())):
        cure = "lower the learning rate (the smaller the batch, the lower) or look at the data"
        all_exit_if(f"training diverged (loss {loss} or a weight), nothing is saved: {cure}", True)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def require_torchrun():
    """End this process if no launcher has told its place, and later if torchrun is gone."""
    all_exit_if(launchers.wrong_start())
    processes = int(os.environ["LOCAL_WORLD_SIZE"])
    if 0 < count_gpus() < processes:
        where = f"{count_gpus()} GPUs on {socket.gethostname()}"
        all_exit_if(f"{processes} processes, but {where}: start one per GPU")
    if processes == int(os.environ["WORLD_SIZE"]):
        launchers.stay_on_this_machine()
    if dist.is_torchelastic_launched():
        threading.Thread(target=launchers.end_with_launcher, daemon=True).start()
        atexit.register(lambda: time.sleep(hasattr(sys, "last_value")))  # be first in its report
        if launchers.TORCH_CAME_FIRST and os.environ["RANK"] == "0":
            print("WARNING: import plumbing before torch, or it sees torchrun's end too late")


def print_rank(device: torch.device):
    """Print who this process is. From here on each line that it prints is one write."""
    launchers.print_whole_lines()
    where = f"Host: {socket.gethostname()} | Pid: {os.getpid()} | Device: {device}"
    size = dist.get_world_size() if dist.is_initialized() else 1
    local_rank = dist.get_node_local_rank(fallback_rank=rank())
    print(f"Rank: {rank()} | World size: {size} | Local rank: {local_rank} | {where}")


def bar(data):
    """A progress bar on rank 0 only, on a terminal (None), and once an epoch has taken a second."""
    tqdm.set_lock(threading.RLock())  # its own is a semaphore, which a killed process leaks
    return tqdm(data, leave=False, delay=1, disable=None if rank() == 0 else True)


def report(epoch: int, loss: float, train_data, device: torch.device):
    """Print the line of an epoch, and log it to wandb if start_wandb was asked to."""
    name = f"{'CPU' if device.type == 'cpu' else 'GPU'}{rank()}"
    sizes = f"Batchsize: {train_data.batch_size} | Steps: {len(train_data)}"
    print(f"[{name}] Epoch {epoch} | {sizes} | Loss: {loss:.6f}")
    with suppress(Exception):  # there may be no run, and training is worth more than its log
        wandb_run.log({"epoch": epoch, "loss": loss})


def start_wandb(args: argparse.Namespace, run_id: str | None = None, group: str | None = None):
    """Log to Weights & Biases from here on: rank 0 or, in a group, every rank to its own run."""
    global wandb_run
    if args.wandb == "disabled" or (rank() != 0 and group is None):
        return  # then wandb is not even imported
    run = {"id": f"{run_id}-{rank()}" if group else run_id, "group": group, "resume": "allow"}
    try:
        import wandb

        wandb_run = wandb.init(project="ddp-ladder", mode=args.wandb, config=vars(args), **run)
        wandb_run.define_metric("*", step_metric="epoch")  # the x-axis of every chart
    except Exception as error:
        print(f"Training goes on without wandb: {error}")
        return
    atexit.register(finish_wandb)
    signals, signalled = os.pipe()
    os.set_blocking(signalled, False)
    signal.set_wakeup_fd(signalled)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    threading.Thread(target=finish_wandb_on_sigterm, args=(signals,), daemon=True).start()


def finish_wandb():
    with wandb_finish, suppress(Exception):  # a failure and a signal may come together
        wandb_run.finish()


def finish_wandb_on_sigterm(signals: int):
    while os.read(signals, 1) != bytes([signal.SIGTERM]):
        pass  # in a thread, since the main one may wait for other ranks, and see no signal
    finish_wandb()
    os._exit(128 + signal.SIGTERM)


def save_atomically(content: dict, path: str):
    """Save it whole or not at all: a job may be killed in mid-save, and a disk may be full."""
    path = os.path.realpath(path)  # a symbolic link stays one
    try:
        with open(f"{path}.tmp", "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())  # on the disk, before it takes the place of the last one
        os.replace(f"{path}.tmp", path)
    except BaseException:
        Path(f"{path}.tmp").unlink(missing_ok=True)  # or it would keep a full disk full
        raise


def all_own(lock: str, busy: str, cure: str):
    """Lock the file until this process ends, however it ends. If another job has it, end all.

    Each machine locks: its disk may be its own, or shared with the other machines of this job."""
    name = f"process {os.getpid()} of {socket.gethostname()}, since {time.strftime('%F %T')}"
    job = [f"{name}, {os.urandom(4).hex()}"]  # containers may have one host name, and one number
    dist.broadcast_object_list(job)  # now it is rank 0, on all ranks
    first_here = dist.get_node_local_rank(rank()) == 0
    for my_turn in (rank() == 0, rank() != 0 and first_here):  # rank 0, which saves, has it first
        holder = holder_of(lock, job[0]) if my_turn else None
        all_exit_if(holder and f"{busy} ({holder}): wait for its end, or {cure}")


def holder_of(lock: str, job: str) -> str | None:
    """Lock the file for `job`, and return None. Or return which other job has it."""
    try:
        file = locks[lock] = locks.get(lock) or open(lock, "a")
        for tenth in range(1000):  # after 90 s an NFS server gives up a machine that has vanished
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                file.truncate(0)
                print(job, end="", file=file, flush=True)
                os.fsync(file.fileno())  # other machines read it
                return None
            holder = Path(lock).read_text() or "it has not said who it is"
            if holder == job:
                return None  # another machine of this job has it
            if tenth == 100 and f" of {socket.gethostname()}, " in holder:
                break  # here 10 s are enough for a job that is just leaving
            time.sleep(0.1)
    except OSError as error:
        print(f"WARNING: {lock}: {error.strerror}: cannot tell if another job writes here")
        return None
    return holder


def all_read_snapshot(path: str, model, optimizer) -> dict | None:
    """Return the snapshot, on the CPU, or None. If a rank has one that is no good, all end."""
    snapshot, problem = None, None
    folder, name = os.path.split(os.path.realpath(path))
    busy = f"another job has {folder}/{name}"
    all_own(f"{folder}/.{name}.lock", busy, "choose another --snapshot_path")
    try:
        if os.path.exists(path):
            snapshot = load_whole(path, {"model", "optimizer", "epochs_run", "seed"})
            refuse_misfit(snapshot, model, optimizer)
    except ValueError as error:
        problem = f"{path} {error}, or choose another --snapshot_path"
    all_exit_if(problem)
    Path(f"{os.path.realpath(path)}.tmp").unlink(missing_ok=True)  # a save was cut off here
    return snapshot


def load_whole(path: str, keys: set, **options) -> dict:
    """Return a snapshot with at least these keys. Refuse a file that is damaged, or none."""
    try:
        with zipfile.ZipFile(path) as file:  # torch.load checks no sums
            if file.testzip() or not any("data.pkl" in name for name in file.namelist()):
                raise zipfile.BadZipFile
    except OSError as error:
        refuse(f"cannot be read ({error.strerror}): change that")
    except Exception:  # what a damaged archive raises is of many kinds
        refuse("is damaged or no snapshot: move it away")
    try:
        snapshot = torch.load(path, map_location="cpu", weights_only=True, **options)
    except pickle.UnpicklingError:
        refuse("has objects in it that could run code, and is not read: save only plain values")
    if not isinstance(snapshot, dict) or not keys <= snapshot.keys():
        refuse("is no snapshot of this script: use the one that wrote it")
    return snapshot


def refuse_misfit(snapshot: dict, model, optimizer):
    """Refuse a snapshot that is good, but of another model or optimizer."""
    here, there = model.state_dict(), snapshot["model"]
    for name in here | there:
        shapes = [getattr(state.get(name), "shape", "missing") for state in (there, here)]
        if shapes[0] != shapes[1]:
            refuse(f"is of another model ({name} is {shapes[0]} there, {shapes[1]} here): use that")
    here, there = optimizer.param_groups, snapshot["optimizer"]["param_groups"]
    sizes = [[len(group["params"]) for group in groups] for groups in (here, there)]
    # What is no switch belongs to the method, be it SGD or AdamW. New versions of torch add those.
    names = {key for key, value in optimizer.defaults.items() if not isinstance(value, bool | None)}
    if sizes[0] != sizes[1] or any(names - group.keys() for group in there):
        refuse(f"is of another optimizer than this {type(optimizer).__name__}: use that")


def print_resume(snapshot: dict, train_data):
    """Say where training goes on, and what is not as it was. Older snapshots have no sizes."""
    if rank() != 0:
        return
    print(f"Resuming training from snapshot at Epoch {snapshot['epochs_run']}")
    if snapshot["seed"] != train_data.sampler.seed:
        print(f"The snapshot's seed stays, {snapshot['seed']}, not {train_data.sampler.seed}")
    now, before = (train_data.batch_size, dist.get_world_size()), snapshot.get("sizes")
    if before and now != tuple(before):
        now, before = (f"{a * b} ({a} x {b} processes)" for a, b in (now, before))
        print(f"Global batch size: {now}, but {before} in the snapshot")


def all_fix_bucket_order(ddp: torch.nn.parallel.DistributedDataParallel):
    """Make DDP's first backward pass, without model and data: it leaves no trace.

    DDP lays out its buckets of gradients anew after its first pass, which so rounds otherwise than
    all others. A resumed run has a first pass too, and yet shall end with the same bits."""
    sparse = (module for module in ddp.module.modules() if getattr(module, "sparse", False))
    if any(sparse) or ddp.static_graph or ddp.find_unused_parameters:
        return  # the last lays nothing out anew, the others need the real gradients
    model, ddp.module = ddp.module, torch.nn.Identity()
    ddp.module.model = model  # DDP looks for its buffers there
    ddp(None)  # now it awaits a backward pass
    ddp.module = model
    sums = [weight.sum() for weight in model.parameters() if weight.requires_grad]
    torch.autograd.backward(sums, [torch.zeros_like(each) for each in sums])
    ddp.zero_grad()
