"""How a script of the ladder can be run, so that something can be seen: on the CPU, in seconds.

Each way takes the path of a script and an empty folder, and returns what the run left.
"""

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from exercises import ranks
from exercises.ranks import ROOT

OBSERVE = str(Path(__file__).with_name("observe.py"))
EMPTY = ("MyTrainDataset(2048)", "MyTrainDataset(0)")
FAILING = ("MyTrainDataset(2048)", "MyTrainDataset(None)")
EVAL_MODE = ("model = build_model()", "model = build_model().eval()")
SGD = "torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)"
ADAM, ADAMW = ((SGD, f"torch.optim.{name}(model.parameters())") for name in ("Adam", "AdamW"))
INFINITE = (
    ("build_model()", 'build_model()\n    model.register_buffer("seen", torch.zeros(()))'),
    ("loss.backward()", 'loss.backward()\n        self.model.module.seen.fill_(float("inf"))'),
)


@dataclass
class Run:
    """What is left of a run of a script."""

    folder: Path
    statuses: set
    output: str
    ranks: list[dict]  # what each rank saw that came to its end: observe.py says what that is
    before: "Run | None" = None  # the run that this one goes on from

    @property
    def losses(self):
        """The loss that each rank printed for the first epoch."""
        return [float(loss) for loss in re.findall(r"Epoch 0 \| .*Loss: (\S+)", self.output)]


