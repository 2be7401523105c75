"""Exercises of a workshop on a cluster: fine-tune, submit, bind, and start by srun."""

from dataclasses import dataclass
from pathlib import Path

from exercises import workshop_batch, workshop_bindings, workshop_finetune, workshop_srun
from exercises.exercise import TORCHRUN, Exercise

FINETUNE = '''"""Fine-tune GPT-Neo to tell good film reviews from bad ones.

Run:  torchrun --standalone --nproc_per_node=gpu finetune.py
"""

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from transformers import AutoModelForSequenceClassification, AutoTokenizer


def load_reviews(name):
    """A sequence of {"text": ..., "label": 0 or 1}: of the hub, or a local file, one in a line."""
    if Path(name).exists():
        return [json.loads(line) for line in Path(name).read_text().splitlines()]
    from datasets import load_dataset

    return load_dataset(name, split="train")


def main(args):
    dist.init_process_group()  # torchrun has set RANK, WORLD_SIZE and where to meet
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))  # each process has its own
        torch.cuda.set_device(device)

    torch.manual_seed(0)  # the model's new head begins alike in each run
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokenizer.pad_token = tokenizer.eos_token  # GPT-Neo has no token to pad with
    model = AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=2)
    model.config.pad_token_id = tokenizer.pad_token_id
    model.to(device)
    ddp = DDP(model)  # from here on backward() averages the gradients over the ranks
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    def collate(reviews):
        texts = [review["text"] for review in reviews]
        options = {"padding": True, "truncation": True, "max_length": 256}
        batch = tokenizer(texts, return_tensors="pt", **options)
        batch["labels"] = torch.tensor([review["label"] for review in reviews])
        return batch

    reviews = load_reviews(args.dataset)
    sampler = DistributedSampler(reviews)  # shuffles, and takes this rank's share
    loader = DataLoader(reviews, args.batch_size, sampler=sampler, collate_fn=collate)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # another order in each epoch
        totals = torch.zeros(2, device=device)  # sum of the losses, number of reviews
        for batch in loader:
            optimizer.zero_grad()
            loss = ddp(**batch.to(device)).loss
            loss.backward()
            optimizer.step()
            totals[0] += loss.detach() * len(batch["labels"])
            totals[1] += len(batch["labels"])
        dist.all_reduce(totals)  # the sums over all ranks
        print(f"Epoch {epoch} | Loss: {totals[0] / totals[1]:.6f}")

    if dist.get_rank() == 0:  # all ranks have the same weights: one folder, one writer
        model.save_pretrained(args.output)
        tokenizer.save_pretrained(args.output)
    del ddp  # DDP has to go before the group that it talks through
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="EleutherAI/gpt-neo-125m", help="its name, or a folder")
    parser.add_argument("--dataset", default="stanfordnlp/imdb", help="its name, or a file")
    parser.add_argument("--output", default="finetuned", help="folder for the model")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch_size", type=int, default=8, help="reviews in a step of a process")
    parser.add_argument("--lr", type=float, default=5e-5)
    main(parser.parse_args())
'''

BATCH_FILE = """#!/bin/bash
# How much faster is a whole node than one GPU? The program runs on both, in one job.
#
#   sbatch batch_file.sbatch finetune.py --epochs 1     the program and its arguments
#
#SBATCH --job-name=compare
#SBATCH --nodes=1                # one machine
#SBATCH --ntasks-per-node=1      # one torchrun; it starts the processes itself
#SBATCH --gpus-per-node=2        # all that a node of yours has
#SBATCH --cpus-per-task=16       # for all processes: 8 for each GPU, to feed it
#SBATCH --time=00:30:00          # short jobs start sooner
#SBATCH --output=%x-%j.log       # a file for each job: its name and id

# The job has the environment in which it was submitted: activate yours before.
set -e # what fails ends the job here

# Not every srun takes over --cpus-per-task by itself. --standalone takes a free port.
run_on() {
    local gpus=$1 begin=$SECONDS
    shift
    srun --cpus-per-task="$SLURM_CPUS_PER_TASK" \\
        torchrun --standalone --nproc_per_node="$gpus" "$@"
    echo "GPUs: $gpus | seconds: $((SECONDS - begin))"
}

run_on 1 "$@"
run_on "$SLURM_GPUS_ON_NODE" "$@" # as many as Slurm gave
"""

