"""Each difference on docs/your-own.md is applied to classifier.py, run, and measured.

The oracle is the script without it, one process, plain PyTorch, or a run that was not resumed. What
the page says goes wrong otherwise is provoked as well.
"""

import random
import re
from pathlib import Path

import lesson
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from launch import CLASSIFIER, ROOT, edited, quickly
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    random_split,
)
from torch.utils.data.distributed import DistributedSampler

from classifier import build_model, make_images

PAGE = (ROOT / "docs" / "your-own.md").read_text()
WRITTEN = re.sub(r"<!-- \[\[\[cog.*?\[\[\[end\]\]\] -->\n", "", PAGE, flags=re.DOTALL)


RECIPES = {
    heading: re.findall(r"^```(\w+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    for heading, text in re.findall(
        r"^## (.*?)\n(.*?)(?=^## |\Z)", WRITTEN, re.DOTALL | re.MULTILINE
    )
}


DIFFS = [
    pytest.param(heading, number, id=f"{heading} {number}")
    for heading, blocks in RECIPES.items()
    for number, (language, _) in enumerate(blocks)
    if language == "diff"
]


DATA, MODEL = "make_images(2501)", "build_model()  # load your model"
PAIRS = "TensorDataset(images, labels)"
SPLIT = "[0.8, 0.2]"
SMALL = ("--batch_size", 20, "--workers", 0)  # of 240 images, in 3 steps of two processes


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
    """A file with that source, and what else a test changes in it; there are fewer images."""
    Path(name).write_text(source)
    script = edited(name, name, *changes)
    Path(name).write_text(Path(name).read_text().replace(DATA, "make_images(300)"))
    return script


def recipe(heading, *changes, number=0, name="script.py"):
    """The script with a recipe applied, and these changes."""
    source = applied(RECIPES[heading][number][1], Path(CLASSIFIER).read_text())
    return made(source, *changes, name=name)


def unchanged(*changes, name="script.py"):
    """The script without a recipe, and these changes."""
    return made(Path(CLASSIFIER).read_text(), *changes, name=name)


def ranks(script, *args, nproc=2, status=0, **options):
    """Run the script on `nproc` ranks, expect that exit status and return what they printed."""
    epochs, options = [*args[:2], *SMALL, *args[2:]], {"seconds": 120} | options
    statuses, output = quickly(script, *epochs, nproc=nproc, **options)
    assert statuses == {status} or (status and 0 not in statuses), f"{statuses}\n{output}"
    return output


def weights(path):
    saved = torch.load(path, weights_only=True)
    return saved.get("model", saved)


# The page


@pytest.mark.parametrize("heading, number", DIFFS)
def test_each_difference_applies(heading, number):
    recipe(heading, number=number)
    source = Path("script.py").read_text()
    compile(source, "script.py", "exec")
    assert max(map(len, source.splitlines())) <= 100


def test_the_lines_for_machines_with_disks_of_their_own_apply(capsys):
    lesson.show("multigpu_torchrun.py", "multinode.py", "Trainer._load_snapshot")
    diff = capsys.readouterr().out.removeprefix("```diff\n").removesuffix("```\n")
    compile(applied(diff, Path(CLASSIFIER).read_text()), "script.py", "exec")


def test_the_page_shows_all_of_the_example():
    calls = re.findall(r"cog (?:show|code)\((.*?)\) \]\]\]", PAGE)
    shown = set(re.findall(r"[\w.]+", " ".join(call for call in calls if "classifier.py" in call)))
    own = set(lesson.changed("multigpu_torchrun.py", "classifier.py"))
    assert own - shown == {"imports", "make_images", "build_model"}  # the data and model are toys


def test_a_difference_that_does_not_fit_is_noticed():
    source = "a\nb\na\n"
    assert applied(" b\n-a\n+c\n", source) == "a\nb\nc\n"
    for diff in ("-a\n", " a\n-c\n", "+c\n", " b\n", " b\n+c\n  ⋮\n-a\n b\n"):
        with pytest.raises(AssertionError):
            applied(diff, source)


def test_the_page_lists_its_sections():
    contents = WRITTEN.split("\n## ")[0]
    listed = re.findall(r"\[([^]]*)\]\((#[^)]*)\)", contents)
    assert [name for name, _ in listed] == list(RECIPES)
    for name, anchor in listed:
        plain = re.sub(r"[^\w -]", "", name.lower()).replace(" ", "-")
        assert anchor == f"#{plain}", name


# Your dataset


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


