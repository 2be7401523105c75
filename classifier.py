"""Train an image classifier: multigpu_torchrun.py with what a real job has around its loop.

Run:  torchrun --standalone --nproc_per_node=gpu classifier.py 30 5 --lr 0.004
To make it yours, copy this file and the folder plumbing/, and begin with load_train_objs.
"""

import math
import os
from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Subset, TensorDataset, random_split
from torch.utils.data.distributed import DistributedSampler

import plumbing

CLASSES = 4
WARM_UP = 3  # epochs in which the learning rate rises


def ddp_setup(timeout: int) -> torch.device:
    """Join the process group and return the device that is this process's own."""
    plumbing.require_torchrun()  # exits unless a launcher has set RANK, LOCAL_RANK and so on
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu")
    if plumbing.count_gpus() > 0:
        # Local rank 1 takes GPU 1. If a wrapper script shows each process one GPU, it takes that.
        device = torch.device(local_rank % plumbing.count_gpus())  # torch.device(1) means cuda:1
        torch.accelerator.set_device_index(device)  # a plain "cuda" now means this GPU, not GPU 0
    backend = dist.get_default_backend_for_device(device)  # NCCL for CUDA and ROCm, gloo for a CPU
    # It reads RANK and WORLD_SIZE, and the ranks meet at MASTER_ADDR and MASTER_PORT.
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    return device


def rate_of(epoch: int, total_epochs: int) -> float:
    """Return the learning rate of an epoch, as a part of --lr: a warm-up, then half a cosine.

    It has no state that a resume could bring back. With more epochs it follows the longer curve.
    """
    if epoch < WARM_UP:
        return (epoch + 1) / (WARM_UP + 1)
    return (1 + math.cos(math.pi * (epoch - WARM_UP) / max(1, total_epochs - WARM_UP))) / 2


