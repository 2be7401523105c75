"""Measure the ladder against bare code that does the same, in one run on one machine.

Run:  python benchmarks/speed.py            all rows, which takes some minutes
      python benchmarks/speed.py --only data
      python benchmarks/speed.py --only whole --against ../another-checkout

The ways that a row compares take turns, a first turn of each is not counted, and every process
has one thread. `ours` and `other` are medians over the turns; `ratio` is the median of ours / other
within a turn, so that a machine that slows down for a while slows both.

data   Samples per second (more is better). Ours is an epoch of single_gpu.py. The bare loop makes
       the same steps (model, optimizer, batch) on slices of one tensor that lies on the device,
       unshuffled: once with nothing else, once with the sum of the loss that an epoch prints. The
       last row is the same Trainer on a DataLoader that fetches and collates sample by sample.
start  Seconds from the start of a script to its last "Rank: ..." line. Bare is a program that only
       imports torch, makes a process group as large as the script's, if that has one, and prints.
whole  Seconds of a whole run of 50 epochs with a save every 10, in an empty folder. The other is
       the same script of the folder `--against`, if there is one: what a change costs, or gains.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from plumbing.devices import count_gpus
from single_gpu import Trainer, load_train_objs, prepare_dataloader

ROOT = Path(__file__).resolve().parent.parent
PROCESSES = count_gpus() or 2
LIMIT = 300  # seconds for one launch
BATCH_SIZE = 32
EPOCHS_PER_ROUND = 10  # a single epoch is short, and soon disturbed

BARE_SINGLE = "import torch; print('Rank: 0', flush=True)"
BARE_SPAWN = """
import os
import sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def main(rank, world_size, store):
    device, backend = None, "gloo"
    if torch.cuda.is_available():
        device, backend = torch.device("cuda", rank), "nccl"
        torch.cuda.set_device(device)
    dist.init_process_group(backend, store, rank=rank, world_size=world_size, device_id=device)
    print(f"Rank: {rank}\\n", end="", flush=True)  # in one piece
    dist.barrier()  # the first to be connected must not leave before the last one is
    dist.destroy_process_group()

if __name__ == "__main__":
    world_size, store = int(sys.argv[1]), f"file://{os.getcwd()}/store"
    mp.spawn(main, args=(world_size, store), nprocs=world_size)
