"""Runs of train_llm.py for the tests: tiny models, data that lie in a folder, on the CPU."""

import json
from pathlib import Path

import launch
import torch
from launch import LLM

OFFLINE = {"HF_HUB_OFFLINE": "1"}  # or every test of an unknown name waits for the network
FIRST = ("--batch-size", 4, "--max-steps", 4, "--log-freq", 1)
LONG = ("--batch-size", 3, "--global-batch-size", 6, "--dropout", 0.1, "--lr", 1e-3)
LONG += ("--num-epochs", 3, "--log-freq", 1, "--ckpt-freq", 5, "--eval-freq", 20)
LONG += ("--init", "pretrained")  # whose dropout has to be on from the first step


def llm(local, *args, nproc=1, model="gpt2", data="text.txt"):
    """The command of a run on local names, with that many ranks and without a launcher."""
    return launch.forked(LLM, *names(local, model, data), *args, nproc=nproc)


def llm_by_torchrun(local, *args):
    """The same with two ranks, started by the real torchrun."""
    return launch.torchrun(LLM, *names(local), *args)


def names(local, model="gpt2", data="text.txt"):
    return ("--model-name", local / model, "--dataset-name", local / data)


def metrics(folder, name):
    """{step: value} of what was logged as `name`."""
    lines = map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
    return {line["global_step"]: line[name] for line in lines if name in line}


def newest(folder):
    """The newest snapshot of an experiment, without the names of this save, its run and data."""
    path = max(Path(folder).glob("snapshots/step-*.pt"))
    snapshot = torch.load(path, weights_only=True)
    names = {"name", "wandb_id", "identity", "settings"}
    return {key: snapshot[key] for key in snapshot.keys() - names}


def descendants(pid):
    """The pids of all processes that `pid` has started, and those that these have started."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found += [child, *descendants(child)]
    return found