class Trainer:
    def __init__(self, model, train_data, valid_data, optimizer, device, args):
        self.rank = dist.get_rank()
        if device.type == "cuda":  # one mean and variance over all ranks; a CPU has no such layer
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        self.model = model.to(device)
        # An average over about ten steps, which is often better than the weights of any one step.
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.train_data = train_data
        self.valid_data = valid_data
        self.optimizer = optimizer
        self.device = device
        self.args = args
        self.snapshot_path = args.snapshot_path
        self.epochs_run = 0
        self.best_loss, self.best_epoch = math.inf, -1
        self.job_id = plumbing.all_new_job_id()  # rank 0 makes it up, all ranks have it
        self._load_snapshot()  # before DDP, which puts `module.` before the name of each weight
        # Copies rank 0's weights to every rank. backward() will now average the gradients.
        self.model = DDP(self.model)

    def _run_step(self, batches):
        """Make one optimizer step. Return the sum of the losses, and the number of samples."""
        self.optimizer.zero_grad()
        total = torch.zeros((), device=self.device)
        samples = sum(len(labels) for _, labels in batches)  # equally many on all ranks
        for number, (images, labels) in enumerate(batches, 1):
            images = images.to(self.device, non_blocking=True)
            labels = labels.to(self.device, non_blocking=True)
            # Only the last backward() of a step has to average the gradients of the ranks.
            with nullcontext() if number == len(batches) else self.model.no_sync():
                # bfloat16 has the range of float32, so no GradScaler is needed.
                with torch.autocast(self.device.type, torch.bfloat16, self.device.type == "cuda"):
                    output = self.model(images)
                loss = F.cross_entropy(output.float(), labels, reduction="sum")
                (loss / samples).backward()  # the parts add up to the mean of the step
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)  # the averaged gradients
        self.optimizer.step()
        self.average.update_parameters(self.model.module)
        return total, samples

    def _run_epoch(self, epoch):
        self.model.train()  # some models arrive in eval mode, such as those of from_pretrained()
        sampler = self.train_data.sampler
        sampler.set_epoch(epoch)  # a new order in each epoch, the same on all ranks
        # Each rank and epoch has its own Dropout masks, and a repeated run has the same ones.
        torch.manual_seed(sampler.seed + epoch * dist.get_world_size() + self.rank)
        for group in self.optimizer.param_groups:
            group["lr"] = self.args.lr * rate_of(epoch, self.args.total_epochs)
        totals = torch.zeros(2, device=self.device)  # the sum of the losses, the number of samples
        batches = []
        for number, batch in enumerate(plumbing.progress_bar(self.train_data), 1):
            batches.append(batch)
            if len(batches) == self.args.accumulate or number == len(self.train_data):
                loss_of_step, samples = self._run_step(batches)
                totals[0] += loss_of_step
                totals[1] += samples
                batches = []
        dist.all_reduce(totals)  # each rank now has the sums over all ranks: the job's loss
        loss = float(totals[0] / totals[1])  # waits for the GPU, once per epoch
        plumbing.all_exit_if_not_finite(loss, self.model, self.train_data)  # NaN must not be saved
        plumbing.report(epoch, loss, self.train_data)

    @torch.no_grad()
    def _all_validate(self, epoch):
        """Evaluate the averaged weights on the validation data of all ranks, each sample once."""
        model = self.average.module  # not through DDP, whose forward pass may wait for other ranks
        for buffer in model.buffers():  # on a CPU each rank has a BatchNorm of its own
            dist.broadcast(buffer, src=0)  # rank 0's is saved
        model.eval()
        totals = torch.zeros(3, dtype=torch.float64, device=self.device)
        for images, labels in self.valid_data:
            labels = labels.to(self.device)
            output = model(images.to(self.device))
            totals[0] += F.cross_entropy(output, labels, reduction="sum")
            totals[1] += (output.argmax(dim=1) == labels).sum()
            totals[2] += len(labels)
        dist.all_reduce(totals)
        loss, accuracy = (totals[:2] / totals[2]).tolist()  # the same on all ranks
        plumbing.log_to_wandb({"epoch": epoch, "validation loss": loss, "accuracy": accuracy})
        if self.rank == 0:
            print(f"Epoch {epoch} | Validation loss: {loss:.6f} | Accuracy: {accuracy:.4f}")
        return loss

    def _keep_best(self, epoch, loss):
        if not loss < self.best_loss:  # NaN is not smaller either
            return
        self.best_loss, self.best_epoch = loss, epoch
        if self.rank == 0:
            # Named after the snapshot, whose lock keeps other jobs away from both files.
            path = f"{self.snapshot_path.removesuffix('.pt')}-best.pt"
            plumbing.save_atomically(self.average.module.state_dict(), path)

    def _save_snapshot(self):
        if self.rank != 0:
            return  # all ranks have the same weights: one file, one writer
        weights = self.model.module.state_dict()  # module: the model without DDP around it
        snapshot = {  # all that changes in training, and that a later step depends on
            "model": weights,
            "average": self.average.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "best_loss": self.best_loss,
            "best_epoch": self.best_epoch,
            "epochs_run": self.epochs_run,
            "seed": self.train_data.sampler.seed,
            "job_id": self.job_id,
            # A resume refuses a different optimizer, and prints how the sizes have changed.
            "optimizer_class": type(self.optimizer).__name__,
            "sizes": (self.train_data.batch_size, dist.get_world_size()),
        }
        plumbing.save_atomically(snapshot, self.snapshot_path)
        print(f"Epoch {self.epochs_run - 1} | Training snapshot saved at {self.snapshot_path}")

    def _load_snapshot(self):
        snapshot = plumbing.all_read_snapshot(self.snapshot_path, self.model, self.optimizer)
        plumbing.all_exit_if_disks_differ(snapshot)  # all ranks must resume from the same snapshot
        if snapshot is not None:  # there is a file
            self._resume(snapshot)

    def _resume(self, snapshot):
        plumbing.print_resume(snapshot, self.train_data)
        self.model.load_state_dict(snapshot["model"])  # copies to the device of the model
        self.average.load_state_dict(snapshot["average"])
        self.optimizer.load_state_dict(snapshot["optimizer"])
        self.best_loss = snapshot["best_loss"]
        self.best_epoch = snapshot["best_epoch"]
        self.epochs_run = snapshot["epochs_run"]
        self.train_data.sampler.seed = snapshot["seed"]
        self.job_id = snapshot["job_id"]

    def _is_done(self):
        """Return whether all epochs are made, or the last ones have brought nothing."""
        without_a_better = self.epochs_run - 1 - self.best_epoch
        return self.epochs_run >= self.args.total_epochs or without_a_better >= self.args.patience

    def train(self):
        size = self.train_data.batch_size * self.args.accumulate * dist.get_world_size()
        if self.rank == 0:
            print(f"Global batch size: {size}")
            if self._is_done():
                print("Nothing left to train: ask for more --total_epochs or a larger --patience")
        while not self._is_done():
            epoch = self.epochs_run
            self._run_epoch(epoch)
            self._keep_best(epoch, self._all_validate(epoch))
            self.epochs_run += 1
            if self.epochs_run % self.args.save_every == 0 or self._is_done():
                self._save_snapshot()
        if self.rank == 0:
            print(f"Best validation loss: {self.best_loss:.6f} in epoch {self.best_epoch}")


