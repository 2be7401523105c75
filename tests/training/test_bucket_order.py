"""The backward pass that no data is in: a resume ends with the same bits, whatever is trained.

With three processes, since a sum of three numbers depends on their order; all in one launch.
"""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from launch import in_processes
from models import TwoHeads
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from training.buckets import all_fix_bucket_order


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
    "two heads": (lambda: TwoHeads(64), lambda: torch.randn(4, 64)),
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
        all_fix_bucket_order(ddp)
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


def report_from_inside(rank, init_method, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method, rank=rank, world_size=3)
    report = {
        "fixed": {name: resumed_like_unbroken(name, fixed=True) for name in MODELS},
        "not fixed": {name: resumed_like_unbroken(name, fixed=False) for name in BY_DEFAULT},
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
