"""Train on every GPU of one machine: one process per GPU. Without GPUs, two processes on the CPU.

Run:  python multigpu.py 50 10
"""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import plumbing
from datautils import MyTrainDataset, build_model


def ddp_setup(rank: int, world_size: int, init_method: str) -> torch.device:
    """Join the process group and return the device that is this process's own."""
    local_rank = rank  # one machine: the two are the same
    device = torch.device("cpu")
    if plumbing.count_gpus() > 0:
        device = torch.device(local_rank)  # torch.device(1) means cuda:1: local rank 1 takes GPU 1
        torch.accelerator.set_device_index(device)  # a plain "cuda" now means this GPU, not GPU 0
    backend = dist.get_default_backend_for_device(device)  # NCCL for CUDA and ROCm, gloo for a CPU
    dist.init_process_group(backend, init_method, rank=rank, world_size=world_size)
    return device


class Trainer:
    def __init__(self, model, train_data, optimizer, device, save_every):
        self.rank = dist.get_rank()
        self.model = model.to(device)
        self.train_data = train_data
        self.optimizer = optimizer
        self.device = device
        self.save_every = save_every
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

    def _save_checkpoint(self, epoch):
        if self.rank != 0:
            return  # all ranks have the same weights: one file, one writer
        weights = self.model.module.state_dict()  # module: the model without DDP around it
        plumbing.save_atomically(weights, "checkpoint.pt")
        print(f"Epoch {epoch} | Training checkpoint saved at checkpoint.pt")

    def train(self, total_epochs):
        if self.rank == 0:
            print(f"Global batch size: {self.train_data.batch_size * dist.get_world_size()}")
        for epoch in range(total_epochs):
            self._run_epoch(epoch)
            if (epoch + 1) % self.save_every == 0 or epoch + 1 == total_epochs:
                self._save_checkpoint(epoch)


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
    defaults |= {"nproc": plumbing.count_gpus() or 2}  # one process per GPU
    return plumbing.parse_args(__doc__, defaults)


def main(rank, world_size, init_method, args):  # mp.spawn gives each process its rank
    device = ddp_setup(rank, world_size, init_method)
    plumbing.print_rank(device)  # the rank, host, process id and device of this process
    dataset, model, optimizer = load_train_objs(args.seed)
    plumbing.all_exit_if_unusable(dataset, model)
    train_data = prepare_dataloader(dataset, args.batch_size, args.seed, device)
    trainer = Trainer(model, train_data, optimizer, device, args.save_every)
    plumbing.start_wandb(args)  # rank 0 logs, if --wandb asks for it
    trainer.train(args.total_epochs)
    del trainer  # a DDP model that outlives the group it uses can hang the exit
    dist.destroy_process_group()  # closes the connections to the other ranks


if __name__ == "__main__":  # spawned processes import this file: they must not spawn
    args = parse_args()
    with plumbing.local_job(args.nproc) as init_method:
        mp.spawn(main, args=(args.nproc, init_method, args), nprocs=args.nproc)
