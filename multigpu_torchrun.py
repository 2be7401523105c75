"""Train on every GPU of one machine under torchrun, and go on from a snapshot after a failure.

Run:  torchrun --standalone --nproc_per_node=gpu multigpu_torchrun.py 50 10
"""

import argparse
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
import zipfile
from contextlib import suppress
from datetime import timedelta

LAUNCHER = os.getppid()  # asked before the imports that take seconds: it may end meanwhile

import torch
import torch.distributed as dist
import torch.distributed.nn  # DDP would import it later, and then it would keep the group alive
import torch.nn.functional as F
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from tqdm import tqdm

from datautils import MyTrainDataset, build_model


def count_gpus() -> int:
    """How many GPUs can train together on this machine. (Apple's MPS has no backend for that.)"""
    return 0 if torch.backends.mps.is_available() else torch.accelerator.device_count()


def end_with_launcher():
    """End this process once its parent is gone: a torchrun that is killed leaves its processes."""
    while os.getppid() == LAUNCHER:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)


def ddp_setup(timeout: int = 600) -> torch.device:
    """Join the process group that torchrun describes and return this process's own device.

    A rank that has waited for another for `timeout` seconds fails, and with it the job.
    """
    sys.stdout.reconfigure(line_buffering=True, write_through=False)  # each line in one write
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = " ".join(name for name in names if name not in os.environ)
    if missing:
        command = f"torchrun --standalone --nproc_per_node=gpu {sys.argv[0]}"
        print(f"ERROR: {missing} not set. Start with: {command} (no GPU: auto)", file=sys.stderr)
        sys.exit(2)
    rank, world_size, local_rank, local_world_size = (int(os.environ[name]) for name in names[:4])
    if dist.is_torchelastic_launched():
        threading.Thread(target=end_with_launcher, daemon=True).start()
    if local_world_size == world_size:
        # On the CPU they talk over the loopback interface, which no other machine can reach.
        loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    device = torch.device("cpu")
    if 0 < count_gpus() < local_world_size:
        time.sleep(60 * local_rank)  # local rank 0 tells it, then torchrun ends those who wait
        numbers = f"{local_world_size} processes, but {count_gpus()} GPUs"
        print(f"ERROR: {numbers} on {socket.gethostname()}: start one per GPU", file=sys.stderr)
        sys.exit(2)
    if count_gpus() > 0:
        device = torch.device(torch.accelerator.current_accelerator().type, local_rank)
        torch.accelerator.set_device_index(local_rank)  # or every process would open GPU 0 as well
    dist.init_process_group(
        dist.get_default_backend_for_device(device),  # NCCL for CUDA and ROCm, gloo for the CPU
        timeout=timedelta(seconds=timeout),
        device_id=None if device.type == "cpu" else device,
    )
    where = f"Host: {socket.gethostname()} | Pid: {os.getpid()} | Device: {device}"
    print(f"Rank: {rank} | World size: {world_size} | Local rank: {local_rank} | {where}")
    return device


def exit_on(problem: str | None):
    """If any rank has a problem, end all with exit status 2; rank 0 tells it, once for the job."""
    if not dist.is_initialized():
        ddp_setup()
    problems = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    problem = next(filter(None, problems), None)
    if problem is None:
        return
    if dist.get_rank() == 0:
        print(f"ERROR: {problem}", file=sys.stderr)
    dist.barrier()  # as soon as one process ends, torchrun ends the others
    dist.destroy_process_group()
    sys.exit(2)