def make_images(count: int):
    """Return `count` images of noisy stripes, (count, 1, 16, 16), and their directions as labels.

    The generator and its seed are their own, so every process and restart makes the same ones.
    """
    generator = torch.Generator().manual_seed(16)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    angles = labels * math.pi / CLASSES
    place = torch.arange(16.0)
    across, down = (each(angles)[:, None, None] for each in (torch.cos, torch.sin))
    phases = 2 * math.pi * torch.rand(count, 1, 1, generator=generator)
    stripes = torch.sin(1.2 * (across * place + down * place[:, None]) + phases)
    return (stripes + 2.0 * torch.randn(stripes.shape, generator=generator))[:, None], labels


def build_model():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, CLASSES),
    )


def load_images(path: str):
    """Return the images (samples, 1, height, width) and labels (samples,) that torch.save wrote."""
    images = labels = problem = None
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        images, labels = saved["images"].float(), saved["labels"]
    except Exception as error:
        problem = f"data: cannot read {path} ({error}). Give a file with 'images' and 'labels'"
    plumbing.all_exit_if(problem)  # a rank that exited alone would keep the others waiting
    return images, labels


def load_train_objs(args):
    torch.manual_seed(args.seed)  # the same initial weights in every run
    images, labels = load_images(args.data) if args.data else make_images(2501)
    dataset = TensorDataset(images, labels)  # load your dataset
    split = torch.Generator().manual_seed(0)  # the same split on all ranks and in every run
    train_set, valid_set = random_split(dataset, [0.8, 0.2], split)
    model = build_model()  # load your model
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    return train_set, valid_set, model, optimizer


def prepare_dataloaders(train_set, valid_set, args, device):
    options = {
        "batch_size": args.batch_size,
        "pin_memory": device.type == "cuda",  # lets a copy to the GPU run beside the computation
        "num_workers": args.workers,  # processes that load samples, for each rank
        "persistent_workers": args.workers > 0,  # kept for the next epoch
        "timeout": 60 if args.workers else 0,  # seconds without a batch, then an error
    }
    sampler = DistributedSampler(train_set, seed=args.seed)  # shuffles, and takes this rank's share
    # A DistributedSampler would repeat samples until all ranks have equally many.
    share = Subset(valid_set, range(dist.get_rank(), len(valid_set), dist.get_world_size()))
    return DataLoader(train_set, sampler=sampler, **options), DataLoader(share, **options)


def parse_args():
    defaults = {"total_epochs": 30, "save_every": 5, "batch_size": 32, "seed": 0}
    defaults |= {"timeout": 600, "snapshot_path": "snapshot.pt"}
    mine = {"lr": 0.004, "accumulate": 2, "patience": 10, "workers": 2, "data": ""}
    about = {
        "lr": "largest learning rate",
        "accumulate": "batches in an optimizer step",
        "patience": "epochs without a lower validation loss, then stop",
        "workers": "processes that load samples, for each rank",
        "data": "file with images and labels, made here if not given",
    }
    return plumbing.parse_args(__doc__, defaults | mine, about)


@record  # puts the traceback of a failure into torchrun's report
def main(args):
    device = ddp_setup(args.timeout)
    plumbing.print_rank(device)  # the rank, host, process id and device of this process
    plumbing.all_exit_if_args_bad(args)  # all ranks exit together, so that none waits
    too_small = min(args.accumulate, args.patience) < 1
    plumbing.all_exit_if("accumulate, patience: give at least 1" if too_small else None)
    train_set, valid_set, model, optimizer = load_train_objs(args)
    plumbing.all_exit_if_unusable(train_set, model)
    train_data, valid_data = prepare_dataloaders(train_set, valid_set, args, device)
    trainer = Trainer(model, train_data, valid_data, optimizer, device, args)
    plumbing.start_wandb(args, trainer.job_id)  # rank 0 logs, if --wandb asks for it
    trainer.train()
    del trainer  # a DDP model that outlives the group it uses can hang the exit
    dist.destroy_process_group()  # closes the connections to the other ranks


if __name__ == "__main__":
    main(parse_args())
