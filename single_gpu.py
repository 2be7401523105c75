"""Train on one GPU, or on the CPU of a machine that has none. Nothing is distributed yet.

Run:  python single_gpu.py 50 10
"""

import argparse
import os
import socket
import sys
from contextlib import suppress

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from datautils import MyTrainDataset, build_model


class Trainer:
    def __init__(
        self,
        model: torch.nn.Module,
        train_data: DataLoader,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        save_every: int,
    ):
        self.rank = 0
        self.model = model.to(device)
        self.train_data = train_data
        self.optimizer = optimizer
        self.device = device
        self.save_every = save_every
        self.wandb_run = None

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        output = self.model(source)
        loss = F.cross_entropy(output, targets)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def _run_epoch(self, epoch):
        loss_sum, samples = 0.0, 0
        # A bar on rank 0 only, only on a terminal (None), only once an epoch has taken a second.
        hide = None if self.rank == 0 else True
        for source, targets in tqdm(self.train_data, leave=False, delay=1, disable=hide):
            source = source.to(self.device, non_blocking=self.train_data.pin_memory)
            targets = targets.to(self.device, non_blocking=self.train_data.pin_memory)
            loss_sum += self._run_batch(source, targets) * len(source)
            samples += len(source)
        loss = float(loss_sum / samples)
        name = f"{'CPU' if self.device.type == 'cpu' else 'GPU'}{self.rank}"
        sizes = f"Batchsize: {self.train_data.batch_size} | Steps: {len(self.train_data)}"
        print(f"[{name}] Epoch {epoch} | {sizes} | Loss: {loss:.6f}")
        if self.wandb_run:
            with suppress(Exception):  # training is worth more than its log
                self.wandb_run.log({"epoch": epoch, "loss": loss})

    def _save_checkpoint(self, epoch):
        torch.save(self.model.state_dict(), "checkpoint.pt")
        print(f"Epoch {epoch} | Training checkpoint saved at checkpoint.pt")

    def train(self, total_epochs):
        for epoch in range(total_epochs):
            self._run_epoch(epoch)
            if (epoch + 1) % self.save_every == 0 or epoch + 1 == total_epochs:
                self._save_checkpoint(epoch)

    def start_wandb(self, args):
        """Log to Weights & Biases from here on. Without `--wandb` it is not even imported."""
        if args.wandb == "disabled":
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
        shuffle=True,
        generator=torch.Generator().manual_seed(seed),
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
    modes = ("disabled", "offline", "online")
    option("--wandb", choices=modes, default="disabled", help="offline needs no account (disabled)")
    args = parser.parse_intermixed_args()
    minimum = {"total_epochs": 1, "save_every": 1, "batch_size": 1, "seed": 0}
    for name, least in minimum.items():
        text = str(getattr(args, name))
        if not (text.isdecimal() and len(text) < 11 and least <= int(text) < 2**31):
            parser.error(f"{name}: give a whole number from {least} to {2**31 - 1}, not {text!r}")
        setattr(args, name, int(text))
    return args


def main(args):
    sys.stdout.reconfigure(line_buffering=True, write_through=False)  # each line in one write
    device = torch.device("cpu")
    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
    where = f"Host: {socket.gethostname()} | Pid: {os.getpid()} | Device: {device}"
    print(f"Rank: 0 | World size: 1 | Local rank: 0 | {where}")
    dataset, model, optimizer = load_train_objs(args.seed)
    train_data = prepare_dataloader(dataset, args.batch_size, args.seed, device)
    trainer = Trainer(model, train_data, optimizer, device, args.save_every)
    trainer.start_wandb(args)
    trainer.train(args.total_epochs)


if __name__ == "__main__":
    main(parse_args())