class Trainer:
    def __init__(
        self,
        model: torch.nn.Module,
        train_data: DataLoader,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        save_every: int,
        snapshot_path: str,
    ):
        self.rank = dist.get_rank()
        self.model = model.to(device)
        self.train_data = train_data
        self.optimizer = optimizer
        self.device = device
        self.save_every = save_every
        self.wandb_run = None
        self.snapshot_path = snapshot_path
        self.epochs_run = 0
        self.wandb_id = uuid.uuid4().hex[:8]
        self._load_snapshot()
        self.model = DDP(self.model)  # gives every rank the weights of rank 0
        # In its first backward pass DDP adds the gradients up in another order than in all others,
        # and rounds otherwise. A resumed run has a first pass too, yet it shall end with the same
        # bits as an unbroken one. So that pass is made here, by each run, and not counted.
        sample, _ = train_data.dataset[0]
        self.model.eval()(sample[None].to(device)).sum().backward()
        self.model.train()

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        output = self.model(source)
        loss = F.cross_entropy(output, targets)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def _run_epoch(self, epoch):
        sampler = self.train_data.sampler
        sampler.set_epoch(epoch)  # another order in each epoch, the same one on all ranks
        # Dropout and the like have to differ between ranks and epochs, but not between two runs.
        torch.manual_seed(sampler.seed + epoch * sampler.num_replicas + self.rank)
        loss_sum, samples = 0.0, 0
        # A bar on rank 0 only, only on a terminal (None), only once an epoch has taken a second.
        hide = None if self.rank == 0 else True
        for source, targets in tqdm(self.train_data, leave=False, delay=1, disable=hide):
            source = source.to(self.device, non_blocking=self.train_data.pin_memory)
            targets = targets.to(self.device, non_blocking=self.train_data.pin_memory)
            loss_sum += self._run_batch(source, targets) * len(source)
            samples += len(source)
        totals = torch.tensor([loss_sum, samples], device=self.device)
        dist.all_reduce(totals)  # sums over the ranks: the loss is to be the job's
        loss_sum, samples = totals
        loss = float(loss_sum / samples)
        name = f"{'CPU' if self.device.type == 'cpu' else 'GPU'}{self.rank}"
        sizes = f"Batchsize: {self.train_data.batch_size} | Steps: {len(self.train_data)}"
        print(f"[{name}] Epoch {epoch} | {sizes} | Loss: {loss:.6f}")
        if self.wandb_run:
            with suppress(Exception):  # training is worth more than its log
                self.wandb_run.log({"epoch": epoch, "loss": loss})

    def _save_snapshot(self, epoch):
        if self.rank != 0:
            return  # all ranks have the same weights: one file, one writer
        snapshot = {
            "model": self.model.module.state_dict(),  # module: without DDP around it
            "optimizer": self.optimizer.state_dict(),
            "epochs_run": epoch + 1,
            "seed": self.train_data.sampler.seed,
            "wandb_id": self.wandb_id,
        }
        with open(f"{self.snapshot_path}.tmp", "wb") as file:
            torch.save(snapshot, file)
            file.flush()
            os.fsync(file.fileno())  # on the disk, before it takes the place of the last one
        os.replace(f"{self.snapshot_path}.tmp", self.snapshot_path)  # whole or not at all
        print(f"Epoch {epoch} | Training snapshot saved at {self.snapshot_path}")

    def _load_snapshot(self):
        problem = None
        if os.path.exists(self.snapshot_path):
            try:  # weights_only: a file from elsewhere must not run code
                with zipfile.ZipFile(self.snapshot_path) as file:  # torch.load checks no sums
                    if file.testzip():
                        raise zipfile.BadZipFile
                snapshot = torch.load(self.snapshot_path, map_location="cpu", weights_only=True)
                self._resume(snapshot)
            except Exception as error:
                problem = (
                    f"{self.snapshot_path} is damaged, not a snapshot or of another model"
                    f" ({type(error).__name__}): move it away or choose another --snapshot_path"
                )
        exit_on(problem)
        if self.epochs_run > 0 and self.rank == 0:
            print(f"Resuming training from snapshot at Epoch {self.epochs_run}")

    def _resume(self, snapshot):
        self.model.load_state_dict(snapshot["model"])
        self.optimizer.load_state_dict(snapshot["optimizer"])
        self.epochs_run = snapshot["epochs_run"]
        self.train_data.sampler.seed = snapshot["seed"]
        self.wandb_id = snapshot["wandb_id"]

    def train(self, total_epochs):
        if self.rank == 0:
            print(f"Global batch size: {self.train_data.batch_size * dist.get_world_size()}")
        for epoch in range(self.epochs_run, total_epochs):
            self._run_epoch(epoch)
            if (epoch + 1) % self.save_every == 0 or epoch + 1 == total_epochs:
                self._save_snapshot(epoch)

    def start_wandb(self, args):
        """Log to Weights & Biases from here on. Without `--wandb` it is not even imported."""
        if args.wandb == "disabled" or self.rank != 0:
            return
        try:
            import wandb

            self.wandb_run = wandb.init(
                project="ddp-ladder",
                mode=args.wandb,
                config=vars(args),
                id=self.wandb_id,
                resume="allow",  # a job that goes on from a snapshot goes on in the same run
            )
            self.wandb_run.define_metric("*", step_metric="epoch")  # the x-axis of every chart
        except Exception as error:
            print(f"Training goes on without wandb: {error}")