def observed(script, folder, *args, world_size=2, seconds=15, before=None, **options) -> Run:
    """Run `main` in processes that have imported torch, each with a disk (a folder) of its own.
    Unless args say otherwise, the dataset of 2048 samples is one step."""
    args = (script, "--batch_size", -(-2048 // world_size), *args)
    options |= {"nproc": world_size, "cwd": folder, "seconds": seconds}
    statuses, output = ranks.quickly(OBSERVE, *args, **options)
    number = 0 if before is None else 1
    whole = "largest_file" not in options  # or what the ranks saw is cut off as well
    files = sorted(Path(folder).glob(f"rank*/seen{number}.pt")) if whole else []
    seen = [torch.load(file, weights_only=True) for file in files]
    return Run(Path(folder), statuses, output, seen, before)


def in_ranks(script, folder):
    """Two processes, three epochs, and a save after the second and the last."""
    return observed(script, folder, 3, 2)


SHARED = ("--snapshot_path", "../snapshot.pt")  # the ranks of one machine have one disk


def resumed(script, folder):
    """Two epochs, and two more in a second run, which has a different seed."""
    first = observed(script, folder, 2, 1, *SHARED)
    return observed(script, folder, 4, 1, *SHARED, "--seed", 7, before=first)


def with_a_different_optimizer(script, folder):
    """As `resumed`, but the first run has Adam, and the second AdamW."""
    first = observed(changed(script, folder, ADAM), folder, 2, 1, *SHARED)
    return observed(changed(script, folder, ADAMW), folder, 4, 1, *SHARED, before=first)


def with_a_buffer_that_becomes_infinite(script, folder):
    """As the statistics of BatchNorm may, while the loss and the weights stay finite."""
    return observed(changed(script, folder, *INFINITE), folder, 2, 2)


def with_a_model_in_eval_mode(script, folder):
    """The model is loaded as from_pretrained() returns it."""
    return in_ranks(changed(script, folder, EVAL_MODE), folder)


def stayed(script, folder):
    """As `resumed`, on two machines: only that of rank 0 has a snapshot, and it is rank 0 again."""
    first = observed(script, folder, 2, 1)
    (Path(folder) / "rank1" / "snapshot.pt").unlink(missing_ok=True)
    return observed(script, folder, 4, 1, before=first)


def moved(script, folder):
    """As `stayed`, but what was rank 0 is rank 1 in the second run."""
    first, folder = observed(script, folder, 2, 1), Path(folder)
    (folder / "rank1" / "snapshot.pt").unlink(missing_ok=True)
    if (folder / "rank0" / "snapshot.pt").exists():
        (folder / "rank0" / "snapshot.pt").rename(folder / "rank1" / "snapshot.pt")
    return observed(script, folder, 4, 1, before=first)


def with_two_snapshots_of_one_epoch(script, folder):
    """Two machines, each with a snapshot of the same job and epoch. The momentum differs."""
    first, folder = observed(script, folder, 2, 1), Path(folder)
    snapshot = torch.load(folder / "rank0" / "snapshot.pt", weights_only=True)
    for state in snapshot["optimizer"]["state"].values():
        state["momentum_buffer"] += 1
    torch.save(snapshot, folder / "rank1" / "snapshot.pt")
    return observed(script, folder, 4, 1, before=first)


def with_snapshots_of_two_jobs(script, folder):
    """Two machines, each with the snapshot of a job that the other knows nothing of."""
    for rank in range(2):
        other = Path(folder) / f"job{rank}"
        observed(script, other, 1 + rank, 1, world_size=1)
        (Path(folder) / f"rank{rank}").mkdir()
        (other / "rank0" / "snapshot.pt").rename(Path(folder) / f"rank{rank}" / "snapshot.pt")
    return observed(script, folder, 4, 1, seconds=20)


def with_another_seed_on_rank_1(script, folder):
    return observed(script, folder, 1, 1, seconds=20, last=("--seed", 5))


def with_a_rank_that_stops(script, folder):
    """Rank 1 stands still in its second epoch. The others have a time-out of 3 s."""
    text = Path(script).read_text()
    old = "    def _run_epoch(self, epoch):\n"
    stop = "        if epoch == 1 and self.rank == 1:\n            os.kill(os.getpid(), 19)\n"
    path = Path(folder) / "stops.py"
    path.write_text(text.replace(old, old + stop))
    return observed(str(path), folder, 3, 3, "--timeout", 3, seconds=14)


def with_a_full_disk(script, folder):
    """The second of two saves finds no room."""
    first = observed(script, folder, 1, 1, *SHARED)
    small = {"largest_file": 100_000, "before": first}
    return observed(script, folder, 2, 1, *SHARED, **small)


def command(script, folder, *launcher):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(ROOT)
    limit = ["timeout", "-k", "1", "60"]
    arguments = [*limit, sys.executable, *launcher, script, "1", "1", "--batch_size", "1024"]
    how = {"cwd": folder, "env": environment, "text": True}
    done = subprocess.run(arguments, stdout=-1, stderr=subprocess.STDOUT, **how)
    return Run(Path(folder), {done.returncode}, done.stdout, [])


def typed(script, folder):
    """Run the script by a command, as a reader does: python script.py 1 1."""
    return command(script, folder)


def changed(script, folder, *changes):
    text, path = Path(script).read_text(), Path(folder) / "changed.py"
    for old, new in changes:
        text = text.replace(old, new, 1)
    path.write_text(text)
    return str(path)


def as_on_a_mac(script, folder):
    """As `in_ranks`, where torch finds a GPU (MPS) that has no backend, and we train on the CPU."""
    found = """import torch

torch._C._get_accelerator = lambda: torch.device("mps")
torch.accelerator.current_accelerator = lambda check_available=False: torch.device("mps")
"""
    return in_ranks(changed(script, folder, ("import torch\n", found)), folder)


def typed_with_no_data(script, folder):
    """By a command, with a dataset that has no sample."""
    return typed(changed(script, folder, EMPTY), folder)


def failing_under_torchrun(script, folder):
    """By torchrun, with a dataset that cannot be made."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1")
    return command(changed(script, folder, FAILING), folder, *launcher)


def by_itself(script, folder):
    """One rank, nobody looking on."""
    return Run(Path(folder), *ranks.quickly(script, 1, 1, cwd=folder, seconds=30), [])


# Runs ddp_setup of the script in sys.argv[1], as if the process saw sys.argv[2] GPUs. There are
# none: functions in place of those of torch print which GPU the script takes.
STAND_IN = """\
import plumbing, runpy, sys
import torch, torch.distributed as dist
import datautils, torch.distributed.elastic.multiprocessing.errors, torch.utils.data.distributed

class Device:
    def __init__(self, kind, index=0):
        kind, index = ("cuda", kind) if isinstance(kind, int) else (kind, index)
        self.type, _, number = kind.partition(":")
        if self.type.isdigit():
            raise RuntimeError(f"Invalid device string: '{kind}'")  # as torch does
        self.index = int(number or index)

    def __str__(self):
        return f"{self.type}:{self.index}"

gpus = int(sys.argv.pop(2))
plumbing.count_gpus = plumbing.devices.count_gpus = lambda: gpus
dist.init_process_group = lambda backend=None, *_, **__: print("BACKEND", backend)
torch.device = Device
dist.get_default_backend_for_device = lambda device: "nccl"
torch.accelerator.set_device_index = torch.cuda.set_device = lambda gpu: print("CHOOSES", gpu)
by_torchrun = "mp.spawn" not in open(sys.argv[1]).read()
script = runpy.run_path(sys.argv.pop(1))
if "ddp_setup" not in script:
    sys.exit("ERROR: the file has no ddp_setup any more (--reset begins anew)")
ddp_setup = script["ddp_setup"]
print("IS RANK", 2 if by_torchrun else 1, "AND SEES", gpus)
device = ddp_setup(600) if by_torchrun else ddp_setup(1, 2, "file:///tmp/store")
print("TAKES", device)
"""


def on_stand_in_gpus(script, folder, in_sight=2):
    """Run ddp_setup alone, in the second process of a machine with two GPUs. None is needed.

    Under torchrun it is rank 2: the job has one more machine, with one GPU and rank 0.
    """
    stand_in = Path(folder) / "stand_in.py"
    stand_in.write_text(STAND_IN)
    environment = {"RANK": "2", "LOCAL_RANK": "1", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "2"}
    done = ranks.quickly(str(stand_in), script, in_sight, cwd=folder, seconds=15, **environment)
    return Run(Path(folder), *done, [])


def seeing_one_stand_in_gpu(script, folder):
    """As `on_stand_in_gpus`, but the site shows each process one GPU, its own, as GPU 0."""
    return on_stand_in_gpus(script, folder, in_sight=1)


def reference(script, way):
    """What `way` sees of a script of the ladder."""
    with tempfile.TemporaryDirectory() as folder:
        return way(str(ROOT / script), folder)


@cache
def one_process() -> Run:
    """single_gpu.py in one process, with the doubled batch: two processes have to equal that."""
    return reference("single_gpu.py", lambda *given: observed(*given, 3, 2, world_size=1))


@cache
def unbroken() -> Run:
    """multigpu_torchrun.py, four epochs in one run: a resumed run has to equal that."""
    return reference("multigpu_torchrun.py", lambda *given: observed(*given, 4, 1))
