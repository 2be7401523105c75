"""Each recipe of docs/your-own.md is run, and measured against an oracle."""

import inspect
import os
import re
import shutil
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from launch import (
    ROOT,
    assert_same,
    finish,
    in_processes,
    python,
    run,
    start,
    torchrun,
)
from test_your_own import (
    DATA,
    MODEL,
    PAGE,
    RECIPES,
    Draws,
    Normed,
    batches,
    held_out,
    ranks,
    recipe,
    unchanged,
    weights,
)
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

from datautils import MyTrainDataset, build_model

SAVE = "plumbing.save_atomically(snapshot, self.snapshot_path)"


KEEP = (SAVE, f'{SAVE}\n        os.link(self.snapshot_path, f"epoch-{{epoch + 1}}.pt")')


STEP = "            totals[1] += len(source)\n"


END = "    del trainer"


# As under torchrun on Linux. Here workers would be started as the ranks are, which takes seconds.
FORK = ("num_workers=2,", "num_workers=2, multiprocessing_context='fork',")


def mine(part, data=None, model=None):
    """The changes that put a class of the reader's own into a script."""
    code = f"import random\nimport numpy as np\n\n\n{inspect.getsource(part)}"
    changes = [(old, new) for old, new in ((DATA, data), (MODEL, model)) if new]
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
    """Rank 0's losses by epoch."""
    form = r"^\[rank 0\] Epoch \d+ .*\| Loss: (\S+)$"
    if name == "Validation loss":
        form = r"^Epoch \d+ \| Validation loss: (\S+)$"
    return [float(loss) for loss in re.findall(form, output, re.MULTILINE)]


def assert_close(path, other, **tolerance):
    torch.testing.assert_close(weights(path), weights(other), **tolerance)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The folder in which the script as it is was run for two epochs, and what it printed."""
    folder = tmp_path_factory.mktemp("plain")
    return folder, ranks(unchanged(name=folder / "script.py"), 2, 1, cwd=folder)


# Samples that are triples or dicts


class Triples(torch.utils.data.Dataset):
    def __init__(self):
        self.features, self.labels = MyTrainDataset(512)[:]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.features[index], torch.tensor(2.0), self.labels[index]


class Dicts(torch.utils.data.Dataset):
    def __init__(self):
        self.features, self.labels = MyTrainDataset(512)[:]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"features": self.features[index], "label": self.labels[index]}


OTHER_SAMPLES = "Samples that are triples or dicts"


def test_triples(plain):
    """The third is a weight of 2: the same as twice the learning rate."""
    changes = [*mine(Triples, "Triples()"), ("lr=0.05", "lr=0.025")]
    output = ranks(recipe(OTHER_SAMPLES, *changes), 2, 2)
    assert_close("snapshot.pt", plain[0] / "snapshot.pt")
    assert losses(output) == pytest.approx([2 * loss for loss in losses(plain[1])], rel=1e-4)


def test_dicts(plain):
    ranks(recipe(OTHER_SAMPLES, *mine(Dicts, "Dicts()"), number=1), 2, 1)
    assert_same("snapshot.pt", plain[0] / "snapshot.pt")


# Batches of a sampler

OF_A_SAMPLER = "Batches of a sampler"


def test_the_same_batches_by_a_batch_sampler(plain):
    output = resumed_is_unbroken(recipe(OF_A_SAMPLER, KEEP))
    assert_same("snapshot.pt", plain[0] / "snapshot.pt")
    assert losses(output) == losses(plain[1])
    assert "Global batch size: 64" in output and "Batchsize: 32 | Steps: 8 |" in output


class Numbered(MyTrainDataset):
    """The first feature is the number of the sample."""

    def __getitem__(self, index):
        features, label = super().__getitem__(index)
        return torch.cat([torch.tensor([index / 4096]), features[1:]]), label


def test_samples_with_weights():
    """Only the first half has one. Each rank draws others than the other one, in each epoch."""
    weights = ("torch.ones(len(dataset))", "(torch.arange(len(dataset)) < 256).float()")
    numbered = mine(Numbered, "Numbered(512)")
    script = recipe(OF_A_SAMPLER, *numbered, weights, (STEP, STEP + SEEN), KEEP, number=1)
    epochs = batches(resumed_is_unbroken(script))
    shares = [str(epochs[epoch][rank]) for epoch in (0, 1) for rank in (0, 1)]
    assert len(set(shares)) == 4
    for epoch in epochs.values():
        for rank in epoch.values():
            seen = [number for batch in rank for number in batch]
            assert len(seen) == 256 and max(seen) < 256


NORMED = mine(Normed, model="Normed()")


VALIDATION = "A validation loss"


@torch.no_grad()
def valid_loss(path, model):
    """What plain PyTorch says about the weights in a file."""
    model.load_state_dict(weights(path))
    features, targets = held_out()[list(range(301))]
    return float(F.cross_entropy(model.eval()(features), targets))


@pytest.mark.parametrize("nproc", [1, 2, 3])
def test_the_validation_loss_is_that_of_the_whole_set(nproc):
    """With 50 in a batch, the ranks have unequal numbers of steps."""
    script = recipe(VALIDATION, *NORMED, KEEP)
    output = ranks(script, 2, 1, "--batch_size", 50, nproc=nproc)
    expected = [valid_loss(f"epoch-{epoch}.pt", Normed()) for epoch in (1, 2)]
    assert losses(output, "Validation loss") == pytest.approx(expected, abs=2e-6)


def test_a_rank_without_a_step_of_validation():
    """With one sample rank 1 has none, which is no harm, but for DDP's own forward pass."""
    one = ("(2048, 301)", "(2348, 1)")
    ranks(recipe(VALIDATION, *NORMED, one), 1, 1)
    through_ddp = ("model = self.model.module  #", "model = self.model  #")
    without = ("dist.broadcast(buffer, src=0)", "pass")
    script = recipe(VALIDATION, *NORMED, one, through_ddp, without, name="through_ddp.py")
    assert "Timed out" in ranks(script, 1, 1, "--timeout", 5, "--snapshot_path", "2", status=1)