def test_lists_and_float64_arrays_as_the_page_says():
    first, second = default_collate([[1.0, 2.0], [3.0, 4.0]])
    assert (first.tolist(), second.tolist()) == ([1, 3], [2, 4])
    with pytest.raises(AttributeError) as raised:
        default_collate([[[1.0, 2.0], 0]])[0].to("cpu")
    assert f"`{raised.value}`" in PAGE
    with pytest.raises(RuntimeError) as raised:
        torch.nn.Linear(2, 2)(default_collate([np.ones(2), np.ones(2)]))
    assert f"`{raised.value}`" in PAGE


@pytest.mark.parametrize("sample", [(1, 2, 3), {"a": 1, "b": 2}])
def test_the_script_unchanged_wants_pairs(sample):
    batches = [default_collate([sample])]
    with pytest.raises((ValueError, AttributeError)) as raised:
        for images, _ in batches:
            images.to("cpu")
    assert str(raised.value).split(" (expected")[0] in PAGE


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


class Normed(torch.nn.Sequential):
    def __init__(self):
        layers = torch.nn.Linear(20, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU()
        super().__init__(*layers, torch.nn.Linear(64, 4))


def held_out(count=300, parts=(0.8, 0.2)):
    """The images and labels that the script validates on."""
    generator = torch.Generator().manual_seed(0)
    dataset = TensorDataset(*make_images(count))
    return random_split(dataset, parts, generator)[1][:]


# A validation loss


def test_padded_samples_change_a_loss():
    """Which is why the script takes a Subset."""
    torch.manual_seed(0)
    (images, labels), model, means = held_out(305), build_model().eval(), []
    for world_size in (1, 2, 3):
        shares = [DistributedSampler(labels, world_size, rank) for rank in range(world_size)]
        indices = [index for share in shares for index in share]
        with torch.no_grad():
            loss = F.cross_entropy(model(images[indices]), labels[indices])
        means.append(round(loss.item(), 6))
    assert len(set(means)) == 3


# A learning-rate schedule


def test_schedulers_of_torch_and_more_epochs():
    def after(make, old, new):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        scheduler, longer = make(optimizer, old), None
        rates = []
        for epoch in range(new):
            if epoch == old:
                longer = make(optimizer, new)
                longer.load_state_dict(scheduler.state_dict())
                scheduler = longer
            optimizer.step()
            scheduler.step()
            rates.append(scheduler.get_last_lr()[0])
        return rates

    def cosine(optimizer, epochs):
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)

    def one_cycle(optimizer, epochs):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=epochs)

    rates = after(cosine, 50, 60)
    assert rates[49] < 1e-6 and rates[50:] == sorted(rates[50:]) and rates[59] > 0.05
    with pytest.raises(ValueError, match=r"Tried to step .* times. The specified number of total"):
        after(one_cycle, 4, 6)


# Regression


def test_targets_of_another_shape_are_subtracted_from_every_output():
    output, targets = torch.zeros(3, 1), torch.arange(3.0)
    with pytest.warns(UserWarning, match=r"Using a target size \(.*\) that is different to the"):
        assert F.mse_loss(output, targets, reduction="none").shape == (3, 3)


# Workers


def test_more_workers_than_cores_are_told():
    with pytest.warns(UserWarning, match="Our suggested max number of worker"):
        DataLoader(Samples(8, 0), num_workers=1000)


# Augmentation


class Draws(torch.utils.data.Dataset):
    """Adds a random number of each of these kinds to the images."""

    def __init__(self, kinds, images, labels):
        self.kinds, self.images, self.labels = kinds, images, labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        own = np.random.default_rng(int(torch.randint(2**62, ())))
        draws = {"torch": lambda: float(torch.rand(())), "numpy": np.random.rand}
        draws |= {"random": random.random, "own": own.random}
        return self.images[index] + sum(draws[kind]() for kind in self.kinds), self.labels[index]


class Keeps(Draws):
    """Has a generator of its own, which each worker gets a copy of."""

    def __getitem__(self, index):
        return self.own.random()


def test_workers_draw_by_their_number_and_a_generator_that_is_kept_does_not_help():
    def drawn(data, workers):
        torch.manual_seed(0)
        options = {"batch_size": 64, "num_workers": workers, "multiprocessing_context": "fork"}
        return [batch[0] for batch in DataLoader(data, **options)]

    draws, keeps = Draws(["torch"], *make_images(256)), Keeps([], *make_images(256))
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
        torch.nn.Linear(20, 4).bfloat16()(torch.zeros(1, 20))
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