"""


def take_turns(rounds, *ways):
    """Call each of `ways` once a round; return a list per way of what it returned but at first."""
    turns = [[way() for way in ways] for _ in range(rounds + 1)]
    return zip(*turns[1:], strict=True)


def print_row(name, ours, other=()):
    cells = [statistics.median(ours)]
    if other:
        ratios = [mine / its for mine, its in zip(ours, other, strict=True)]
        cells += [statistics.median(other), statistics.median(ratios)]
    print(f"{name:58}", *(f"{cell:8.3f}" for cell in cells), flush=True)


def ladder_epoch(device, sample_by_sample=False):
    """Return a function that trains one epoch as single_gpu.py does."""
    dataset, model, optimizer = load_train_objs(seed=0)
    if sample_by_sample:
        dataset = TensorDataset(*dataset[:])
    train_data = prepare_dataloader(dataset, BATCH_SIZE, seed=0, device=device)
    trainer = Trainer(model, train_data, optimizer, device, save_every=1)
    return lambda: trainer._run_epoch(0)


def bare_epoch(device, with_loss_sum):
    """Return a function that trains one epoch on slices of a tensor that lies on the device."""
    dataset, model, optimizer = load_train_objs(seed=0)
    model.to(device)
    features, labels = (tensor.to(device) for tensor in dataset[:])

    def epoch():
        loss_sum = 0.0
        for i in range(0, len(labels), BATCH_SIZE):
            source, targets = features[i : i + BATCH_SIZE], labels[i : i + BATCH_SIZE]
            optimizer.zero_grad()
            loss = F.cross_entropy(model(source), targets)
            loss.backward()
            optimizer.step()
            if with_loss_sum:
                loss_sum += loss.detach() * len(source)
        float(loss_sum if with_loss_sum else loss.detach())  # waits for the device, as ours does

    return epoch


def measure_data(args):
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")

    def thousand_samples_per_second(epoch):
        begin = time.perf_counter()
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            epoch()
        return 2.048 / (time.perf_counter() - begin)

    epochs = [
        ladder_epoch(device),
        bare_epoch(device, with_loss_sum=False),
        bare_epoch(device, with_loss_sum=True),
        ladder_epoch(device, sample_by_sample=True),
    ]
    ways = [lambda epoch=epoch: thousand_samples_per_second(epoch) for epoch in epochs]
    ours, bare, with_loss_sum, by_sample = take_turns(args.rounds * EPOCHS_PER_ROUND, *ways)
    print_row("data   1000 samples/s, single_gpu.py : bare loop", ours, bare)
    print_row("data   1000 samples/s, single_gpu.py : with loss sum", ours, with_loss_sum)
    print_row("data   1000 samples/s, sample by sample : with loss sum", by_sample, with_loss_sum)


def launch(*command, processes=1):
    """Run python with `command`; return the seconds to the last start line and to the end."""
    output, start_lines = "", []
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, *map(str, command)],
            cwd=folder,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        limit = threading.Timer(LIMIT, process.terminate)
        limit.start()
        for line in process.stdout:
            output += line
            if line.startswith("Rank: "):
                start_lines.append(time.perf_counter() - begin)
        status = process.wait()
        end = time.perf_counter() - begin
        limit.cancel()
    if status != 0 or len(start_lines) != processes:
        sys.exit(f"{output}\nexit status {status}, {len(start_lines)} start lines: {command}")
    return start_lines[-1], end


def measure_start(args):
    single, bare_single = take_turns(
        args.rounds,
        lambda: launch(ROOT / "single_gpu.py", 1, 1)[0],
        lambda: launch("-c", BARE_SINGLE)[0],
    )
    print_row("start  seconds, single_gpu.py : import torch", single, bare_single)
    with tempfile.TemporaryDirectory() as folder:
        bare_script = Path(folder) / "bare_spawn.py"
        bare_script.write_text(BARE_SPAWN)
        multi, bare_multi = take_turns(
            args.rounds,
            lambda: launch(ROOT / "multigpu.py", 1, 1, processes=PROCESSES)[0],
            lambda: launch(bare_script, PROCESSES, processes=PROCESSES)[0],
        )
    print_row(f"start  seconds, multigpu.py : mp.spawn, {PROCESSES} processes", multi, bare_multi)


def seconds_of_run(processes, *command):
    return launch(*command, processes=processes)[1]


def measure_whole(args):
    folders = [ROOT, args.against] if args.against else [ROOT]
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={PROCESSES}")
    for script, processes, launcher in (
        ("single_gpu.py", 1, ()),
        ("multigpu.py", PROCESSES, ()),
        ("multigpu_torchrun.py", PROCESSES, torchrun),
    ):
        commands = [(*launcher, folder / script, args.epochs, 10) for folder in folders]
        ways = [partial(seconds_of_run, processes, *command) for command in commands]
        name = f"whole  seconds, {script}" + f", {processes} processes" * (processes > 1)
        if args.against:
            name += f" : in {args.against.name}"
        print_row(name, *take_turns(args.rounds, *ways))


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7, help="turns that count (7)")
    parser.add_argument("--only", choices=("data", "start", "whole"), help="measure just this")
    parser.add_argument("--epochs", type=int, default=50, help="epochs of a whole run (50)")
    parser.add_argument("--against", type=Path, help="another checkout, for the rows `whole`")
    args = parser.parse_args()
    for name in ("rounds", "epochs"):
        if getattr(args, name) < 1:
            parser.error(f"{name}: give a whole number from 1, not {getattr(args, name)}")
    if args.against:
        args.against = args.against.absolute()
        if not (args.against / "single_gpu.py").exists():
            parser.error(f"against: no single_gpu.py in {args.against}")
    return args


if __name__ == "__main__":
    args = parse_args()
    torch.set_num_threads(1)
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    print(f"torch {torch.__version__} | {', '.join(gpus) or 'CPU'} | {args.rounds} rounds")
    print(f"{'':58} {'ours':>8} {'other':>8} {'ratio':>8}", flush=True)
    for measure in (measure_data, measure_start, measure_whole):
        if args.only is None or measure.__name__.endswith(args.only):
            measure(args)
