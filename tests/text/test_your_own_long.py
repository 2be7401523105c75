"""Each difference on docs/your-own.md is run on two processes, and measured against an oracle."""

import inspect
import re
import shutil
from contextlib import nullcontext
from pathlib import Path

import launch
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from launch import CLASSIFIER, ROOT, assert_same, in_processes, python, run, torchrun
from test_your_own import (
    MODEL,
    PAGE,
    PAIRS,
    RECIPES,
    SMALL,
    SPLIT,
    Draws,
    batches,
    held_out,
    ranks,
    recipe,
    unchanged,
    weights,
)
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

from classifier import build_model, make_images

SAVE = "plumbing.save_atomically(snapshot, self.snapshot_path)"
KEEP = (SAVE, f'{SAVE}\n        os.link(self.snapshot_path, f"epoch-{{self.epochs_run}}.pt")')
COUNT = "                totals[1] += samples\n"
NUMBERS = "*(images[:, 0, 0, 0] * 4096).int().tolist()"
SEEN = f"{COUNT}                for images, _ in batches:\n" + (
    f"                    print('Seen', self.rank, epoch, {NUMBERS})\n"
)
WORKERS = '        "num_workers": args.workers,'
TRAIN, EVAL = "        self.model.train()  #", "        model.eval()\n"
FORK = [
    # As under torchrun on Linux. Here workers would start as the ranks do, which takes seconds.
    (WORKERS, f'        "multiprocessing_context": "fork" if args.workers else None,\n{WORKERS}'),
    # Python before 3.11.10 can hang in a fork while a thread of the last loader ends.
    (TRAIN, f"        __import__('time').sleep(0.3)\n{TRAIN}"),
    (EVAL, f"        __import__('time').sleep(0.3)\n{EVAL}"),
]
ADAM, SGD = (
    "torch.optim.Adam(model.parameters(), lr=args.lr)",
    "torch.optim.SGD(model.parameters(), lr=args.lr)",
)
NORMS = [(f"nn.BatchNorm2d({width})", f"nn.GroupNorm(4, {width})") for width in (16, 32)]


def mine(part, data=None, model=None):
    """The changes that put a class of the reader's own into a script."""
    code = f"import random\nimport numpy as np\n\n\n{inspect.getsource(part)}"
    changes = [(old, new) for old, new in ((PAIRS, data), (MODEL, model)) if new]
    return [*changes, ("\n\ndef ddp_setup", f"\n\n{code}\n\ndef ddp_setup")]


def resumed_is_unbroken(script, *args):
    """Run 2 epochs in one go, and from the snapshot of the first one, and compare the bits."""
    output = ranks(script, 2, 1, *args)
    Path("again").mkdir()
    shutil.copy("epoch-1.pt", "again/snapshot.pt")
    ranks(script, 2, 1, *args, cwd="again")
    assert_same("snapshot.pt", "again/snapshot.pt")
    return output


def losses(output, name="Loss"):
    """The losses by epoch, rank 0's or those of the validation."""
    form = r"^\[rank 0\] Epoch \d+ .*\| Loss: (\S+)$"
    if name == "Validation loss":
        form = r"^Epoch \d+ \| Validation loss: (\S+) "
    return [float(loss) for loss in re.findall(form, output, re.MULTILINE)]


