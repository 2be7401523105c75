"""Each script is run as a reader runs it, on the CPU, and must print and learn what is promised.

The oracle is one process: what several processes learn is compared with what it learns.
"""

import contextlib
import fcntl
import hashlib
import importlib
import io
import itertools
import os
import pickle
import pty
import re
import select
import signal
import socket
import struct
import sys
import termios
import time
from argparse import Namespace
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from launch import (
    MULTI,
    MULTINODE,
    SINGLE,
    TORCHRUN_SCRIPT,
    edited,
    finish,
    free_port,
    in_processes,
    pids,
    python,
    quickly,
    run,
    start,
    torchrun,
)
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import multigpu
import multigpu_torchrun
import plumbing
import single_gpu
from datautils import MyTrainDataset, build_model

SCRIPTS = [SINGLE, MULTI, TORCHRUN_SCRIPT, MULTINODE]


each_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: Path(script).stem)


STARTED = r"Rank: (\d+) \| World size: (\d+) \| Local rank: (\d+) \| Host: (\S+) \| Pid: (\d+) "


STARTED += r"\| Device: cpu"


EPOCH = r"\[rank (\d+)\] Epoch (\d+) \| Batchsize: (\d+) \| Steps: (\d+) \| Loss: (\d+\.\d{6})"


SAVED = r"Epoch (\d+) \| Training (?:checkpoint saved at checkpoint|snapshot saved at snapshot)\.pt"


RESUMED = r"Resuming training from snapshot at Epoch (\d+)"


GLOBAL_BATCH = r"Global batch size: (\d+)"


SIZE = r"\d+ \(\d+ x \d+ processes\)"


RESIZED = rf"Global batch size: ({SIZE}), but ({SIZE}) in the snapshot"


LAUNCHER = r"(?:W\d{4} .*\] )?node_rank is only used for static rdzv_backend\b.*"  # torchrun's own


# What conftest.py sets for each test, for fixtures as well; and a warning ends the script.
CPU = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error::UserWarning"}


def lines(form, output):
    """The fields of every whole line of this form, as text."""
    return re.findall(f"^{form}$", output, re.MULTILINE)


def losses(output):
    """The loss of each epoch, which all ranks' lines must agree on."""
    printed = {(int(epoch), loss) for _, epoch, _, _, loss in lines(EPOCH, output)}
    assert len(printed) == len(dict(printed)), "two losses for one epoch"
    return [float(loss) for _, loss in sorted(printed)]


def weights(folder="."):
    return torch.load(Path(folder, "checkpoint.pt"), weights_only=True)


def options(**changed):
    """What `parse_args` returns."""
    default = {"total_epochs": 3, "save_every": 3, "batch_size": 32, "seed": 0, "wandb": "disabled"}
    return Namespace(**default | changed)


# The commands, exactly as a reader types them, with `auto` or a number in place of `gpu`


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder for each script, in which its command runs and what it saves stays."""
    return {script: tmp_path_factory.mktemp(Path(script).stem) for script in SCRIPTS}


@pytest.fixture(scope="module")
def output(folders):
    """`output(script)` is what the script's command prints. It runs when first asked for."""

    @cache
    def output(script):
        folder = folders[script]
        if script == MULTINODE:
            rdzv = (
                "--rdzv-id=456",
                "--rdzv-backend=c10d",
                f"--rdzv-endpoint=localhost:{free_port()}",
            )
            typed = ("--total_epochs", 50, "--save_every", 10, "--batch_size", 32)
            nodes = []
            for node in (0, 1):
                where = ("--nnodes=2", f"--node-rank={node}", *rdzv)
                command = torchrun(MULTINODE, *typed, nproc=1, options=where)
                nodes.append(start(command, folder / f"node{node}", **CPU))
            ended = [finish(node, 100) for node in nodes]
            assert [status for status, _ in ended] == [0, 0], ended
            return "".join(text for _, text in ended)
        command = {
            SINGLE: python(SINGLE, 50, 10),
            MULTI: python(MULTI, 50, 10),
            TORCHRUN_SCRIPT: torchrun(TORCHRUN_SCRIPT, 50, 10, nproc=2),
        }[script]
        return run(command, 100, cwd=folder, **CPU)

    return output


def world_size(script):
    return 1 if script == SINGLE else 2


@each_script
def test_the_loss_falls_under_a_tenth(script, output):
    """`50 10` ends with under a tenth of the first epoch's loss."""
    loss = losses(output(script))
    assert loss[-1] < loss[0] / 10


