"""A resume needs no more memory than training: at most its peak and the largest tensor."""

import os
import threading
import time
from pathlib import Path

import pytest
import torch
from launch import in_processes
from torch import nn

import multinode

MIB = 2**20
LAYERS, WIDTH = 6, 2048  # the largest tensor has 16 MiB, the weights 96, with Adam's 288


class Peak:
    """The most anonymous memory, in MiB, that this process has while it is entered."""

    def __enter__(self):
        self.most, self.ended = 0, False
        self.thread = threading.Thread(target=self._look)
        self.thread.start()
        return self

    def _look(self):
        while not self.ended:
            with open("/proc/self/status") as status:
                (line,) = (line for line in status if line.startswith("RssAnon"))
            self.most = max(self.most, int(line.split()[1]) / 1024)
            time.sleep(0.001)

    def __exit__(self, *error):
        self.ended = True
        self.thread.join()


def load_train_objs(seed):
    torch.manual_seed(seed)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    model = nn.Sequential(nn.Linear(20, WIDTH), *layers, nn.Linear(WIDTH, 4))
    return multinode.MyTrainDataset(64), model, torch.optim.AdamW(model.parameters(), lr=1e-5)


def train(folder, epochs):
    """Train, and return the peaks of the start, up to the Trainer, and of training."""
    dataset, model, optimizer = load_train_objs(0)
    train_data = multinode.prepare_dataloader(dataset, 32, 0, torch.device("cpu"))
    path = str(folder / "snapshot.pt")
    with Peak() as start:
        given = (model, train_data, optimizer, torch.device("cpu"), 1, path)
        trainer = multinode.Trainer(*given)
    with Peak() as training:
        trainer.train(epochs)
    return start.most, training.most


def measure(rank, init_method, folder, epochs):
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = "0"
    torch.distributed.init_process_group("gloo", init_method, rank=rank, world_size=2)
    (folder / f"rank{rank}").mkdir(exist_ok=True)
    peaks = train(folder / f"rank{rank}", epochs)
    torch.save(peaks, folder / f"peaks{rank}-{epochs}.pt")
    maps = Path("/proc/self/maps").read_text()
    (folder / f"mapped{rank}-{epochs}").write_text(maps)


@pytest.mark.exclusive
def test_a_resume_needs_no_more_memory_than_training(tmp_path):
    """Of the rank that reads the snapshot, and of the one to which it is sent."""
    for epochs in 1, 2:
        in_processes(2, measure, tmp_path, epochs)
    assert (tmp_path / "rank0/snapshot.pt").stat().st_size > 280 * MIB
    for rank in 0, 1:
        _, training = torch.load(tmp_path / f"peaks{rank}-1.pt")
        start, resumed = torch.load(tmp_path / f"peaks{rank}-2.pt")
        assert max(start, resumed) < training + 17, (rank, training, start, resumed)
        kept = (tmp_path / f"mapped{rank}-2").read_text()
        assert "snapshot.pt" not in kept, "its disk could not be freed"