BINDINGS = '''"""Bind each process to cores next to its GPU, where a job has all GPUs of the node.

Run:  torchrun --standalone --nproc_per_node=gpu bindings.py
"""

import os
import subprocess


def numbers(text):
    """The cores that a list names: "0-2,8" is {0, 1, 2, 8}."""
    found = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def cores_next_to_gpus():
    """For each GPU, the cores of its NUMA node, from the table of `nvidia-smi topo -m`."""
    command = ["nvidia-smi", "topo", "-m"]
    table = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    header, *rows = [line.split("\\t") for line in table.splitlines()]
    column = header.index("CPU Affinity")
    return [numbers(row[column]) for row in rows if row[0].startswith("GPU")]


def bind():
    """Give this process cores of its own. Before torch is imported: its threads inherit them."""
    local_rank = int(os.environ["LOCAL_RANK"])  # and the number of its GPU
    near = cores_next_to_gpus()
    allowed = os.sched_getaffinity(0)  # what Slurm or a container has left to the job
    # GPUs of one NUMA node have the same cores next to them: their processes share them out.
    neighbours = [gpu for gpu, cores in enumerate(near) if cores == near[local_rank]]
    mine = sorted(near[local_rank] & allowed)[neighbours.index(local_rank) :: len(neighbours)]
    os.sched_setaffinity(0, mine)


if __name__ == "__main__":
    bind()
    cores = sorted(os.sched_getaffinity(0))
    print(f"Local rank {os.environ['LOCAL_RANK']} is on cores {cores}")
'''

SRUN = '''"""Join the process group under srun alone, without torchrun.

Run:  srun --nodes=2 --ntasks-per-node=4 --gpus-per-node=4 python srun.py
"""

import os
import subprocess

import torch
import torch.distributed as dist


def first_host():
    """The name of the job's first host: srun starts rank 0 there."""
    command = ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]


rank = int(os.environ["SLURM_PROCID"])
local_rank = int(os.environ["SLURM_LOCALID"])
world_size = int(os.environ["SLURM_NTASKS"])
os.environ["MASTER_ADDR"] = first_host()
# Two jobs may share a node, so each has a port of its own, which all its ranks can work out.
os.environ["MASTER_PORT"] = str(10000 + int(os.environ["SLURM_JOB_ID"]) % 20000)

device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
dist.init_process_group(rank=rank, world_size=world_size)
here = torch.ones(1, device=device)
dist.all_reduce(here)
print(f"Rank {rank} of {world_size} takes GPU {local_rank} and meets {int(here)} ranks", flush=True)
dist.destroy_process_group()
'''


@dataclass(frozen=True)
class BatchFile(Exercise):
    """The reader's file is not Python's: bash reads it, and tells a mistake by its line."""

    suffix: str = ".sbatch"

    def cannot_be_read(self, path: Path) -> str | None:
        return workshop_batch.bash_cannot_read(path)


FINETUNE_ON_ONE_GPU = (
    ("torchrun --standalone --nproc_per_node=gpu finetune.py", "python finetune.py"),
    ("import json\nimport os\n", "import json\n"),
    (
        "import torch.distributed as dist\n"
        "from torch.nn.parallel import DistributedDataParallel as DDP\n",
        "",
    ),
    ("from torch.utils.data.distributed import DistributedSampler\n", ""),
    ("    dist.init_process_group()  # torchrun has set RANK, WORLD_SIZE and where to meet\n", ""),
    (
        '        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))  # each process '
        "has its own\n        torch.cuda.set_device(device)\n",
        '        device = torch.device("cuda")\n',
    ),
    ("    ddp = DDP(model)  # from here on backward() averages the gradients over the ranks\n", ""),
    (
        "    sampler = DistributedSampler(reviews)  # shuffles, and takes this rank's share\n"
        "    loader = DataLoader(reviews, args.batch_size, sampler=sampler, collate_fn=collate)\n",
        "    loader = DataLoader(reviews, args.batch_size, shuffle=True, collate_fn=collate)\n",
    ),
    ("        sampler.set_epoch(epoch)  # another order in each epoch\n", ""),
    ("ddp(**batch", "model(**batch"),
    ("        dist.all_reduce(totals)  # the sums over all ranks\n", ""),
    (
        "    if dist.get_rank() == 0:  # all ranks have the same weights: one folder, one writer\n"
        "        model.save_pretrained(args.output)\n"
        "        tokenizer.save_pretrained(args.output)\n"
        "    del ddp  # DDP has to go before the group that it talks through\n"
        "    dist.destroy_process_group()\n",
        "    model.save_pretrained(args.output)\n    tokenizer.save_pretrained(args.output)\n",
    ),
)