def assert_close(path, other, **tolerance):
    torch.testing.assert_close(weights(path), weights(other), **tolerance)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The folder in which the script as it is was run for two epochs, and what it printed."""
    folder = tmp_path_factory.mktemp("plain")
    return folder, ranks(unchanged(name=folder / "script.py"), 2, 1, cwd=folder)


# Your dataset


def test_a_dataset_of_files(plain):
    """It trains as the tensors do."""
    Path("images").mkdir()
    for number, (image, label) in enumerate(zip(*make_images(300), strict=True)):
        torch.save((image.clone(), int(label)), f"images/{number:03}.pt")
    ranks(recipe("Your dataset"), 2, 1, "--data", "images")
    assert_same("snapshot.pt", plain[0] / "snapshot.pt")


# Samples that are triples or dicts


class Samples(torch.utils.data.Dataset):
    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index], WEIGHT, self.labels[index]  # noqa: F821


OTHER_SAMPLES = "Samples that are triples or dicts"
AS_DICTS = (
    "self.images[index], WEIGHT, self.labels[index]  # noqa: F821",
    '{"image": self.images[index], "label": self.labels[index]}',
)


def test_triples(plain):
    """With a weight of 1 nothing changes, and with a weight of 2 the loss is twice as large."""
    samples = mine(Samples, "Samples(images, labels)")
    ranks(recipe(OTHER_SAMPLES, *samples, ("WEIGHT", "torch.tensor(1.0)")), 2, 2)
    assert_close("snapshot.pt", plain[0] / "snapshot.pt")
    fixed = [("WEIGHT", "torch.tensor(2.0)"), ("self.optimizer.step()", "pass")]
    double = recipe(OTHER_SAMPLES, *samples, *fixed, name="double.py")
    single = unchanged(fixed[1], name="single.py")
    found, expected = (
        losses(ranks(script, 1, 1, "--snapshot_path", f"{Path(script).stem}.pt"))
        for script in (double, single)
    )
    assert found == pytest.approx([2 * loss for loss in expected], rel=1e-4)


def test_dicts(plain):
    samples = mine(Samples, "Samples(images, labels)")
    ranks(recipe(OTHER_SAMPLES, *samples, AS_DICTS, number=1), 2, 1)
    assert_same("snapshot.pt", plain[0] / "snapshot.pt")


# A download

SECONDS = 4


def download():
    """Write 20 kB slowly."""
    import time

    if Path("data.bin").exists():
        return
    print("downloading")
    with open("data.bin", "wb") as file:
        for _ in range(20):
            time.sleep(SECONDS / 20)
            file.write(bytes(1000))
            file.flush()


def slow(seconds):
    path = ("import os\n", f"import os\nfrom pathlib import Path\n\nSECONDS = {seconds}\n")
    whole = "torch.manual_seed(args.seed)  # the same initial"
    check = f'assert os.path.getsize("data.bin") == 20000, "half a file"\n    {whole}'
    return *mine(download), path, (whole, check)


def test_a_download_is_done_once():
    output = ranks(recipe("A download", *slow(4)), 1, 1, nproc=3)
    assert output.count("downloading") == 1


def test_a_download_that_fails_ends_all_ranks():
    fails = ('print("downloading")', 'raise OSError("no route")')
    output = ranks(recipe("A download", *slow(1), fails), 1, 1, status=2, seconds=30)
    assert output.count("ERROR: the download failed (no route). Try again") == 1


def test_a_download_that_takes_longer_than_the_timeout():
    script = recipe("A download", *slow(40))
    command = torchrun(script, 1, 1, "--timeout", 2)
    output = run(command, 120, status=1, PYTHONPATH=str(ROOT))
    assert "Timed out waiting 2000ms" in output
    assert 0 < Path("data.bin").stat().st_size < 20000


# Workers that load samples


def test_workers_change_no_bit(plain):
    command = torchrun(unchanged(), 2, 1, *SMALL[:2], "--workers", 2)
    run(command, 120, PYTHONPATH=str(ROOT))
    assert_same("snapshot.pt", plain[0] / "snapshot.pt")


def fails_with_workers(*command, **env):
    """The script in which a worker has 5 s for a batch, and what it prints when it fails."""
    script = unchanged(("60 if args.workers", "5 if args.workers"))
    command = [*command, *torchrun(script, 1, 1, "--workers", 2)]
    return run(command, 90, status=1, PYTHONPATH=str(ROOT), **env)


def test_a_folder_for_sockets_with_a_long_name_ends_in_an_error():
    folder = Path("scratch-of-a-user-" * 7).resolve()
    folder.mkdir()
    output = fails_with_workers(TMPDIR=str(folder))
    assert "AF_UNIX path too long" in output and "DataLoader timed out after 5 seconds" in output


def test_too_little_shared_memory_ends_in_an_error():
    small = 'mount -t tmpfs -o size=100k none /dev/shm && exec "$@"'
    output = fails_with_workers("unshare", "--mount", "sh", "-c", small, "sh")
    assert "unable to allocate shared memory" in output or "Bus error" in output


# Augmentation

ALL_KINDS = "Draws(('torch', 'numpy', 'random', 'own'), images, labels)"
KEPT = "DataLoader(train_set, sampler=sampler, **options)"
NEW = (KEPT, KEPT.replace("**options", '**options | {"persistent_workers": False}'))


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("workers", [0, 2])
def test_augmentation_comes_again_after_a_resume(number, workers):
    changes = mine(Draws, ALL_KINDS) if number else []
    script = recipe("Augmentation", *changes, KEEP, *FORK, NEW, number=number)
    resumed_is_unbroken(script, "--workers", workers)


def test_new_workers_in_each_epoch_draw_the_same_after_a_resume():
    script = recipe("Augmentation", *mine(Draws, ALL_KINDS), KEEP, *FORK, number=2)
    resumed_is_unbroken(script, "--workers", 2)


def test_validation_images_are_not_augmented(plain):
    """With weights that stay as they are, the validation loss stays too."""
    still = [("self.optimizer.step()", "pass"), *NORMS]
    both = recipe("Augmentation", *still, name="both.py"), unchanged(*still, name="neither.py")
    found = [ranks(script, 1, 1, "--snapshot_path", f"{Path(script).stem}.pt") for script in both]
    assert losses(found[0]) != losses(found[1])
    one, other = (losses(output, "Validation loss") for output in found)
    assert one == other


@pytest.mark.parametrize(
    "kinds, workers, persistent",
    [("numpy", 0, False), ("random", 0, False), ("torch", 2, True)],
)
def test_where_the_bits_end_without_the_recipe(kinds, workers, persistent):
    """The script as it is. What is compared is the second epoch of a run and of a resumed one."""
    data = Draws([kinds], *make_images(128))

    def epochs(*numbers):
        options = {"num_workers": workers, "persistent_workers": persistent}
        loader = DataLoader(data, batch_size=64, **options)
        for epoch in numbers:
            torch.manual_seed(epoch)
            seen = torch.cat([images for images, _ in loader])
        return seen

    assert not torch.equal(epochs(0, 1), epochs(1))


# Batches of a sampler

OF_A_SAMPLER = "Batches of a sampler"


def test_the_same_batches_by_a_batch_sampler(plain):
    output = resumed_is_unbroken(recipe(OF_A_SAMPLER, KEEP))
    assert_same("snapshot.pt", plain[0] / "snapshot.pt")
    assert losses(output) == losses(plain[1])
    assert "Global batch size: 80" in output and "Batchsize: 20 | Steps: 6 |" in output


def numbered(images, labels):
    """A dataset in which the first pixel is the number of the sample."""
    images[:, 0, 0, 0] = torch.arange(len(images)) / 4096
    return TensorDataset(images, labels)


def test_samples_with_weights():
    """Only the first half has one. Each rank draws others than the other one, in each epoch."""
    weights = ("torch.ones(len(train_set))", "(torch.tensor(train_set.indices) < 150).float()")
    changes = mine(numbered, "numbered(images, labels)")
    script = recipe(OF_A_SAMPLER, *changes, weights, (COUNT, SEEN), KEEP, number=1)
    epochs = batches(resumed_is_unbroken(script))
    shares = [str(epochs[epoch][rank]) for epoch in (0, 1) for rank in (0, 1)]
    assert len(set(shares)) == 4
    for epoch in epochs.values():
        for rank in epoch.values():
            seen = [number for batch in rank for number in batch]
            assert len(seen) == 120 and max(seen) < 150


# An IterableDataset

STREAM = "An IterableDataset"


def files(count):
    """Write `count` samples, which the first pixel numbers, into files for the recipe to read."""
    folder = Path("images").resolve()
    folder.mkdir()
    images, labels = make_images(count)
    images[:, 0, 0, 0] = torch.arange(count) / 4096
    lines = [
        ",".join(map(str, [int(label), *image.flatten().tolist()]))
        for image, label in zip(images, labels, strict=True)
    ]
    for number in range(4):
        (folder / f"{number}.csv").write_text("\n".join(lines[number::4]) + "\n")
    return ('"images/*.csv"', f'"{folder}/*.csv"'), ("size=2000", f"size={count}")


@pytest.mark.parametrize("workers, count", [(0, 241), (2, 240)])
def test_a_stream(workers, count):
    script = recipe(STREAM, *files(count), *FORK, (COUNT, SEEN), KEEP)
    output = resumed_is_unbroken(script, "--workers", workers)
    assert "Steps: 6 | " in output and "Warning" not in output
    epochs = batches(output)
    assert epochs[0] != epochs[1]
    for epoch in epochs.values():
        assert len(epoch[0]) == len(epoch[1]) == 6
        seen = [number for rank in epoch.values() for batch in rank for number in batch]
        assert len(seen) == len(set(seen)) == 240


def test_a_stream_with_a_step_more_on_one_rank_fails():
    """Every second line, without a thought of the last: 41 and 40 lines for the two ranks."""
    share = ("zip(*[lines] * shares, strict=False):", "list(lines)[share::shares]:")
    changes = share, ("each[share].split", "each.split"), ("drop_last=True, ", "")
    script = recipe(STREAM, *files(81), *changes)
    ranks(script, 1, 1, "--accumulate", 1, "--timeout", 5, status=1)


# Regression


def test_regression():
    found = losses(resumed_is_unbroken(recipe("Regression", KEEP)), "Validation loss")
    assert found[1] < found[0]
    best = torch.load("snapshot-best.pt", weights_only=True)
    assert best["mean"].shape == best["deviation"].shape == (5,)


def test_a_column_with_one_value_is_no_silent_fault():
    one_value = ("features = torch.randn(2500, 5)", "features = torch.ones(2500, 5)")
    output = ranks(recipe("Regression", one_value), 1, 1, status=2)
    assert "training diverged, nothing is saved" in output


# BatchNorm


def test_batchnorm_learns_differently_with_a_different_number_of_processes():
    """Here without a GPU, where there is no SyncBatchNorm."""
    for nproc, size in ((2, 20), (1, 40)):
        sizes = ("--batch_size", size, "--snapshot_path", f"{nproc}.pt")
        ranks(unchanged((ADAM, SGD)), 1, 1, *sizes, nproc=nproc)
    with pytest.raises(AssertionError, match="Greatest absolute difference"):
        assert_close("1.pt", "2.pt", atol=1e-4, rtol=1e-2)


@pytest.mark.gpu(2)
def test_sync_batchnorm_learns_the_same_with_a_different_number_of_processes():
    exact = ('self.device.type == "cuda"):', "False):")
    for nproc, size in ((2, 20), (1, 40)):
        sizes = ("--batch_size", size, "--snapshot_path", f"{nproc}.pt")
        on_gpus(unchanged((ADAM, SGD), exact), *sizes, nproc=nproc)
    assert_close("1.pt", "2.pt", atol=1e-4, rtol=1e-3)


# Gradient accumulation


def told(_, bucket):
    """What DDP does with a bucket of gradients, and a line that says so."""
    print("averaged")
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def test_gradients_are_averaged_once_for_each_step():
    wrap = "        self.model = DDP(self.model)\n"
    hook = (wrap, f"{wrap}        self.model.register_comm_hook(None, told)\n")
    output = ranks(unchanged(*mine(told), hook), 2, 2)
    steps = 2 * 3  # 6 batches of 20 images for each of two ranks, two of them in a step
    assert output.count("averaged") == 2 * steps


def reductions(rank, init_method, ways):
    """Accumulate four batches in each way, and compare what DDP did with what is expected."""
    dist.init_process_group("gloo", init_method, rank=rank, world_size=2)

    def reduce(_, bucket):
        done.append(bucket)
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0] / 2)

    gradients = {}
    for way, expected, same in ways:
        torch.manual_seed(0)
        model, done = DDP(torch.nn.Linear(20, 4)), []
        model.register_comm_hook(None, reduce)
        torch.manual_seed(rank)
        for batch in range(4):
            early = model.no_sync() if way == "both" and batch < 3 else nullcontext()
            late = model.no_sync() if way == "backward" and batch < 3 else nullcontext()
            with early:
                loss = model(torch.randn(8, 20)).square().mean()
                with late:
                    loss.backward()
        found = [torch.zeros(4, 20), torch.zeros(4, 20)]
        dist.all_gather(found, model.module.weight.grad)
        assert (len(done), torch.equal(*found)) == (expected, same), way
        gradients[way] = found[0]
    for way in ("both", "backward"):
        torch.testing.assert_close(gradients[way], gradients["neither"])
    del model
    dist.destroy_process_group()


def test_what_no_sync_saves_and_where_it_has_to_stand():
    """How often gradients are averaged, and whether the ranks have the same ones in the end."""
    ways = [("neither", 4, True), ("both", 1, True), ("backward", 4, True)]
    in_processes(2, reductions, ways)


# Targets that do not count

TARGETS = "Targets that do not count"


class Sentences(torch.utils.data.Dataset):
    """Tokens, and labels that end early. Every eighth sentence has no label at all."""

    def __init__(self, *_):
        generator = torch.Generator().manual_seed(5)
        self.ids = torch.randint(0, 50, (256, 16), generator=generator)
        self.labels = (self.ids * 7 + 3) % 50
        for row, length in enumerate(torch.randint(1, 17, (256,), generator=generator)):
            self.labels[row, length if row % 8 else 0 :] = -100

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return self.ids[index], self.labels[index]


TAGGER = "nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 50))"
TAGS = [*mine(Sentences, "Sentences()", TAGGER), (SPLIT, "[192, 64]"), (ADAM, SGD)]


def trained_in_parts(script, name, ways):
    """Train with a global batch of 64, divided in each of these ways, and return the weights."""
    for nproc, parts in ways:
        sizes = ("--batch_size", 64 // (nproc * parts), "--accumulate", parts, "--lr", 1.0)
        path = f"{name}-{nproc}-{parts}.pt"
        output = ranks(script, 2, 2, *sizes, "--snapshot_path", path, nproc=nproc)
        yield losses(output) + losses(output, "Validation loss"), weights(path)


def test_targets_weigh_the_same_however_a_step_is_divided():
    script = recipe(TARGETS, *TAGS)
    ways = [(1, 1), (1, 4), (1, 32), (2, 1), (2, 4), (2, 32), (4, 1), (4, 4), (4, 16)]
    (numbers, one), *others = trained_in_parts(script, "counted", ways)
    for found, other in others:
        assert found == pytest.approx(numbers, abs=3e-6)
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)


def test_without_the_recipe_they_do_not():
    """Output and labels are made flat, and each batch has the mean of its own targets."""
    flat = [
        ("output.float(), labels,", "output.flatten(0, 1).float(), labels.flatten(),"),
        ("(loss / samples)", "(loss / (labels != -100).sum().clamp(min=1) / len(batches))"),
        (
            "output = model(images.to(self.device))",
            "output, labels = model(images).flatten(0, 1), labels.flatten()",
        ),
    ]
    script = unchanged(*TAGS, *flat)
    (_, one), (_, other) = trained_in_parts(script, "means", [(1, 1), (4, 16)])
    with pytest.raises(AssertionError, match="Greatest absolute difference"):
        torch.testing.assert_close(other, one, rtol=0.05, atol=0.05)


# Parameters without a gradient

UNUSED = "Parameters without a gradient"


class Spare(torch.nn.Module):
    def __init__(self, used):
        super().__init__()
        self.used, self.extra = used, torch.nn.Linear(20, 4)

    def forward(self, images):
        return self.used(images)


SPARE = [*mine(Spare), ("model = build_model()", "model = Spare(build_model())")]


@pytest.mark.parametrize("number", [0, 1], ids=["found", "frozen"])
def test_parameters_without_a_gradient(number):
    resumed_is_unbroken(recipe(UNUSED, *SPARE, KEEP, number=number))


def test_parameters_without_a_gradient_and_without_the_recipe():
    output = ranks(unchanged(*SPARE), 1, 1, "--timeout", 20, status=1)
    message = (
        "Expected to have finished reduction in the prior iteration before starting a new one."
    )
    assert message in output and message in PAGE


# Mixed precision, a model in bfloat16, gradient checkpointing

MIXED = "Mixed precision"
EVERYWHERE = ('self.device.type == "cuda"):', "True):")


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_autocast(kind):
    """On a CPU too, for the test. float16 has the gradients without the scale when it clips."""
    half = recipe(MIXED, KEEP) if kind == "float16" else unchanged(EVERYWHERE, KEEP)
    output = resumed_is_unbroken(half)
    script = unchanged(name="float32.py")
    expected = losses(ranks(script, 2, 2, "--snapshot_path", "float32.pt"))
    assert losses(output) != expected
    assert losses(output) == pytest.approx(expected, rel=0.02)
    kinds = {weight.dtype for weight in weights("snapshot.pt").values()}
    assert kinds == {torch.float32, torch.int64}  # BatchNorm counts its batches
    saved = torch.load("snapshot.pt", weights_only=True)
    assert ("scaler" in saved) == (kind == "float16")


def test_a_model_in_bfloat16(plain):
    output = resumed_is_unbroken(recipe("A model in bfloat16", KEEP))
    assert losses(output) == pytest.approx(losses(plain[1]), rel=0.1)
    kinds = {weight.dtype for weight in weights("snapshot.pt").values()}
    assert kinds == {torch.bfloat16, torch.int64}


CHECKPOINTING = "Gradient checkpointing"


def test_checkpointing_changes_no_bit():
    ranks(recipe(CHECKPOINTING), 2, 2)
    again = ("checkpoint(super().forward, inputs, use_reentrant=False)", "super().forward(inputs)")
    ranks(recipe(CHECKPOINTING, again), 2, 2, "--snapshot_path", "kept.pt")
    assert_same("snapshot.pt", "kept.pt")


# A learning-rate schedule


def test_a_scheduler_survives_a_resume_and_reacts_to_the_validation_loss():
    patience = ("patience=2)", "patience=0)")
    validation = ("        return loss\n", "        return loss + epoch\n")  # it gets worse
    script = recipe("A learning-rate schedule", KEEP, patience, validation)
    ranks(script, 4, 2)
    Path("again").mkdir()
    shutil.copy("epoch-2.pt", "again/snapshot.pt")
    ranks(script, 4, 2, cwd="again")
    assert_close("snapshot.pt", "again/snapshot.pt", atol=0, rtol=0)
    one, other = (torch.load(path)["scheduler"] for path in ("snapshot.pt", "again/snapshot.pt"))
    assert one == other
    assert rate("snapshot.pt") == pytest.approx(0.004 * 0.1**3)


def rate(path):
    return torch.load(path, weights_only=True)["optimizer"]["param_groups"][0]["lr"]


def test_a_schedule_that_is_fed_each_ranks_own_loss_lets_the_ranks_drift_apart():
    reduce = "        dist.all_reduce(totals)  # each rank now"
    own = (reduce, f"        self.own = float(totals[0] / totals[1])\n{reduce}")
    feed = ("self.scheduler.step(loss)", "self.scheduler.step(self.own + self.rank * epoch)")
    script = recipe("A learning-rate schedule", own, feed, ("patience=2)", "patience=0)"))
    output = ranks(script, 8, 8, "--lr", 0.05, status=2)
    assert "the ranks have different weights" in output


# A validation loss, the best model


def loss_of(path):
    """What plain PyTorch says about the weights in a file."""
    model = build_model()
    model.load_state_dict(torch.load(path, weights_only=True))
    images, labels = held_out()
    with torch.no_grad():
        return F.cross_entropy(model.eval()(images), labels).item()


@pytest.mark.parametrize("nproc", [1, 2])
def test_f1_and_iou_are_those_of_the_whole_set(nproc):
    output = ranks(recipe("A validation loss"), 3, 3, nproc=nproc)
    shown = re.findall(r"F1: (\S+) \| Mean IoU: (\S+)$", output, re.MULTILINE)
    model = build_model()
    saved = torch.load("snapshot.pt", weights_only=True)["average"]
    model.load_state_dict({name[7:]: each for name, each in saved.items() if "module." in name})
    images, labels = held_out()
    with torch.no_grad():
        predicted = model.eval()(images).argmax(dim=1)
    f1, iou = [], []
    for each in range(4):
        both = ((labels == each) & (predicted == each)).sum()
        either = ((labels == each) | (predicted == each)).sum()
        f1.append(2 * both / (both + either))
        iou.append(both / either)
    found = tuple(f"{sum(scores) / 4:.4f}" for scores in (f1, iou))
    assert shown[-1] == found


def test_the_best_model_is_that_of_the_best_epoch():
    """From the third epoch on the rate is so high that it only gets worse."""
    set_rate = 'group["lr"] = self.args.lr * rate_of(epoch, self.args.total_epochs)'
    worse = (set_rate, 'group["lr"] = 0.004 if epoch < 2 else 3.0')
    script = unchanged(worse)
    found = losses(ranks(script, 3, 1), "Validation loss")
    assert min(found) == found[1] == pytest.approx(loss_of("snapshot-best.pt"), abs=2e-6)
    ranks(script, 4, 1)  # resumes with an epoch that is worse than the second
    assert found[1] == pytest.approx(loss_of("snapshot-best.pt"), abs=2e-6)


def test_the_highest_accuracy_as_the_criterion():
    output = ranks(recipe("The best model and early stopping"), 3, 3)
    accuracies = re.findall(
        r"^Epoch \d+ \| Validation loss: .* Accuracy: (\S+)$", output, re.MULTILINE
    )
    best = max(accuracies, key=float)
    expected = f"Best validation loss: -{best}\\d* in epoch {accuracies.index(best)}$"
    assert re.search(expected, output, re.MULTILINE), output


def test_a_rank_without_a_step_of_validation():
    """With one sample rank 1 has none, which does no harm, but for DDP's own forward pass."""
    one = (SPLIT, "[299, 1]")
    ranks(unchanged(one), 1, 1)
    through_ddp = ("model = self.average.module  #", "model = self.model  #")
    without = ("dist.broadcast(buffer, src=0)", "pass")
    script = unchanged(one, through_ddp, without, ("model.eval()", ""), name="through_ddp.py")
    assert "Timed out" in ranks(script, 1, 1, "--timeout", 5, "--snapshot_path", "2", status=1)


