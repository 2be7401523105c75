"""Run one rank of the script in sys.argv[1], in a folder of its own, and save what it did there.

checks.py starts it, by `ranks.quickly`. What the script has is not replaced, only looked at.
"""

import gc
import io
import os
import runpy
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._python_dispatch import TorchDispatchMode

import plumbing
from exercises.ranks import leave_the_lock_to_rank_0

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
path = sys.argv.pop(1)
text = Path(path).read_text()
by_torchrun = "ddp_setup" in text and "mp.spawn" not in text
if not by_torchrun:
    for name in plumbing.launch.LAUNCHER_SETS:
        del os.environ[name]

# Of each epoch: its number, the samples in their order, whether the model was in training mode,
# numbers that it drew in its passes, how often the host took a value out of a tensor, and how often
# until each pass of the model.
seen = {"epochs": [], "saves": [], "snapshots sent": 0, "group is left": True}
script = runpy.run_path(path)
if missing := {"Trainer", "load_train_objs", "main", "parse_args"} - script.keys():
    sys.exit(f"ERROR: the file has no {min(missing)} any more (--reset begins anew)")
script = script["parse_args"].__globals__
sys.argv[0] = path
Trainer, load_train_objs = script["Trainer"], script["load_train_objs"]
run_epoch, train, destroy = Trainer._run_epoch, Trainer.train, dist.destroy_process_group
start_wandb, torch_save, numpy = plumbing.start_wandb, torch.save, torch.Tensor.numpy
all_broadcast_snapshot = plumbing.all_broadcast_snapshot


class Reads(TorchDispatchMode):
    """Counts `.item()`, `float(tensor)` and what else makes the host wait for a value."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        seen["epochs"][-1]["reads"] += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **kwargs or {})


def counted(method):
    """The same for `.tolist()`, `.cpu()` and `.numpy()`, which torch does not tell a mode."""

    def count(*args, **options):
        if seen["epochs"]:
            seen["epochs"][-1]["reads"] += 1
        return method(*args, **options)

    return count


def load_and_look(seed):
    dataset, model, optimizer, *more = load_train_objs(seed)

    class Watched(type(dataset)):
        def __getitem__(self, index):
            if seen["epochs"]:
                seen["epochs"][-1]["samples"].append(index)
            return super().__getitem__(index)

    dataset.__class__ = Watched

    def look(model, *_):
        epoch = seen["epochs"][-1]
        epoch["in training mode"] = model.training
        epoch["draws"].append(numpy(torch.rand(())).item())
        epoch["reads until pass"].append(epoch["reads"])

    model.register_forward_hook(look)
    return dataset, model, optimizer, *more


def run_epoch_and_look(trainer, epoch):
    numbers = {"samples": [], "draws": [], "reads until pass": []}
    seen["epochs"].append({"epoch": epoch, "reads": 0, **numbers})
    with Reads():
        run_epoch(trainer, epoch)


def state(trainer):
    """Weights and the optimizer's state as they are now."""
    model = trainer.model.module if isinstance(trainer.model, DDP) else trainer.model
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    moments = [
        value.clone()
        for state in trainer.optimizer.state.values()
        for value in state.values()
        if torch.is_tensor(value)
    ]
    rates = [float(group["lr"]) for group in trainer.optimizer.param_groups]
    return {"weights": weights, "moments": moments, "rates": rates}


def train_and_look(trainer, total_epochs):
    seen["begin"] = state(trainer)
    train(trainer, total_epochs)
    seen["end"] = state(trainer)


def look_and_destroy():
    seen["DDP is alive"] = any(type(each) is DDP for each in gc.get_objects())
    torch_save(seen, file)  # now: what comes may hang
    destroy()


def look_and_start_wandb(args, job_id=None, group=None):
    seen["wandb"] = {"id": job_id, "group": group}
    start_wandb(args, job_id, group)


def save_and_look(obj, f, *args, **options):
    if not isinstance(f, io.BytesIO):  # plumbing tries in memory what can be saved
        seen["saves"].append(len(seen["epochs"]))
    torch_save(obj, f, *args, **options)


def broadcast_and_look(*args, **options):
    seen["snapshots sent"] += 1
    return all_broadcast_snapshot(*args, **options)


script["load_train_objs"] = load_and_look
Trainer._run_epoch, Trainer.train = run_epoch_and_look, train_and_look
dist.destroy_process_group, plumbing.start_wandb = look_and_destroy, look_and_start_wandb
torch.save, plumbing.all_broadcast_snapshot = save_and_look, broadcast_and_look
for name in ("cpu", "numpy", "tolist"):
    setattr(torch.Tensor, name, counted(getattr(torch.Tensor, name)))
Path(f"rank{RANK}").mkdir(exist_ok=True)
leave_the_lock_to_rank_0(RANK)
args = script["parse_args"]() if not by_torchrun else None
store = f"file://{os.path.abspath('store')}"
os.chdir(f"rank{RANK}")
file = f"seen{len(list(Path().glob('seen*.pt')))}.pt"
if by_torchrun:
    exec(compile("main(parse_args())", path, "exec"), script)
else:
    script["main"](*((args,) if "ddp_setup" not in script else (RANK, WORLD_SIZE, store, args)))
seen["group is left"] = dist.is_initialized()
torch_save(seen, file)
sys.stdout.flush()
os._exit(0)  # a group that is left could wait for the other rank