@each_script
def test_a_log_has_whole_lines_of_known_forms(script, output):
    """A log file shows no piece of a line, no carriage return, no warning, no progress bar."""
    check_log(output(script))


def check_log(text):
    known = "|".join((STARTED, EPOCH, SAVED, RESUMED, GLOBAL_BATCH, RESIZED, LAUNCHER))
    assert [line for line in text.split("\n")[:-1] if not re.fullmatch(known, line)] == []
    assert text.endswith("\n")


@each_script
def test_each_process_says_who_it_is(script, output):
    """One line for each process: rank, world size, local rank, host, pid and device."""
    size = world_size(script)
    started = sorted(lines(STARTED, output(script)))
    assert [(rank, world) for rank, world, *_ in started] == [
        (str(r), str(size)) for r in range(size)
    ]
    local = {"0"} if script == MULTINODE else {str(rank) for rank in range(size)}
    assert {local_rank for _, _, local_rank, _, _ in started} == local
    assert {host for *_, host, _ in started} == {socket.gethostname()}
    assert len(set(pids(output(script)))) == size


@each_script
def test_each_rank_prints_each_epoch_once(script, output):
    """Every rank has the same number of steps, and the loss on its line is the job's."""
    size = world_size(script)
    printed = [tuple(map(int, line[:4])) for line in lines(EPOCH, output(script))]
    everyone = itertools.product(range(size), range(50), [32], [2048 // (32 * size)])
    assert sorted(printed) == sorted(everyone)
    assert len(losses(output(script))) == 50  # and not one per rank
    if script != SINGLE:
        assert lines(GLOBAL_BATCH, output(script)) == ["64"]


@each_script
def test_one_rank_saves_every_tenth_epoch(script, output, folders):
    """A save is said once in the whole job, and one file is there in the end."""
    assert lines(SAVED, output(script)) == ["9", "19", "29", "39", "49"]
    name = "checkpoint.pt" if script in (SINGLE, MULTI) else "snapshot.pt"
    assert [path.name for path in folders[script].rglob("[!.]*.pt*")] == [name]


@pytest.mark.parametrize("script", [TORCHRUN_SCRIPT, MULTINODE])
def test_every_launcher_trains_the_same(script, output):
    """Two processes learn the same in every script, on one machine or two."""
    assert losses(output(script)) == losses(output(MULTI))


@pytest.fixture(scope="module")
def two_at_once(tmp_path_factory):
    """multigpu.py `3 1` and `1 3`, started together: their outputs and folders."""
    folders = [tmp_path_factory.mktemp("run") for _ in range(2)]
    env = CPU | {"TMPDIR": str(tmp_path_factory.mktemp("temporary"))}
    commands = [python(MULTI, 3, 1), python(MULTI, 1, 3)]
    started = [start(*each, **env) for each in zip(commands, folders, strict=True)]
    ended = [finish(process, 100) for process in started]
    assert [status for status, _ in ended] == [0, 0], ended
    files = [name for name in os.listdir(env["TMPDIR"]) if "torchinductor" not in name]
    assert files == []  # but an empty folder, which torch makes for what it compiles
    return [text for _, text in ended], folders


def test_two_runs_on_one_machine_do_not_meet(two_at_once):
    """Each has a store of its own, which is gone with it; the first number is the epochs."""
    (three, one), _ = two_at_once
    assert len(losses(three)) == 3 and lines(SAVED, three) == ["0", "1", "2"]
    assert len(losses(one)) == 1 and lines(SAVED, one) == ["0"]
    assert losses(one) == losses(three)[:1]


@each_script
def test_help_tells_what_the_global_batch_size_is(script, monkeypatch, capsys):
    """`--help` needs no launcher, and says what the sizes mean and how to start the script."""
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit) as end:
        importlib.import_module(Path(script).stem).parse_args()
    text, mistakes = capsys.readouterr()
    assert end.value.code == 0 and mistakes == ""
    assert "global batch size = batch_size * number of processes" in text.lower()
    for flag in ("total_epochs", "save_every", "--batch_size", "--seed", "--wandb"):
        assert flag in text
    assert "--nproc " in text if script == MULTI else f"{Path(script).name} " in text


ARGUMENTS = [
    ["3", "1"],
    ["--total_epochs", "3", "--save_every", "1"],
    ["--total-epochs", "3", "--save-every", "1"],
    ["--batch-size=32", "3", "--seed=0", "1", "--wandb=disabled"],
    ["3", "--save_every=1"],
]


@pytest.mark.parametrize("script", [single_gpu, multigpu, multigpu_torchrun])
@pytest.mark.parametrize("typed", ARGUMENTS, ids=" ".join)
def test_arguments_by_position_and_by_name(script, typed, monkeypatch):
    """Positions and options, hyphens and underscores, before or after: all mean the same."""
    monkeypatch.setattr(sys, "argv", ["script", *typed])
    args = vars(script.parse_args())
    assert vars(options(save_every=1)).items() <= args.items()


# Several processes learn what one learns


def train(rank, init_method, script, world_size, args, folder):
    """Run `main` of single_gpu.py or multigpu.py, as one of its processes, in `folder`."""
    os.makedirs(folder, exist_ok=True)
    os.chdir(folder)
    with open(f"rank{rank}.log", "w") as log, contextlib.redirect_stdout(log):
        if script == SINGLE:
            single_gpu.main(args)
        else:
            multigpu.main(rank, world_size, init_method, args)


def trained(script, world_size, folder, **changed):
    """Train 3 epochs and return the weights and the losses."""
    in_processes(world_size, train, script, world_size, options(**changed), folder)
    logs = [Path(folder, f"rank{rank}.log").read_text() for rank in range(world_size)]
    return weights(folder), losses("".join(logs))


def test_the_split_into_processes_does_not_change_what_is_learned(two_at_once):
    """2 x 32 equals 1 x 64 and 4 x 16, in weights and in the loss that is printed."""
    (text, _), (folder, _) = two_at_once
    for size, batch in ((1, 64), (4, 16)):
        learned, printed = trained(MULTI, size, f"{size}x{batch}", batch_size=batch)
        torch.testing.assert_close(learned, weights(folder))
        assert printed == pytest.approx(losses(text), abs=1e-5)


def test_the_printed_loss_weighs_every_sample_alike():
    """The loss of two ranks is that of one process over all, though the last batch is smaller."""
    _, printed = trained(MULTI, 1, "one", batch_size=96, seed=7)
    _, printed_by_two = trained(MULTI, 2, "two", batch_size=48, seed=7)
    assert 2048 % 96 > 0 and printed == pytest.approx(printed_by_two, abs=1e-5)
    mean = mean_loss_in_the_first_epoch(batch_size=96, seed=7)
    assert printed[0] == pytest.approx(mean, abs=1e-5)


def mean_loss_in_the_first_epoch(batch_size, seed):
    """The same training in plain PyTorch: the mean over the samples of one epoch."""
    dataset, model, optimizer = multigpu.load_train_objs(seed)
    order = torch.tensor(list(DistributedSampler(dataset, num_replicas=1, rank=0, seed=seed)))
    total = 0.0
    for batch in order.split(batch_size):
        loss = F.cross_entropy(model(dataset.features[batch]), dataset.labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * len(batch)
    return total / len(dataset)


@pytest.mark.parametrize("script", [SINGLE, MULTI], ids=lambda script: Path(script).stem)
def test_the_printed_loss_of_a_model_in_bfloat16(script):
    """A sum in bfloat16 would stop growing: it is the loss of all samples, as in float32."""
    data = "train_set = MyTrainDataset(16384)\n    train_set.features = train_set.features"
    own = edited(
        script,
        "own.py",
        ("train_set = MyTrainDataset(2048)", f"{data}.bfloat16()"),
        ("= build_model()", "= build_model().bfloat16()"),
        ("lr=0.05", "lr=0.0"),
    )
    status, text = quickly(own, 1, 1, "--batch_size", 16, nproc=world_size(script))
    assert status == {0}, text
    torch.manual_seed(0)
    model, dataset = build_model(), MyTrainDataset(16384)
    loss = F.cross_entropy(model(dataset.features), dataset.labels).item()
    assert losses(text) == [pytest.approx(loss, abs=0.01)]


def test_a_run_can_be_repeated_bit_by_bit():
    """The same command ends with the same weights and prints the same losses."""
    one, again = (trained(SINGLE, 1, name, total_epochs=1) for name in ("one", "again"))
    torch.testing.assert_close(one[0], again[0], rtol=0, atol=0)
    assert one[1] == again[1]


def test_the_seed_decides_weights_and_order():
    """`--seed` fixes both, whatever else draws random numbers, and another seed changes both."""
    first, again, other = [], [], []
    for seed, seen in ((0, first), (0, again), (1, other)):
        dataset, model, _ = single_gpu.load_train_objs(seed)
        torch.seed()
        loader = single_gpu.prepare_dataloader(dataset, 32, seed, torch.device("cpu"))
        seen += [model[0].weight.tolist(), list(loader.sampler)]
    assert first == again
    assert first[0] != other[0] and first[1] != other[1]


@each_script
def test_a_plain_dataset_drops_in(script):
    """A list of samples is trained like the toy, to the last bit."""
    samples = "[sample for sample in zip(*vars(MyTrainDataset(2048)).values())]"
    plain = edited(script, "plain.py", ("MyTrainDataset(2048)", samples))
    saved = []
    for name, each in (("toy", script), ("plain", plain)):
        status, text = quickly(each, 1, nproc=world_size(script), cwd=name)
        assert status == {0}, text
        (path,) = Path(name).glob("*.pt")
        content = torch.load(path, weights_only=True)
        saved.append((content.get("model", content), losses(text)))
    torch.testing.assert_close(*saved, rtol=0, atol=0)


@pytest.mark.parametrize(
    "total, every, saves",
    [(5, 3, "24"), (5, 5, "4"), (1, 10, "0"), (3, 1, "012")],
)
@pytest.mark.parametrize("script", [SINGLE, MULTI], ids=lambda script: Path(script).stem)
def test_save_points(script, total, every, saves):
    """It saves every `save_every` epochs, and always after the last."""
    in_processes(1, train, script, 1, options(total_epochs=total, save_every=every), ".")
    text = Path("rank0.log").read_text()
    assert lines(SAVED, text) == list(saves)
    assert len(losses(text)) == total
    assert weights()


# What a Trainer of two ranks does, seen from inside: the ranks report, the tests compare


class Recorder(Dataset):
    """`size` equal samples; writes down which are asked for, and takes `seconds` for a batch."""

    def __init__(self, size, seconds=0.0):
        self.size, self.seconds, self.asked = size, seconds, []

    def __len__(self):
        return self.size

    def __getitems__(self, indices):
        self.asked.append(indices)
        time.sleep(self.seconds)
        return [(torch.ones(20), 0) for _ in indices]


def trainer_on(script, dataset, batch_size=4):
    """The script's own Trainer and DataLoader, with a model that has Dropout."""
    model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(20, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train_data = script.prepare_dataloader(dataset, batch_size, 0, torch.device("cpu"))
    return script.Trainer(model, train_data, optimizer, torch.device("cpu"), save_every=1)


def epoch_on(script, size, epoch):
    """Train one epoch of a new Trainer: indices, printed line, dropout's draws, iterators."""
    dataset, draws, iterators = Recorder(size), [], []
    trainer = trainer_on(script, dataset)
    dropout = next(m for m in trainer.model.modules() if isinstance(m, torch.nn.Dropout))
    dropout.register_forward_hook(lambda _, __, out: draws.append(out.tolist()))
    start_iterator = DataLoader.__iter__
    printed = io.StringIO()
    try:
        DataLoader.__iter__ = lambda self: iterators.append(1) or start_iterator(self)
        with contextlib.redirect_stdout(printed):
            trainer._run_epoch(epoch)
    finally:
        DataLoader.__iter__ = start_iterator
    return {
        "batches": dataset.asked,
        "order": [index for batch in dataset.asked for index in batch],
        "steps": lines(EPOCH, printed.getvalue())[0][3],
        "draws": draws,
        "iterators": len(iterators),
    }


def bar_of(script, seconds, terminal=True):
    """What an epoch of 5 steps of `seconds` each writes to stderr, a terminal or a file."""
    size = 5 if script is single_gpu else 10
    trainer = trainer_on(script, Recorder(size, seconds), batch_size=1)
    reader, writer = pty.openpty() if terminal else os.pipe()
    if terminal:  # tqdm draws nothing on one of size 0 x 0
        fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    with open(writer, "w") as stderr:
        with contextlib.redirect_stderr(stderr):
            trainer._run_epoch(0)
        stderr.flush()
        written = select.select([reader], [], [], 0.3)[0]
        return os.read(reader, 65536).decode() if written else ""


def fingerprint(dataset):
    samples = dataset.features.numpy().tobytes() + dataset.labels.numpy().tobytes()
    return hashlib.sha256(samples).hexdigest()


def check_pickles(loader):
    pickle.loads(pickle.dumps((loader.dataset, loader.sampler, loader.collate_fn)))


def report_from_inside(rank, init_method, folder):
    torch.manual_seed(rank)
    torch.set_num_threads(rank + 1)
    data = fingerprint(MyTrainDataset(2048))
    device = multigpu.ddp_setup(rank, 2, init_method)
    report = {
        "device": str(device),
        "data": data,
        "epochs": [epoch_on(multigpu, 64, epoch) for epoch in (0, 1, 1)],
        "sizes": {size: epoch_on(multigpu, size, 0) for size in (63, 64, 65)},
        "slow": bar_of(multigpu, 0.4),
        "quick": bar_of(multigpu, 0.0),
        "file": bar_of(multigpu, 0.4, terminal=False),
    }
    check_pickles(multigpu.prepare_dataloader(MyTrainDataset(64), 32, 0, device))
    torch.save(report, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The reports of two ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    in_processes(2, report_from_inside, folder)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in (0, 1)]


@pytest.mark.parametrize("given, threads", [(None, "2"), ("3", "3")])
def test_processes_on_the_cpu_share_the_cores(ranks, monkeypatch, given, threads):
    """Two processes on four cores are told to compute with two threads each, or what was set."""
    assert [rank["device"] for rank in ranks] == ["cpu", "cpu"]
    monkeypatch.delenv("OMP_NUM_THREADS")
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with plumbing.local_job(2):
            assert os.environ["OMP_NUM_THREADS"] == threads
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_the_dataset_is_the_same_in_every_process(ranks):
    """The same bytes, whatever the seed and the number of threads."""
    torch.manual_seed(123)
    assert ranks[0]["data"] == ranks[1]["data"] == fingerprint(MyTrainDataset(2048))


def test_each_rank_has_its_own_share_of_the_data(ranks):
    """The shares have no sample in common and are the whole dataset together."""
    for zero, one in zip(*(rank["epochs"] for rank in ranks), strict=True):
        assert sorted(zero["order"] + one["order"]) == list(range(64))


def test_each_epoch_has_another_order(ranks):
    """`set_epoch` is called before the epoch's first batch, in a run that resumes as well."""
    for rank in ranks:
        first, second, after_a_resume = (epoch["order"] for epoch in rank["epochs"])
        assert first != second == after_a_resume
        assert sorted(first) != first


def test_dropout_differs_between_ranks_and_epochs_but_not_between_runs(ranks):
    """Random numbers of the model come from the seed, the epoch and the rank."""
    (zero, zero_next, again), (one, one_next, one_again) = (
        [epoch["draws"] for epoch in rank["epochs"]] for rank in ranks
    )
    different = [zero, zero_next, one, one_next]
    assert all(a != b for a, b in itertools.combinations(different, 2))
    assert (again, one_again) == (zero_next, one_next)


@pytest.mark.parametrize("size, steps", [(63, "8"), (64, "8"), (65, "9")])
def test_equal_steps_on_all_ranks(size, steps, ranks):
    """Whatever the size of the dataset, no rank waits for one that has no batch left."""
    reports = [rank["sizes"][size] for rank in ranks]
    assert [report["steps"] for report in reports] == [steps, steps]
    assert [len(report["batches"]) for report in reports] == [int(steps)] * 2
    assert set(reports[0]["order"] + reports[1]["order"]) == set(range(size))


def test_an_epoch_starts_one_iterator(ranks):
    """Each iterator starts workers and draws random numbers: an epoch needs one."""
    assert {epoch["iterators"] for rank in ranks for epoch in rank["epochs"]} == {1}


def test_a_bar_shows_slow_epochs_of_rank_0_on_a_terminal(ranks):
    """No bar from other ranks, none for an epoch that takes under a second, none in a file."""
    assert re.search(r"\r.*\d/5 \[", ranks[0]["slow"])
    assert ranks[1]["slow"] == ""
    assert [rank[what] for rank in ranks for what in ("quick", "file")] == [""] * 4


def single_gpu_from_inside(rank, init_method, folder):
    torch.save(
        {"slow": bar_of(single_gpu, 0.4), "epoch": epoch_on(single_gpu, 63, 0)},
        f"{folder}/single.pt",
    )


def test_single_gpu_from_inside(tmp_path):
    """single_gpu.py has the same bar, every sample once in an epoch, and one iterator."""
    in_processes(1, single_gpu_from_inside, tmp_path)
    report = torch.load("single.pt", weights_only=True)
    assert re.search(r"\r.*\d/5 \[", report["slow"])
    assert sorted(report["epoch"]["order"]) == list(range(63)) != report["epoch"]["order"]
    assert report["epoch"]["iterators"] == 1


def test_what_a_data_loader_hands_to_its_workers_can_be_pickled(ranks):
    """Workers that are started anew, as on macOS and Windows, get dataset and functions pickled."""
    check_pickles(
        single_gpu.prepare_dataloader(MyTrainDataset(64), 32, 0, torch.device("cpu"))
    )  # the ranks have done the same with the one of multigpu.py