# Change the number of GPUs


def test_the_same_global_batch_on_fewer_processes():
    """Without BatchNorm. Twice the parts take the place of half of the processes."""
    script = unchanged(*NORMS, (ADAM, SGD))
    for nproc, parts in ((4, 1), (2, 2), (1, 4)):
        args = ("--batch_size", 20, "--accumulate", parts, "--snapshot_path", f"{nproc}.pt")
        ranks(script, 2, 2, *args, nproc=nproc)
    for nproc in (1, 2):
        assert_close(f"{nproc}.pt", "4.pt", atol=1e-5, rtol=1e-4)
    output = ranks(script, 3, 3, "--batch_size", 10, "--snapshot_path", "2.pt")
    assert "Global batch size: 20 (10 x 2 processes), but 40 (20 x 2 processes) in the" in output


# Using the trained model


def test_the_program_uses_the_best_model():
    shutil.copy(CLASSIFIER, ".")
    bash, program = (text for _, text in RECIPES["Using the trained model"])
    command = launch.start_typed(bash, PYTHONPATH=str(ROOT))
    status, output = launch.finish(command, 120)
    assert status == 0, output
    Path("program.py").write_text(program)
    output = run(python("program.py"), PYTHONPATH=str(ROOT))
    model = build_model()
    model.load_state_dict(torch.load("short-best.pt", weights_only=True))
    images, labels = (each[:8] for each in make_images(2501))
    expected = model.eval()(images).argmax(dim=1).tolist(), labels.tolist()
    assert re.findall(r"\[.*\]", output) == list(map(str, expected))


