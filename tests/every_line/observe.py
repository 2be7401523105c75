"""Run one rank of the script in sys.argv[1], in a folder of its own, and save what it did there.

oracles.py starts it, by `launch.quickly`. What the script has is not replaced, only looked at.
"""

import gc
import os
import runpy
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    del os.environ[name]  # only torchrun sets them

seen = {"epochs": []}  # of each epoch, the samples in their order, and numbers that the model drew
script = runpy.run_path(sys.argv.pop(1))
script = script["parse_args"].__globals__
Trainer, load_train_objs = script["Trainer"], script["load_train_objs"]
run_epoch, train, destroy = Trainer._run_epoch, Trainer.train, dist.destroy_process_group


def load_and_look(seed):
    dataset, model, optimizer = load_train_objs(seed)

    class Watched(type(dataset)):
        def __getitems__(self, indices):
            seen["epochs"][-1]["samples"] += indices
            return super().__getitems__(indices)

    dataset.__class__ = Watched
    model.register_forward_hook(
        lambda *_: seen["epochs"][-1]["draws"].append(torch.rand(()).item())
    )
    return dataset, model, optimizer


def run_epoch_and_look(trainer, epoch):
    seen["epochs"].append({"samples": [], "draws": []})
    run_epoch(trainer, epoch)


def train_and_look(trainer, total_epochs):
    train(trainer, total_epochs)
    model = trainer.model.module if isinstance(trainer.model, DDP) else trainer.model
    seen["weights"] = {name: weight.clone() for name, weight in model.state_dict().items()}


def look_and_destroy():
    seen["DDP is alive"] = any(type(each) is DDP for each in gc.get_objects())
    destroy()


script["load_train_objs"] = load_and_look
Trainer._run_epoch, Trainer.train = run_epoch_and_look, train_and_look
dist.destroy_process_group = look_and_destroy
Path(f"rank{RANK}").mkdir()
args = script["parse_args"]()
store = f"file://{os.path.abspath('store')}"
os.chdir(f"rank{RANK}")
script["main"](*((args,) if "ddp_setup" not in script else (RANK, WORLD_SIZE, store, args)))
seen["group is left"] = dist.is_initialized()
torch.save(seen, "seen.pt")
sys.stdout.flush()
os._exit(0)  # a group that is left could wait for the other rank
