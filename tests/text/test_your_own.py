"""Each recipe of docs/your-own.md is applied to the script that it changes, run, and measured.

The oracle is one process, plain PyTorch, or a run that was not resumed. What the page says goes
wrong without a recipe is provoked as well.
"""

import random
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from launch import (
    MULTINODE,
    ROOT,
    TORCHRUN_SCRIPT,
    assert_same,
    edited,
    finish,
    quickly,
    start,
    torchrun,
)
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    WeightedRandomSampler,
    default_collate,
    random_split,
)
from torch.utils.data.distributed import DistributedSampler

import multigpu_torchrun
from datautils import MyTrainDataset, build_model

PAGE = (ROOT / "docs" / "your-own.md").read_text()


RECIPES = {
    heading: re.findall(r"^```(\w+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    for heading, text in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
}


DIFFS = [
    pytest.param(heading, number, id=f"{heading} {number}")
    for heading, blocks in RECIPES.items()
    for number, (language, _) in enumerate(blocks)
    if language == "diff"
]


ON_TOP_OF = {"The best model": "A validation loss"}


DATA, MODEL = "MyTrainDataset(2048)", "build_model()"


def applied(diff, source):
    """`source` with the change: what a hunk keeps and removes has to stand there in one place."""
    lines, position = source.splitlines(), 0
    for hunk in re.split(r"^  ⋮\n", diff, flags=re.MULTILINE):
        hunk = [line or " " for line in hunk.splitlines()]
        assert {line[0] for line in hunk} <= set(" +-"), hunk
        old, new = ([line[1:] for line in hunk if line[0] in signs] for signs in (" -", " +"))
        places = [at for at in range(len(lines)) if lines[at : at + len(old)] == old]
        assert old and old != new and len(places) == 1, f"found at {places}: {old}"
        assert places[0] >= position, f"comes too late: {old}"
        lines[places[0] : places[0] + len(old)] = new
        position = places[0] + len(new)
    return "\n".join(lines) + "\n"


def made(source, *changes, name="script.py"):
    """A file with that source, and what else a test changes in it; the toy has fewer samples."""
    Path(name).write_text(source)
    script = edited(name, name, *changes)
    Path(name).write_text(Path(name).read_text().replace(DATA, "MyTrainDataset(512)"))
    return script


def recipe(heading, *changes, number=0, name="script.py", base=TORCHRUN_SCRIPT):
    """The script with a recipe applied, and these changes."""
    source = Path(base).read_text()
    if heading in ON_TOP_OF:
        source = applied(RECIPES[ON_TOP_OF[heading]][0][1], source)
    return made(applied(RECIPES[heading][number][1], source), *changes, name=name)


def unchanged(*changes, name="script.py"):
    """The script without a recipe, and these changes."""
    return made(Path(TORCHRUN_SCRIPT).read_text(), *changes, name=name)


def ranks(script, *args, nproc=2, status=0, **options):
    """Run the script on `nproc` ranks, expect that exit status and return what they printed."""
    statuses, output = quickly(script, *args, nproc=nproc, **({"seconds": 120} | options))
    assert statuses == {status} or (status and 0 not in statuses), f"{statuses}\n{output}"
    return output


def weights(path):
    saved = torch.load(path, weights_only=True)
    return saved.get("model", saved)


# The page


@pytest.mark.parametrize("script", [TORCHRUN_SCRIPT, MULTINODE], ids=["torchrun", "multinode"])
@pytest.mark.parametrize("heading, number", DIFFS)
def test_each_difference_applies(heading, number, script):
    recipe(heading, number=number, base=script)
    source = Path("script.py").read_text()
    compile(source, "script.py", "exec")
    assert max(map(len, source.splitlines())) <= 100


def test_a_difference_that_does_not_fit_is_noticed():
    source = "a\nb\na\n"
    assert applied(" b\n-a\n+c\n", source) == "a\nb\nc\n"
    for diff in ("-a\n", " a\n-c\n", "+c\n", " b\n", " b\n+c\n  ⋮\n-a\n b\n"):
        with pytest.raises(AssertionError):
            applied(diff, source)


def test_the_page_lists_its_recipes():
    listed = re.findall(r"^- \[(.*)\]\(#", PAGE, re.MULTILINE)
    assert listed == list(RECIPES)
    for heading, blocks in RECIPES.items():
        assert blocks, heading
        assert (
            "**What goes wrong without it.**" in PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
        )


# Your dataset


def test_a_dataset_of_files(tmp_path):
    """It trains as the toy does, under torchrun, in a folder that has what the page says."""
    shutil.copy(ROOT / "datautils.py", tmp_path)
    shutil.copytree(ROOT / "plumbing", tmp_path / "plumbing")
    Path("points").mkdir()
    features, labels = MyTrainDataset(256)[:]
    for number, (point, label) in enumerate(zip(features, labels, strict=True)):
        torch.save((point.clone(), int(label)), f"points/{number:03}.pt")
    script = recipe("Your dataset")
    process = start(torchrun(script, 1, 1))
    other = unchanged((DATA, "MyTrainDataset(256)"), name="toy.py")
    ranks(other, 1, 1, "--snapshot_path", "toy.pt")
    status, output = finish(process, 120)
    assert status == 0, output
    assert_same("snapshot.pt", "toy.pt")


def test_ranks_that_list_files_differently_train_on_other_samples():
    order = list(range(64))
    other = random.Random(1).sample(order, len(order))
    shares = [DistributedSampler(order, num_replicas=2, rank=rank) for rank in (0, 1)]
    assert sorted([order[i] for i in shares[0]] + [order[i] for i in shares[1]]) == order
    seen = [order[i] for i in shares[0]] + [other[i] for i in shares[1]]
    assert len(set(seen)) < len(seen) == len(order)


def test_samples_of_different_sizes_need_a_collate_of_ones_own():
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        default_collate([torch.zeros(2), torch.zeros(3)])


class Samples(Dataset):
    """`size` times the same sample, whatever it is."""

    def __init__(self, size, sample):
        self.size, self.sample = size, sample

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return self.sample


@pytest.mark.parametrize(
    "sample, error, message",
    [
        ((1, 2, 3), ValueError, r"too many values to unpack \(expected 2"),
        ({"a": 1, "b": 2}, AttributeError, "'str' object has no attribute 'to'"),
    ],
)
def test_the_trainer_as_it_is_wants_pairs(alone, sample, error, message):
    data = Samples(8, sample)
    sampler = DistributedSampler(data, num_replicas=1, rank=0)
    loader, model = DataLoader(data, sampler=sampler), torch.nn.Identity()
    trainer = SimpleNamespace(train_data=loader, rank=0, device=torch.device("cpu"), model=model)
    with pytest.raises(error, match=message):
        multigpu_torchrun.Trainer._run_epoch(trainer, 0)


# Batches of a sampler


def test_what_the_trainer_asks_a_loader_whose_batches_a_sampler_makes():
    loader = DataLoader(Samples(8, 0), batch_sampler=BatchSampler(range(8), 4, drop_last=False))
    errors = [
        (lambda: loader.batch_size * 2, TypeError),
        (lambda: loader.sampler.set_epoch(0), AttributeError),
    ]
    for call, error in errors:
        with pytest.raises(error) as raised:
            call()
        assert f"`{raised.value}`" in PAGE


def test_weights_and_one_seed_make_all_ranks_draw_the_same():
    def drawn(seed):
        generator = torch.Generator().manual_seed(seed)
        return list(WeightedRandomSampler(torch.ones(64), 32, generator=generator))

    assert drawn(0) == drawn(0) != drawn(1)
    assert not hasattr(WeightedRandomSampler, "set_epoch")


# A validation loss


class Normed(torch.nn.Sequential):
    def __init__(self):
        layers = torch.nn.Linear(20, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU()
        super().__init__(*layers, torch.nn.Linear(64, 4))


def held_out():
    """The samples that the recipe validates on."""
    generator = torch.Generator().manual_seed(0)
    return random_split(MyTrainDataset(2349), (2048, 301), generator)[1]


def test_padded_samples_change_a_loss():
    """Which is what the recipe is for: the mean over shares as DistributedSampler makes them."""
    torch.manual_seed(0)
    model, valid_set, means = build_model(), held_out(), []
    for world_size in (1, 2, 3):
        shares = [DistributedSampler(valid_set, world_size, rank) for rank in range(world_size)]
        features, targets = valid_set[[index for share in shares for index in share]]
        means.append(round(F.cross_entropy(model(features), targets).item(), 6))
    assert len(set(means)) == 3


def test_more_workers_than_cores_are_told():
    with pytest.warns(UserWarning, match="Our suggested max number of worker"):
        DataLoader(Samples(8, 0), num_workers=1000)


# Augmentation


class Draws(torch.utils.data.Dataset):
    """Adds a random number of each of these kinds to the features."""

    def __init__(self, kinds):
        self.features, self.labels = MyTrainDataset(256)[:]
        self.kinds = kinds

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        own = np.random.default_rng(int(torch.randint(2**62, ())))
        draws = {"torch": lambda: float(torch.rand(())), "numpy": np.random.rand}
        draws |= {"random": random.random, "own": own.random}
        return self.features[index] + sum(draws[kind]() for kind in self.kinds), self.labels[index]


class Keeps(Draws):
    """Has a generator of its own, which each worker gets a copy of."""

    def __getitem__(self, index):
        return self.own.random()


def test_workers_draw_by_their_number_and_a_generator_that_is_kept_does_not_help():
    def drawn(data, workers):
        torch.manual_seed(0)
        options = {"batch_size": 64, "num_workers": workers, "multiprocessing_context": "fork"}
        return [batch[0] for batch in DataLoader(data, **options)]

    draws, keeps = Draws(["torch"]), Keeps([])
    assert not torch.equal(drawn(draws, 2)[1], drawn(draws, 1)[1])
    keeps.own = np.random.default_rng(0)
    batches = drawn(keeps, 2)
    assert batches[0] == batches[1] != batches[2] and batches == drawn(keeps, 2)


def test_a_last_batch_of_one_sample():
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        Normed()(torch.zeros(1, 20))


def test_small_gradients_vanish_in_float16_only():
    weight = torch.ones(1, requires_grad=True)
    for dtype, gradient in ((torch.float16, 0), (torch.bfloat16, 1e-9)):
        (weight.to(dtype) * 1e-9).sum().backward()
        assert weight.grad.item() == pytest.approx(gradient, rel=0.01)
        weight.grad = None


def test_bfloat16_needs_its_own_inputs_and_rounds_small_steps_away():
    with pytest.raises(RuntimeError, match="mat1 and mat2 must have the same dtype"):
        build_model().bfloat16()(torch.zeros(1, 20))
    weights = torch.linspace(1, 2, 100, dtype=torch.bfloat16)
    assert torch.equal(weights + weights / 513, weights)
    total = torch.zeros((), dtype=torch.bfloat16)
    for _ in range(1000):
        total += 1
    assert total == 256


def batches(output):
    """What was seen, as {epoch: {rank: batches}}."""
    found = {}
    for rank, epoch, numbers in re.findall(r"^Seen (\d) (\d) (.*)$", output, re.MULTILINE):
        numbers = list(map(int, numbers.split()))
        found.setdefault(int(epoch), {}).setdefault(int(rank), []).append(numbers)
    return found
