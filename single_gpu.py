"""Train on one GPU, or on the CPU of a machine that has none. Nothing is distributed yet.

Run:  python single_gpu.py 50 10
"""

import plumbing  # first: it notes the parent of this process, to end when the parent does

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from datautils import MyTrainDataset, build_model, collate


class Trainer:
    def __init__(self, model, train_data, optimizer, device, save_every):
        self.rank = 0  # the number of this process; it is the only one
        self.model = model.to(device)
        self.train_data = train_data
        self.optimizer = optimizer
        self.device = device
        self.save_every = save_every

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        output = self.model(source)
        loss = F.cross_entropy(output, targets)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def _run_epoch(self, epoch):
        loss_sum, samples = 0.0, 0
        for source, targets in plumbing.bar(self.train_data):
            source = source.to(self.device, non_blocking=self.train_data.pin_memory)
            targets = targets.to(self.device, non_blocking=self.train_data.pin_memory)
            loss = self._run_batch(source, targets).float()  # a sum in bfloat16 would stop growing
            loss_sum += loss * len(source)
            samples += len(source)
        totals = torch.tensor([loss_sum, samples], device=self.device)  # waits for the GPU
        loss = float(totals[0] / totals[1])
        plumbing.all_exit_if_not_finite(loss, self.model, self.train_data)  # NaN is never saved
        plumbing.report(epoch, loss, self.train_data, self.device)

    def _save_checkpoint(self, epoch):
        weights = self.model.state_dict()
        plumbing.save_atomically(weights, "checkpoint.pt")
        print(f"Epoch {epoch} | Training checkpoint saved at checkpoint.pt")

    def train(self, total_epochs):
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
    plumbing.all_exit_if_empty(dataset)
    return DataLoader(
        dataset,
        batch_size=batch_size,
        collate_fn=collate,  # as usual, but lets whole batches of MyTrainDataset pass
        pin_memory=device.type not in ("cpu", "mps"),  # makes non_blocking copies possible
        shuffle=True,
        generator=torch.Generator().manual_seed(seed),  # the same order in every run
    )


def parse_args():
    defaults = {"total_epochs": 50, "save_every": 10, "batch_size": 32, "seed": 0}
    return plumbing.parse_args(__doc__, defaults)


def main(args):
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    plumbing.print_rank(device)
    dataset, model, optimizer = load_train_objs(args.seed)
    train_data = prepare_dataloader(dataset, args.batch_size, args.seed, device)
    trainer = Trainer(model, train_data, optimizer, device, args.save_every)
    plumbing.start_wandb(args)
    trainer.train(args.total_epochs)


if __name__ == "__main__":
    main(parse_args())