BATCH_FILE_WITH_GAPS = (
    (
        """\
#SBATCH --nodes=1                # one machine
#SBATCH --ntasks-per-node=1      # one torchrun; it starts the processes itself
#SBATCH --gpus-per-node=2        # all that a node of yours has
#SBATCH --cpus-per-task=16       # for all processes: 8 for each GPU, to feed it
""",
        "",
    ),
    (
        BATCH_FILE[BATCH_FILE.index("# Not every srun") :],
        'torchrun --standalone --nproc_per_node=1 "$@"\n',
    ),
)

EXERCISES = [
    Exercise(
        "finetune",
        """This program fine-tunes GPT-Neo on film reviews, on one GPU. Let it use all GPUs of a
        node, started by torchrun: one process for each, which trains on a share of the reviews.
        The weights have to be those of one process with the batch of all together, the printed
        loss that of the job, and one rank saves.""",
        FINETUNE,
        FINETUNE_ON_ONE_GPU,
        workshop_finetune.finetunes_on_all_gpus,
        "multigpu_torchrun.py has each of the steps: the group, the device by LOCAL_RANK, DDP, the "
        "sampler and its epoch, the sum of the losses, the one writer",
        "README.md#step-3-torchrun-and-snapshots",
        start=TORCHRUN,
    ),
    BatchFile(
        "batch_file",
        """How much faster is a whole node? This batch file asks Slurm for no GPU, and runs the
        program that it is given with one process. Ask for one node with two GPUs and cores for
        two processes, run the program by srun and torchrun first on one GPU and then on all, and
        print after each run how many seconds it took. Where Slurm is, the check submits it.""",
        BATCH_FILE,
        BATCH_FILE_WITH_GAPS,
        workshop_batch.compares_one_gpu_with_a_node,
        "slurm/single_node.sbatch has the directives; bash counts the seconds in $SECONDS",
        "docs/clusters.md#slurm",
        start="sbatch",
        arguments="multinode.py 50 10",
    ),
    Exercise(
        "bindings",
        """A process may run on any core of the job, also on those far from its GPU. Bind each one
        to the cores that are next to its GPU by the table of `nvidia-smi topo -m`. Take only cores
        that the job was given, none for two processes, and leave none idle.""",
        BINDINGS,
        (
            (
                BINDINGS[BINDINGS.index("    # GPUs of") : BINDINGS.index("    os.sched_set")],
                "    mine = allowed\n",
            ),
        ),
        workshop_bindings.binds_to_its_gpu,
        "What is next to the GPU *and* allowed is an intersection of sets. How many GPUs have the "
        "same cores next to them, and which of them is this process's?",
        "docs/clusters.md#binding-processes-to-cpus",
        start=TORCHRUN,
    ),
    Exercise(
        "srun",
        """This program expects the variables that torchrun sets. Let it run under srun alone: take
        rank, local rank and world size from Slurm's variables, and find out where to meet: the
        first host of the job, and a port that no other job on that host has; on a machine with
        Slurm the check submits it there.""",
        SRUN,
        (
            (
                """\


def first_host():
    \"\"\"The name of the job's first host: srun starts rank 0 there.\"\"\"
    command = ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]


rank = int(os.environ["SLURM_PROCID"])
""",
                """\

rank = int(os.environ["RANK"])
""",
            ),
            ("import os\nimport subprocess\n\nimport torch\n", "import os\n\nimport torch\n"),
            ("SLURM_LOCALID", "LOCAL_RANK"),
            ("SLURM_NTASKS", "WORLD_SIZE"),
            (
                """\
os.environ["MASTER_ADDR"] = first_host()
# Two jobs may share a node, so each has a port of its own, which all its ranks can work out.
os.environ["MASTER_PORT"] = str(10000 + int(os.environ["SLURM_JOB_ID"]) % 20000)
""",
                "",
            ),
        ),
        workshop_srun.meets_under_srun,
        "`scontrol show hostnames` lists the hosts in the order of their ranks. SLURM_JOB_ID is "
        "the same on all ranks and another for each job; ports end at 65535",
        "docs/clusters.md#slurm",
        start="srun --ntasks=2 python",
    ),
]