# On GPUs


def on_gpus(script, *args, nproc=2):
    command = torchrun(script, 2, 1, *SMALL, *args, nproc=nproc)
    output = run(command, 200, PYTHONPATH=str(ROOT), TQDM_DISABLE="1")
    assert "[rank 0] Epoch 1" in output
    return output


@pytest.mark.gpu(1)
def test_the_example_on_one_gpu():
    assert_falls(on_gpus(unchanged(), nproc=1))


@pytest.mark.gpu(2)
@pytest.mark.parametrize(
    "heading, number",
    [
        (OTHER_SAMPLES, 1),
        (OF_A_SAMPLER, 0),
        (OF_A_SAMPLER, 1),
        ("Augmentation", 0),
        (STREAM, 0),
        ("Regression", 0),
        (TARGETS, 0),
        (UNUSED, 0),
        (MIXED, 0),
        ("A model in bfloat16", 0),
        (CHECKPOINTING, 0),
        ("A learning-rate schedule", 0),
    ],
)
def test_on_two_gpus(heading, number):
    """Each that is not the same there as on the CPU: memory, kernels, NCCL."""
    changes = {
        STREAM: lambda: files(240),
        UNUSED: lambda: SPARE,
        TARGETS: lambda: TAGS,
        OTHER_SAMPLES: lambda: [*mine(Samples, "Samples(images, labels)"), AS_DICTS],
    }.get(heading, list)()
    assert_falls(on_gpus(recipe(heading, *changes, number=number)))


def assert_falls(output):
    found = losses(output)
    assert found[1] < found[0]