def load_train_objs(seed: int):
    torch.manual_seed(seed)  # the same initial weights in every run and process
    train_set = MyTrainDataset(2048)  # load your dataset
    model = build_model()  # load your model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return train_set, model, optimizer


def prepare_dataloader(dataset: Dataset, batch_size: int, seed: int, device: torch.device):
    return DataLoader(
        dataset,
        batch_size=batch_size,
        collate_fn=tuple,  # MyTrainDataset hands out whole batches; if yours does not, drop this
        pin_memory=device.type not in ("cpu", "mps"),  # copies to a GPU need not be waited for
        sampler=DistributedSampler(dataset, seed=seed),  # shuffles, and deals each rank its share
    )


def parse_args():
    parser = argparse.ArgumentParser(
        usage=argparse.SUPPRESS,  # a mistake is told in one line
        description=__doc__,
        epilog="(Defaults in parentheses.) Global batch size = batch_size * number of processes",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.error = exit_on  # and not once by each rank
    positional = {"nargs": "?", "default": argparse.SUPPRESS, "help": "short for the option"}
    parser.add_argument("total_epochs", **positional)
    parser.add_argument("save_every", **positional)
    option = parser.add_argument
    option("--total_epochs", "--total-epochs", default=50, help="epochs to train (50)")
    option("--save_every", "--save-every", default=10, help="epochs from one save to the next (10)")
    option("--batch_size", "--batch-size", default=32, help="samples in a step of a process (32)")
    option("--seed", default=0, help="fixes the initial weights and the order of samples (0)")
    path = "snapshot.pt"
    option("--timeout", default=600, help="seconds to wait for another rank, then fail (600)")
    option("--snapshot_path", "--snapshot-path", default=path, help=f"to save and resume ({path})")
    modes = ("disabled", "offline", "online")
    option("--wandb", choices=modes, default="disabled", help="offline needs no account (disabled)")
    args = parser.parse_intermixed_args()
    minimum = {"total_epochs": 1, "save_every": 1, "batch_size": 1, "seed": 0, "timeout": 1}
    for name, least in minimum.items():
        text = str(getattr(args, name))
        if not (text.isdecimal() and len(text) < 11 and least <= int(text) < 2**31):
            parser.error(f"{name}: give a whole number from {least} to {2**31 - 1}, not {text!r}")
        setattr(args, name, int(text))
    if not args.snapshot_path:
        parser.error("snapshot_path: give the path of a file, not ''")
    folder = os.path.dirname(args.snapshot_path) or "."
    try:
        tempfile.TemporaryFile(dir=folder).close()  # better told now than at the first save
    except OSError as error:
        parser.error(f"snapshot_path: cannot write in {folder} ({error.strerror}): choose another")
    return args


@record  # puts the traceback of a failure into torchrun's report
def main(args):
    device = ddp_setup(args.timeout)
    dataset, model, optimizer = load_train_objs(args.seed)
    train_data = prepare_dataloader(dataset, args.batch_size, args.seed, device)
    trainer = Trainer(model, train_data, optimizer, device, args.save_every, args.snapshot_path)
    trainer.start_wandb(args)
    trainer.train(args.total_epochs)
    del trainer  # DDP has to go before the group that it talks through
    dist.destroy_process_group()


if __name__ == "__main__":
    main(parse_args())