# A learning-rate schedule


def test_a_schedule_survives_a_resume():
    script = recipe("A learning-rate schedule", KEEP)
    ranks(script, 4, 2)
    Path("again").mkdir()
    shutil.copy("epoch-2.pt", "again/snapshot.pt")
    ranks(script, 4, 2, cwd="again")
    assert_same("snapshot.pt", "again/snapshot.pt")
    saved = torch.load("snapshot.pt", weights_only=True)
    assert saved["optimizer"]["param_groups"][0]["lr"] == pytest.approx(0.05 * 0.95**4)
    assert saved["scheduler"]["last_epoch"] == 4


def rate(path):
    return torch.load(path, weights_only=True)["optimizer"]["param_groups"][0]["lr"]


def test_the_rate_is_the_snapshots_unless_it_is_set_after_loading(plain):
    edit = unchanged(("lr=0.05", "lr=0.01"), name="edited.py")
    purpose = recipe("A learning-rate schedule", number=1)
    for script, expected in ((edit, 0.05), (purpose, 0.01)):
        shutil.copy(plain[0] / "snapshot.pt", ".")
        ranks(script, 3, 1)
        assert rate("snapshot.pt") == expected


# Workers that load samples


def test_workers_change_no_bit(plain):
    run(torchrun(recipe("Workers that load samples"), 2, 1), 120, PYTHONPATH=str(ROOT))
    assert_same("snapshot.pt", plain[0] / "snapshot.pt")


ALL_KINDS = "Draws(('torch', 'numpy', 'random', 'own'))"


