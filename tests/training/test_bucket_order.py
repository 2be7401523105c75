"""The backward pass that no data is in: a resume ends with the same bits, whatever is trained.

With three processes, since a sum of three numbers depends on their order; all in one launch.
"""

import copy
import io

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from launch import in_processes
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import multigpu
import multigpu_torchrun
import plumbing
from datautils import MyTrainDataset

CPU = torch.device("cpu")


class Tied(nn.Module):
    """A language model in small: one matrix embeds and predicts."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 64)
        self.encoder = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        self.head = nn.Linear(64, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.encoder(self.embedding(tokens)))


class OtherOrder(nn.Module):
    """What it defines first it calls last."""

    def __init__(self):
        super().__init__()
        self.last, self.first = nn.Linear(500, 10), nn.Linear(64, 500)

    def forward(self, x):
        return self.last(self.first(x).relu())


class TwoHeads(nn.Module):
    """As GoogLeNet: a second head, and it works in training only."""

    def __init__(self, features=64):
        super().__init__()
        self.body, self.head, self.second = (
            nn.Linear(*sizes) for sizes in ((features, 500), (500, 4), (500, 4))
        )

    def forward(self, x):
        x = self.body(x).relu()
        return self.head(x) + 0.3 * self.second(x) if self.training else self.head(x)


def convolution():
    layers = [nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.3), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(16 * 36, 10))


def several_buckets():
    """27 MB of weights, where a bucket of DDP has 25 MB."""
    layers = [nn.Linear(64, 2600), nn.ReLU(), nn.Linear(2600, 2600), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(2600, 10))


def two_layers():
    return nn.Sequential(nn.Linear(64, 500), nn.ReLU(), nn.Linear(500, 10))


def frozen():
    model = two_layers()
    model[0].weight.requires_grad = False
    return model


MODELS = {
    "convolution": (convolution, lambda: torch.randn(4, 3, 8, 8)),
    "several buckets": (several_buckets, lambda: torch.randn(4, 64)),
    "tied weights": (Tied, lambda: torch.randint(0, 50, (4, 7))),
    "bfloat16": (lambda: two_layers().bfloat16(), lambda: torch.randn(4, 64).bfloat16()),
    "frozen weights": (frozen, lambda: torch.randn(4, 64)),
    "another order": (OtherOrder, lambda: torch.randn(4, 64)),
    "two heads": (TwoHeads, lambda: torch.randn(4, 64)),
}


BY_DEFAULT = ["convolution", "several buckets"]


def state_of(ddp):
    """All that a pass could leave behind, as bytes."""
    file = io.BytesIO()
    gradients = [weight.grad for weight in ddp.parameters()]
    modes = [(name, module.training) for name, module in ddp.named_modules()]
    torch.save((ddp.state_dict(), gradients, modes, torch.get_rng_state()), file)
    return file.getvalue()


def steps(model, optimizer_state, batch_of, numbers, fixed):
    """Train these steps; return the state of the optimizer, and whether the pass left no trace."""
    ddp = DDP(model)
    before = state_of(ddp)
    if fixed:
        plumbing.all_fix_bucket_order(ddp)
    no_trace = state_of(ddp) == before
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if optimizer_state:
        optimizer.load_state_dict(optimizer_state)
    for number in numbers:
        torch.manual_seed(100 + number * 3 + dist.get_rank())
        optimizer.zero_grad()
        ddp(batch_of()).float().square().mean().backward()
        optimizer.step()
    return copy.deepcopy(optimizer.state_dict()), no_trace


def resumed_like_unbroken(name, fixed):
    """Six steps, and three and three: whether the weights are equal, and no trace was left."""
    build, batch_of = MODELS[name]
    torch.manual_seed(0)
    unbroken = build()
    broken = copy.deepcopy(unbroken)
    _, no_trace = steps(unbroken, None, batch_of, range(6), fixed)
    state, _ = steps(broken, None, batch_of, range(3), fixed)
    resumed = copy.deepcopy(broken)
    steps(resumed, state, batch_of, range(3, 6), fixed)
    pairs = zip(unbroken.state_dict().values(), resumed.state_dict().values(), strict=True)
    return all(torch.equal(one, other) for one, other in pairs), no_trace


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
        "fixed": {name: resumed_like_unbroken(name, fixed=True) for name in MODELS},
        "not fixed": {name: resumed_like_unbroken(name, fixed=False) for name in BY_DEFAULT},
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


@pytest.mark.parametrize("name", MODELS)
def test_a_resume_ends_with_the_same_bits(ranks, name):
    """Three steps and three are six, to the last bit, and the pass leaves nothing behind."""
    assert [rank["fixed"][name] for rank in ranks] == [(True, True)] * 3


@pytest.mark.parametrize("name", BY_DEFAULT)
def test_without_that_pass_the_bits_differ(ranks, name):
    """Or it would be for nothing."""
    assert [rank["not fixed"][name] for rank in ranks] == [(False, True)] * 3


def test_gradients_may_be_accumulated_before_zero_grad(ranks):
    """The first step uses no gradient but its own, also after a resume."""
    for rank in ranks:
        torch.testing.assert_close(rank["unbroken"], rank["multigpu"], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(rank["unbroken"], rank["resumed"], rtol=0, atol=0)
        assert not torch.equal(rank["broken"]["0.weight"], rank["resumed"]["0.weight"])


@pytest.mark.parametrize("what", ["dicts", "two heads"])
def test_what_a_reader_brings_is_trained(ranks, what):
    """Samples that are dicts, and a head that works in training only."""
    for rank in ranks:
        assert all(weight.isfinite().all() for weight in rank[what].values())
        torch.testing.assert_close(rank[what], ranks[0][what], rtol=0, atol=0)
