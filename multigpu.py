"""Train on every GPU of one machine: one process per GPU. Without GPUs, two processes on the CPU.

Run:  python multigpu.py 50 10
"""

import argparse
import os
import socket
import sys
from contextlib import suppress

import torch
import torch.distributed as dist
import torch.distributed.nn  # DDP would import it later, and then it would keep the group alive
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from tqdm import tqdm

from datautils import MyTrainDataset, build_model


def count_gpus() -> int:
    """How many GPUs can train together on this machine. (Apple's MPS has no backend for that.)"""
    return 0 if torch.backends.mps.is_available() else torch.accelerator.device_count()


def start_store() -> dist.TCPStore:
    """Listen on a port of this run's own, for this machine only: the processes will meet there."""
    listener = socket.create_server(("127.0.0.1", 0))  # port 0: the system chooses a free one
    address, port = listener.getsockname()
    listening = {"master_listen_fd": listener.detach(), "wait_for_workers": False}
    return dist.TCPStore(address, port, is_master=True, **listening)


def ddp_setup(rank: int, world_size: int, port: int) -> torch.device:
    """Join the process group and return the device that is this process's own."""
    sys.stdout.reconfigure(line_buffering=True, write_through=False)  # each line in one write
    # On the CPU they talk over the loopback interface, which no other machine can reach.
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    torch.set_num_threads(max(1, torch.get_num_threads() // world_size))  # share the cores
    device = torch.device("cpu")
    if count_gpus() > 0:
        device = torch.device(torch.accelerator.current_accelerator().type, rank)
        torch.accelerator.set_device_index(rank)  # or every process would open GPU 0 as well
    dist.init_process_group(
        dist.get_default_backend_for_device(device),  # NCCL for CUDA and ROCm, gloo for the CPU
        store=dist.TCPStore("127.0.0.1", port),
        rank=rank,
        world_size=world_size,
        device_id=None if device.type == "cpu" else device,
    )
    where = f"Host: {socket.gethostname()} | Pid: {os.getpid()} | Device: {device}"
    print(f"Rank: {rank} | World size: {world_size} | Local rank: {rank} | {where}")
    return device


class Trainer:
    def __init__(
        self,
        model: torch.nn.Module,
        train_data: DataLoader,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        save_every: int,
    ):
        self.rank = dist.get_rank()
        self.model = model.to(device)
        self.train_data = train_data
        self.optimizer = optimizer
        self.device = device
        self.save_every = save_every
        self.wandb_run = None
        self.model = DDP(self.model)  # gives every rank the weights of rank 0

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

    def _save_checkpoint(self, epoch):
        if self.rank != 0:
            return  # all ranks have the same weights: one file, one writer
        torch.save(self.model.module.state_dict(), "checkpoint.pt")  # module: without DDP around it
        print(f"Epoch {epoch} | Training checkpoint saved at checkpoint.pt")

    def train(self, total_epochs):
        if self.rank == 0:
            print(f"Global batch size: {self.train_data.batch_size * dist.get_world_size()}")
        for epoch in range(total_epochs):
            self._run_epoch(epoch)
            if (epoch + 1) % self.save_every == 0 or epoch + 1 == total_epochs:
                self._save_checkpoint(epoch)

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
    positional = {"nargs": "?", "default": argparse.SUPPRESS, "help": "short for the option"}
    parser.add_argument("total_epochs", **positional)
    parser.add_argument("save_every", **positional)
    option = parser.add_argument
    option("--total_epochs", "--total-epochs", default=50, help="epochs to train (50)")
    option("--save_every", "--save-every", default=10, help="epochs from one save to the next (10)")
    option("--batch_size", "--batch-size", default=32, help="samples in a step of a process (32)")
    option("--seed", default=0, help="fixes the initial weights and the order of samples (0)")
    gpus = count_gpus()
    option("--nproc", default=gpus or 2, help="processes, at most one per GPU (GPUs, or else 2)")
    modes = ("disabled", "offline", "online")
    option("--wandb", choices=modes, default="disabled", help="offline needs no account (disabled)")
    args = parser.parse_intermixed_args()
    minimum = {"total_epochs": 1, "save_every": 1, "batch_size": 1, "seed": 0, "nproc": 1}
    for name, least in minimum.items():
        text = str(getattr(args, name))
        if not (text.isdecimal() and len(text) < 11 and least <= int(text) < 2**31):
            parser.error(f"{name}: give a whole number from {least} to {2**31 - 1}, not {text!r}")
        setattr(args, name, int(text))
    if 0 < gpus < args.nproc:
        parser.error(f"nproc: give at most {gpus}, the number of GPUs here, not {args.nproc}")
    return args


def main(rank, world_size, port, args):
    device = ddp_setup(rank, world_size, port)
    dataset, model, optimizer = load_train_objs(args.seed)
    train_data = prepare_dataloader(dataset, args.batch_size, args.seed, device)
    trainer = Trainer(model, train_data, optimizer, device, args.save_every)
    trainer.start_wandb(args)
    trainer.train(args.total_epochs)
    del trainer  # DDP has to go before the group that it talks through
    dist.destroy_process_group()


if __name__ == "__main__":
    args = parse_args()
    store = start_store()
    try:
        mp.spawn(main, args=(args.nproc, store.port, args), nprocs=args.nproc)
    except KeyboardInterrupt:
        for process in mp.active_children():  # they may be waiting for one another
            process.kill()
        sys.exit(130)
