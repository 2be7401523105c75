"""Train on one GPU, or on the CPU of a machine that has none. Nothing is distributed yet.

Run:  python single_gpu.py 50 10
"""

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import plumbing
from datautils import MyTrainDataset, build_model


class Trainer:
    def __init__(self, model, train_data, optimizer, device, save_every):
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
        self.model.train()  # some models arrive in eval mode, such as those of from_pretrained()
        totals = torch.zeros(2, device=self.device)  # the sum of the losses, the number of samples
        for source, targets in plumbing.progress_bar(self.train_data):
            source = source.to(self.device, non_blocking=True)
            targets = targets.to(self.device, non_blocking=True)
            loss = self._run_batch(source, targets)
            totals[0] += loss.float() * len(source)  # float(): float16 could overflow
            totals[1] += len(source)
        loss = float(totals[0] / totals[1])  # waits for the GPU, once per epoch
        plumbing.all_exit_if_not_finite(loss, self.model, self.train_data)  # NaN must not be saved
        plumbing.report(epoch, loss, self.train_data)

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
    return DataLoader(
        dataset,
        batch_size=batch_size,
        pin_memory=device.type == "cuda",  # lets a copy to the GPU run beside the computation
        shuffle=True,
        generator=torch.Generator().manual_seed(seed),  # the order depends on the seed alone
    )


def parse_args():
    defaults = {"total_epochs": 50, "save_every": 10, "batch_size": 32, "seed": 0}
    return plumbing.parse_args(__doc__, defaults)


def main(args):
    # The GPU, if torch has been built for one and there is one.
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    plumbing.print_rank(device)  # the rank, host, process id and device of this process
    dataset, model, optimizer = load_train_objs(args.seed)
    plumbing.all_exit_if_unusable(dataset, model)
    train_data = prepare_dataloader(dataset, args.batch_size, args.seed, device)
    trainer = Trainer(model, train_data, optimizer, device, args.save_every)
    plumbing.start_wandb(args)  # rank 0 logs, if --wandb asks for it
    trainer.train(args.total_epochs)


if __name__ == "__main__":
    main(parse_args())