@pytest.mark.parametrize("number", [0, 1], ids=["no workers", "workers"])
def test_augmentation_comes_again_after_a_resume(number):
    changes = [KEEP, FORK] if number else [KEEP]
    script = recipe("Augmentation", *mine(Draws, ALL_KINDS), *changes, number=number)
    resumed_is_unbroken(script)


@pytest.mark.parametrize(
    "kinds, workers, persistent",
    [("numpy", 0, False), ("random", 0, False), ("torch", 2, True)],
)
def test_where_the_bits_end_without_the_recipe(kinds, workers, persistent):
    """The script as it is. What is compared is the second epoch of a run and of a resumed one."""
    data = Draws([kinds])

    def epochs(*numbers):
        options = {"num_workers": workers, "persistent_workers": persistent}
        loader = DataLoader(data, batch_size=64, **options)
        for epoch in numbers:
            torch.manual_seed(epoch)
            seen = torch.cat([features for features, _ in loader])
        return seen

    assert not torch.equal(epochs(0, 1), epochs(1))


# BatchNorm


def test_batchnorm_learns_otherwise_with_another_number_of_processes():
    """Here without a GPU, where the recipe changes nothing. A resume has the same bits."""
    script = recipe("BatchNorm", *NORMED, KEEP)
    resumed_is_unbroken(script)
    one = unchanged(*NORMED, name="one.py")
    ranks(one, 1, 1, "--batch_size", 64, "--snapshot_path", "one.pt", nproc=1)
    with pytest.raises(AssertionError, match="Greatest absolute difference"):
        assert_close("epoch-1.pt", "one.pt", atol=1e-3, rtol=1e-2)


@pytest.mark.gpu(2)
def test_sync_batchnorm_learns_the_same_with_another_number_of_processes():
    script = recipe("BatchNorm", *NORMED)
    sizes = (32, 64)
    for nproc, size in zip((2, 1), sizes, strict=True):
        on_gpus(script, "--batch_size", size, "--snapshot_path", f"{size}.pt", nproc=nproc)
    assert_close(*(f"{size}.pt" for size in sizes), atol=1e-4, rtol=1e-3)


# Gradient accumulation

ACCUMULATION = "Gradient accumulation"


FEW = (DATA, "MyTrainDataset(420)")  # 27 batches of 8 for each of 2 ranks, the last one of 2


EACH = (
    END,
    f'    torch.save(trainer.model.module.state_dict(), f"rank-{{trainer.rank}}.pt")\n{END}',
)


def told(_, bucket):
    """What DDP does with a bucket of gradients, and a line that says so."""
    print("averaged")
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def test_accumulation_is_one_process_with_a_larger_batch():
    wrap = "        self.model = DDP(self.model)\n"
    hook = (wrap, f"{wrap}        self.model.register_comm_hook(None, told)\n")
    script = recipe(ACCUMULATION, *mine(told), hook, FEW, KEEP, EACH)
    output = resumed_is_unbroken(script, "--batch_size", 8)
    assert "Global batch size: 64" in output
    passes = 2 * 7  # the steps of two epochs
    assert output.count("averaged") == 2 * passes
    assert_close("rank-0.pt", "rank-1.pt", rtol=0, atol=0)
    one = unchanged(FEW, name="one.py")
    ranks(one, 2, 1, "--batch_size", 64, "--snapshot_path", "one.pt", nproc=1)
    assert_close("snapshot.pt", "one.pt", atol=1e-5, rtol=1e-4)


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
                if way == "flag":
                    model.require_backward_grad_sync = batch == 3
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
    ways = [("neither", 4, True), ("both", 1, True), ("backward", 4, True), ("flag", 1, False)]
    in_processes(2, reductions, ways)


# Autocast to bfloat16, a model in bfloat16

AUTOCAST = "Autocast to bfloat16"


