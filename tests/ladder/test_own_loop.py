"""What a reader brings to the ladder: a loop body, samples and a model of their own.

With three processes, as a resume then has to be equal up to rounding; all in one launch.
"""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from launch import in_processes
from models import TwoHeads

import multigpu
import multigpu_torchrun
from datautils import MyTrainDataset

CPU = torch.device("cpu")


class Accumulating:
    """A loop body as many write it: a step every four batches, and zero_grad after it."""

    def _run_batch(self, source, targets):
        loss = F.cross_entropy(self.model(source), targets)
        (loss / 4).backward()
        self.batches = getattr(self, "batches", 0) + 1
        if self.batches % 4 == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.detach()


class Dicts(torch.utils.data.Dataset):
    """Samples that are no pair of tensors."""

    def __len__(self):
        return 48

    def __getitem__(self, index):
        return {"x": torch.full((20,), float(index)), "y": index % 4, "name": f"sample {index}"}


class OfDicts:
    def _run_batch(self, batch, _):
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(batch["x"]), batch["y"]).backward()
        self.optimizer.step()

    def _run_epoch(self, epoch):
        for batch in self.train_data:
            self._run_batch(batch, None)


def train(script, body, epochs, path=None, dataset=None, model=None):
    """Train with the script's own Trainer, but for its body, and return the weights."""
    _, built, _ = script.load_train_objs(0)
    model = model or built
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    train_data = script.prepare_dataloader(dataset or MyTrainDataset(384), 16, 0, CPU)
    own = type("Own", (body, script.Trainer) if body else (script.Trainer,), {})
    trainer = own(model, train_data, optimizer, CPU, epochs, *([path] if path else []))
    trainer.train(epochs)
    weights = {name: tensor.clone() for name, tensor in trainer.model.module.state_dict().items()}
    dist.barrier()  # it is saved
    return weights


def report_from_inside(rank, init_method, folder):
    torch.set_num_threads(1)
    multigpu.ddp_setup(rank, 3, init_method)
    one_path, two_path, *others = (f"{folder}/{name}.pt" for name in "abcd")
    report = {
        "multigpu": train(multigpu, Accumulating, 4),
        "unbroken": train(multigpu_torchrun, Accumulating, 4, one_path),
        "broken": train(multigpu_torchrun, Accumulating, 2, two_path),
        "resumed": train(multigpu_torchrun, Accumulating, 4, two_path),
        "dicts": train(multigpu_torchrun, OfDicts, 1, others[0], Dicts()),
        "two heads": train(multigpu_torchrun, None, 1, others[1], model=TwoHeads(20)),
    }
    torch.save(report, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The reports of three ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    in_processes(3, report_from_inside, folder)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(3)]


def test_gradients_may_be_accumulated_before_zero_grad(ranks):
    """The first step uses no gradient but its own, also after a resume."""
    for rank in ranks:
        torch.testing.assert_close(rank["unbroken"], rank["multigpu"], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(rank["unbroken"], rank["resumed"], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(rank["resumed"], ranks[0]["resumed"], rtol=0, atol=0)
        assert not torch.allclose(rank["broken"]["0.weight"], rank["resumed"]["0.weight"], 1e-2)


@pytest.mark.parametrize("what", ["dicts", "two heads"])
def test_what_a_reader_brings_is_trained(ranks, what):
    """Samples that are dicts, and a head that works in training only."""
    for rank in ranks:
        assert all(weight.isfinite().all() for weight in rank[what].values())
        torch.testing.assert_close(rank[what], ranks[0][what], rtol=0, atol=0)
