"""Train on every GPU of one machine under torchrun, and resume from a snapshot after a failure.

Run:  torchrun --standalone --nproc_per_node=gpu multigpu_torchrun.py 50 10
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import plumbing
from datautils import MyTrainDataset, build_model


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


class Trainer:
    def __init__(self, model, train_data, optimizer, device, save_every, snapshot_path):
        self.rank = dist.get_rank()
        self.model = model.to(device)
        self.train_data = train_data
        self.optimizer = optimizer
        self.device = device
        self.save_every = save_every
        self.snapshot_path = snapshot_path
        self.epochs_run = 0
        self.job_id = plumbing.all_new_job_id()  # rank 0 makes it up, all ranks have it
        self._load_snapshot()  # before DDP, which puts `module.` before the name of each weight
        # Copies rank 0's weights to every rank. backward() will now average the gradients.
        self.model = DDP(self.model)

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        output = self.model(source)
        loss = F.cross_entropy(output, targets)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def _run_epoch(self, epoch):
        self.model.train()  # some models arrive in eval mode, such as those of from_pretrained()
        sampler = self.train_data.sampler
        sampler.set_epoch(epoch)  # a new order in each epoch, the same on all ranks
        # Each rank and epoch has its own Dropout masks, and a repeated run has the same ones.
        torch.manual_seed(sampler.seed + epoch * dist.get_world_size() + self.rank)
        totals = torch.zeros(2, device=self.device)  # the sum of the losses, the number of samples
        for source, targets in plumbing.progress_bar(self.train_data):
            source = source.to(self.device, non_blocking=True)
            targets = targets.to(self.device, non_blocking=True)
            loss = self._run_batch(source, targets)
            totals[0] += loss.float() * len(source)  # float(): float16 could overflow
            totals[1] += len(source)
        dist.all_reduce(totals)  # each rank now has the sums over all ranks: the job's loss
        loss = float(totals[0] / totals[1])  # waits for the GPU, once per epoch
        plumbing.all_exit_if_not_finite(loss, self.model, self.train_data)  # NaN must not be saved
        plumbing.report(epoch, loss, self.train_data)

    def _save_snapshot(self, epoch):
        if self.rank != 0:
            return  # all ranks have the same weights: one file, one writer
        weights = self.model.module.state_dict()  # module: the model without DDP around it
        snapshot = {  # the state of a scheduler or a GradScaler belongs here too
            "model": weights,
            "optimizer": self.optimizer.state_dict(),
            "epochs_run": epoch + 1,
            "seed": self.train_data.sampler.seed,
            "job_id": self.job_id,
            # A resume refuses a different optimizer, and prints how the sizes have changed.
            "optimizer_class": type(self.optimizer).__name__,
            "sizes": (self.train_data.batch_size, dist.get_world_size()),
        }
        plumbing.save_atomically(snapshot, self.snapshot_path)
        print(f"Epoch {epoch} | Training snapshot saved at {self.snapshot_path}")

    def _load_snapshot(self):
        snapshot = plumbing.all_read_snapshot(self.snapshot_path, self.model, self.optimizer)
        plumbing.all_exit_if_disks_differ(snapshot)  # all ranks must resume from the same snapshot
        if snapshot is not None:  # there is a file
            self._resume(snapshot)

    def _resume(self, snapshot):
        plumbing.print_resume(snapshot, self.train_data)
        self.model.load_state_dict(snapshot["model"])  # copies to the device of the model
        self.optimizer.load_state_dict(snapshot["optimizer"])
        self.epochs_run = snapshot["epochs_run"]
        self.train_data.sampler.seed = snapshot["seed"]
        self.job_id = snapshot["job_id"]

    def train(self, total_epochs):
        if self.rank == 0:
            print(f"Global batch size: {self.train_data.batch_size * dist.get_world_size()}")
            if self.epochs_run >= total_epochs:
                print(f"Nothing left to train. To begin anew, delete {self.snapshot_path}")
        for epoch in range(self.epochs_run, total_epochs):
            self._run_epoch(epoch)
            if (epoch + 1) % self.save_every == 0 or epoch + 1 == total_epochs:
                self._save_snapshot(epoch)


def load_train_objs(seed):
    torch.manual_seed(seed)  # the same initial weights in every run
    train_set = MyTrainDataset(2048)  # load your dataset
    model = build_model()  # load your model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return train_set, model, optimizer


def prepare_dataloader(dataset, batch_size, seed, device):
    return DataLoader(
        dataset,
        batch_size=batch_size,
        pin_memory=device.type == "cuda",  # lets a copy to the GPU run beside the computation
        sampler=DistributedSampler(dataset, seed=seed),  # shuffles, and takes this rank's share
    )


def parse_args():
    defaults = {"total_epochs": 50, "save_every": 10, "batch_size": 32, "seed": 0}
    defaults |= {"timeout": 600, "snapshot_path": "snapshot.pt"}
    return plumbing.parse_args(__doc__, defaults)


@record  # puts the traceback of a failure into torchrun's report
def main(args):
    device = ddp_setup(args.timeout)
    plumbing.print_rank(device)  # the rank, host, process id and device of this process
    plumbing.all_exit_if_args_bad(args)  # all ranks exit together, so that none waits
    dataset, model, optimizer = load_train_objs(args.seed)
    plumbing.all_exit_if_unusable(dataset, model)
    train_data = prepare_dataloader(dataset, args.batch_size, args.seed, device)
    trainer = Trainer(model, train_data, optimizer, device, args.save_every, args.snapshot_path)
    plumbing.start_wandb(args, trainer.job_id)  # rank 0 logs, if --wandb asks for it
    trainer.train(args.total_epochs)
    del trainer  # a DDP model that outlives the group it uses can hang the exit
    dist.destroy_process_group()  # closes the connections to the other ranks


if __name__ == "__main__":
    main(parse_args())