@pytest.mark.parametrize("number", [0, 1], ids=["bfloat16", "float16"])
def test_autocast(number):
    """With float16 the gradients are clipped, by the norm that they have without the scale."""
    output = resumed_is_unbroken(recipe(AUTOCAST, KEEP, number=number))
    step = "        self.optimizer.step()\n"
    clip = "        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)\n"
    other = unchanged((step, number * clip + step), name="float32.py")
    expected = losses(ranks(other, 2, 2, "--snapshot_path", "float32.pt"))
    assert losses(output) != expected
    assert losses(output) == pytest.approx(expected, rel=0.01)
    assert {weight.dtype for weight in weights("snapshot.pt").values()} == {torch.float32}
    assert ("scaler" in torch.load("snapshot.pt", weights_only=True)) == bool(number)


def test_a_model_in_bfloat16(plain):
    output = resumed_is_unbroken(recipe("A model in bfloat16", KEEP))
    assert losses(output) == pytest.approx(losses(plain[1]), rel=0.05)
    assert {weight.dtype for weight in weights("snapshot.pt").values()} == {torch.bfloat16}


# Parameters without a gradient

UNUSED = "Parameters without a gradient"


class Spare(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.extra = torch.nn.Linear(20, 4), torch.nn.Linear(20, 4)

    def forward(self, features):
        return self.used(features)


SPARE = mine(Spare, model="Spare()")


@pytest.mark.parametrize("number", [0, 1], ids=["found", "frozen"])
def test_parameters_without_a_gradient(number):
    resumed_is_unbroken(recipe(UNUSED, *SPARE, KEEP, number=number))


def test_parameters_without_a_gradient_and_without_the_recipe():
    script = unchanged(*SPARE)
    output = ranks(script, 1, 1, "--timeout", 20, status=1)
    message = (
        "Expected to have finished reduction in the prior iteration before starting a new one."
    )
    assert message in output and message in PAGE


# A download

SECONDS = 4


class Downloaded(MyTrainDataset):
    def __init__(self, size):
        if not os.path.exists("data.bin"):
            print("downloading")
            with open("data.bin", "wb") as file:
                for _ in range(20):
                    time.sleep(SECONDS / 20)
                    file.write(bytes(1000))
                    file.flush()
        assert os.path.getsize("data.bin") == 20000, "half a file"
        super().__init__(size)


def slow(seconds):
    imports = ("import os\n", f"import os\nimport time\n\nSECONDS = {seconds}\n")
    return *mine(Downloaded, "Downloaded(2048)"), imports


def test_a_download_is_done_once():
    output = ranks(recipe("A download", *slow(4)), 1, 1, nproc=3)
    assert output.count("downloading") == 1


def test_a_download_that_takes_longer_than_the_timeout():
    process = start(
        torchrun(recipe("A download", *slow(40)), 1, 1, "--timeout", 2), PYTHONPATH=str(ROOT)
    )
    status, output = finish(process, 120)
    assert status == 1 and "Timed out waiting 2000ms" in output, output
    assert 0 < Path("data.bin").stat().st_size < 20000


# An IterableDataset

STREAM = "An IterableDataset"


SEEN = "            print('Seen', self.rank, epoch, *(source[:, 0] * 4096).int().tolist())\n"


def files(count):
    """Write `count` samples, which the first feature numbers, into files for the recipe to read."""
    folder = Path("points").resolve()
    folder.mkdir()
    features, labels = MyTrainDataset(count)[:]
    features[:, 0] = torch.arange(count) / 4096
    lines = [
        ",".join(map(str, [int(label), *point.tolist()]))
        for point, label in zip(features, labels, strict=True)
    ]
    for number in range(4):
        (folder / f"{number}.csv").write_text("\n".join(lines[number::4]) + "\n")
    return ('"points/*.csv"', f'"{folder}/*.csv"'), ("size=2048", f"size={count}")


@pytest.mark.parametrize(
    "workers, count, drop", [(0, 511, 1), (2, 512, 0)], ids=["no workers", "workers"]
)
def test_a_stream(workers, count, drop):
    batch_size = "        batch_size=batch_size,\n"
    options = [(batch_size, f"{batch_size}        num_workers=2,\n"), FORK] if workers else []
    script = recipe(STREAM, *files(count), *options, (STEP, STEP + SEEN), KEEP)
    output = resumed_is_unbroken(script)
    assert "Steps: 8 | " in output and "Warning" not in output
    epochs = batches(output)
    assert epochs[0] != epochs[1]
    for epoch in epochs.values():
        assert len(epoch[0]) == len(epoch[1]) == 8
        seen = [number for rank in epoch.values() for batch in rank for number in batch]
        assert len(seen) == len(set(seen)) == count - drop


def test_a_stream_with_a_step_more_on_one_rank_fails():
    """Every second line, without a thought of the last: 33 and 32 lines for the two ranks."""
    share = ("zip(*[lines] * shares, strict=False):", "list(lines)[share::shares]:")
    script = recipe(STREAM, *files(65), share, ("each[share].split", "each.split"))
    ranks(script, 1, 1, "--timeout", 5, status=1)


# The best model


def test_the_best_model_is_that_of_the_best_epoch():
    """From the third epoch on the rate is so high that it only gets worse."""
    train = "            self._run_epoch(epoch)\n"
    worse = "            self.optimizer.param_groups[0]['lr'] = 0.05 if epoch < 2 else 1.0\n"
    script = recipe("The best model", (train, worse + train))
    found = losses(ranks(script, 3, 1), "Validation loss")
    assert min(found) == found[1] == pytest.approx(valid_loss("best.pt", build_model()), abs=2e-6)
    ranks(script, 4, 1)  # goes on with an epoch that is worse than the second
    assert found[1] == pytest.approx(valid_loss("best.pt", build_model()), abs=2e-6)


# Using the trained model


def test_the_program_takes_a_snapshot_too(plain):
    shutil.copy(plain[0] / "snapshot.pt", ".")
    program = dict(RECIPES["Using the trained model"])["python"]
    Path("program.py").write_text(program.replace("checkpoint.pt", "snapshot.pt"))
    output = run(python("program.py"), PYTHONPATH=str(ROOT))
    model = build_model()
    model.load_state_dict(weights("snapshot.pt"))
    features, labels = MyTrainDataset(2048)[:8]
    expected = model(features).argmax(dim=1).tolist(), labels.tolist()
    assert re.findall(r"\[.*\]", output) == list(map(str, expected))


# On GPUs


def on_gpus(script, *args, nproc=2):
    command = torchrun(script, 2, 1, *args, nproc=nproc)
    output = run(command, 200, PYTHONPATH=str(ROOT), TQDM_DISABLE="1")
    assert "[rank 0] Epoch 1" in output
    return output


@pytest.mark.gpu(2)
@pytest.mark.parametrize(
    "heading, number",
    [
        (OTHER_SAMPLES, 0),
        (OTHER_SAMPLES, 1),
        (OF_A_SAMPLER, 0),
        (OF_A_SAMPLER, 1),
        (VALIDATION, 0),
        ("A learning-rate schedule", 0),
        ("Workers that load samples", 0),
        ("Augmentation", 1),
        (ACCUMULATION, 0),
        (AUTOCAST, 0),
        (AUTOCAST, 1),
        ("A model in bfloat16", 0),
        (UNUSED, 0),
        ("A download", 0),
        (STREAM, 0),
        ("The best model", 0),
    ],
)
def test_on_two_gpus(heading, number):
    """Each that does not come to the same there as on the CPU: memory, kernels, NCCL."""
    changes = files(512) if heading == STREAM else SPARE if heading == UNUSED else []
    if heading == OTHER_SAMPLES:
        changes = mine(Dicts, "Dicts()") if number else mine(Triples, "Triples()")
    found = losses(on_gpus(recipe(heading, *changes, number=number)))
    assert found[1] < found[0]
