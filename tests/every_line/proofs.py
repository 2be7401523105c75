"""For each line that a lesson adds: what it is for, and what tells that it is gone."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import lines
import oracles
from oracles import Run

PREVIOUS = {"multigpu.py": "single_gpu.py"}  # the lessons whose lines have proofs


@dataclass(frozen=True)
class Proof:
    script: str
    where: str  # the function or method in which the line stands
    line: str  # as it stands in the script; of an `if`, `with` or `def` up to the colon
    without: str  # what one process has in its place, "" for nothing
    purpose: str
    oracle: Callable | None  # what says that something is wrong,
    says: str = ""  # and what has to be in its message
    also: tuple[tuple[str, str], ...] = ()  # what else must change for the script to go on
    needs: str = ""  # what it takes to tell that the line is gone, if two CPU cores cannot: why
    unproven: str = ""  # why the line might be deleted

    @property
    def statement(self) -> lines.Statement:
        """The one statement of the script that the proof is of."""
        found = lines.added(PREVIOUS[self.script], self.script)
        (one,) = (each for each in found if (each.where, each.text) == (self.where, self.line))
        return one

    def edited(self, folder: Path) -> str:
        """Write the script without the line, and return its path."""
        text = lines.without(self.script, self.statement, self.without)
        for old, new in self.also:
            assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {self.script}"
            text = text.replace(old, new)
        path = Path(folder) / self.script
        path.write_text(text)
        return str(path.resolve())

    def try_without(self, folder: Path, one: Run) -> tuple[Run, str | None]:
        """Run the script without the line: how it went, and what the oracle says."""
        run = self.oracle.way(self.edited(folder), folder)
        return run, self.oracle(run, one)


NO_MODULE = ("self.model.module.state_dict()", "self.model.state_dict()")
NO_SET_EPOCH = ("        sampler.set_epoch(epoch)  #", "        #")
NO_SEED = (
    "torch.manual_seed(sampler.seed + epoch * sampler.num_replicas + self.rank)",
    "pass",
)
DISTRIBUTED = """\
return DataLoader(
    dataset,
    batch_size=batch_size,
    collate_fn=collate,  # as usual, but lets whole batches of MyTrainDataset pass
    pin_memory=device.type not in ("cpu", "mps"),  # makes non_blocking copies possible
    sampler=DistributedSampler(dataset, seed=seed),  # shuffles, and takes this rank's share
)"""
SHUFFLED = """\
return DataLoader(
    dataset,
    batch_size=batch_size,
    collate_fn=collate,
    pin_memory=device.type not in ("cpu", "mps"),
    shuffle=True,
    generator=torch.Generator().manual_seed(seed),
)"""


def proof(where, line, without, purpose, oracle=None, says="", **more):
    return Proof("multigpu.py", where, line, without, purpose, oracle, says, **more)


PROOFS = [
    proof(
        "ddp_setup",
        "local_rank = rank",
        "local_rank = 0",
        "the number of this process's GPU",
        needs="gpu: without one nobody asks for its number; with two, both processes take GPU 0",
    ),
    proof(
        "ddp_setup",
        'device, gpu = torch.device("cpu"), None',
        "",
        "where there is no GPU, train on the CPU",
        oracles.ends_in_an_error,
        "cannot access local variable 'device'",
    ),
    proof(
        "ddp_setup",
        "if plumbing.count_gpus() > 0:",
        "if True:",
        "take a GPU only where there is one",
        oracles.ends_in_an_error,
        "available",
    ),
    proof(
        "ddp_setup",
        "device = gpu = torch.device(local_rank)",
        "pass",
        "a GPU for each process",
        needs="gpu: the line does not run without one",
    ),
    proof(
        "ddp_setup",
        "torch.accelerator.set_device_index(local_rank)",
        "pass",
        "calls that name no GPU take this process's own",
        needs="gpu: the line does not run without one",
    ),
    proof(
        "ddp_setup",
        "backend = dist.get_default_backend_for_device(device)",
        "backend = None",
        "NCCL between GPUs, gloo between CPUs",
        unproven="given None, torch 2.13 takes the same, NCCL for a GPU in device_id and gloo "
        "without; only a Mac, where it finds MPS and we train on the CPU, might miss the line",
    ),
    proof(
        "ddp_setup",
        "dist.init_process_group("
        "backend, init_method, rank=rank, world_size=world_size, device_id=gpu)",
        "",
        "the processes meet: without it each is alone",
        oracles.ends_in_an_error,
        "process group has not been initialized",
    ),
    proof(
        "ddp_setup",
        "return device",
        "",
        "tell the caller which device is this process's own",
        oracles.ends_in_an_error,
        "'NoneType' object has no attribute 'type'",
    ),
    proof(
        "Trainer.__init__",
        "self.rank = dist.get_rank()",
        "self.rank = 0",
        "each process knows its number, and so who saves",
        oracles.two_writers_of_one_file,
    ),
    proof(
        "Trainer.__init__",
        "self.model = DDP(self.model)",
        "",
        "all ranks train one model: gradients are averaged",
        oracles.ranks_hold_other_weights,
        also=(NO_MODULE,),
    ),
    proof(
        "Trainer._run_epoch",
        "sampler = self.train_data.sampler",
        "",
        "a short name for the sampler",
        oracles.ends_in_an_error,
        "name 'sampler' is not defined",
    ),
    proof(
        "Trainer._run_epoch",
        "sampler.set_epoch(epoch)",
        "",
        "another order in each epoch",
        oracles.epoch_repeated,
    ),
    proof(
        "Trainer._run_epoch",
        "torch.manual_seed(sampler.seed + epoch * sampler.num_replicas + self.rank)",
        "",
        "dropout differs between ranks",
        oracles.dropout_equal_on_ranks,
    ),
    proof(
        "Trainer._run_epoch",
        "dist.all_reduce(totals)",
        "",
        "the loss is that of all ranks",
        oracles.loss_is_that_of_one_rank,
    ),
    proof(
        "Trainer._save_checkpoint",
        "if self.rank != 0:",
        "if False:",
        "one rank saves",
        oracles.two_writers_of_one_file,
        "rank0 and rank1",
    ),
    proof(
        "Trainer._save_checkpoint",
        "return",
        "pass",
        "the other ranks do not save",
        oracles.two_writers_of_one_file,
        "rank0 and rank1",
    ),
    proof(
        "Trainer._save_checkpoint",
        "weights = self.model.module.state_dict()",
        "weights = self.model.state_dict()",
        "the file can be loaded without DDP",
        oracles.keys_with_module,
    ),
    proof(
        "Trainer.train",
        "if self.rank == 0:",
        "if True:",
        "what is true of the whole job is said once",
        oracles.said_more_than_once,
    ),
    proof(
        "prepare_dataloader",
        DISTRIBUTED,
        SHUFFLED,
        "each rank has its own share of the samples",
        oracles.ranks_saw_the_same_samples,
        also=(NO_SET_EPOCH, NO_SEED),
    ),
    proof(
        "parse_args",
        'defaults |= {"nproc": plumbing.count_gpus() or 2}',
        'defaults |= {"nproc": 1}',
        "as many processes as there are GPUs",
        oracles.not_one_process_for_each_rank,
    ),
    proof(
        "main",
        "def main(rank, world_size, init_method, args):",
        "def main(args):",
        "each process is told its number, how many there are and where they meet",
        oracles.ends_in_an_error,
        "main() takes 1 positional argument but 4 were given",
    ),
    proof(
        "main",
        "device = ddp_setup(rank, world_size, init_method)",
        'device = torch.device("cpu")',
        "join the group before all else",
        oracles.ends_in_an_error,
        "process group has not been initialized",
    ),
    proof(
        "main",
        "del trainer",
        "",
        "DDP goes before the group that it talks through",
        oracles.DDP_outlives_its_group,
    ),
    proof(
        "main",
        "dist.destroy_process_group()",
        "",
        "the group is taken down while all ranks are there",
        oracles.group_is_left,
    ),
    proof(
        "__main__",
        "args = parse_args()",
        "",
        "the command line is read once, by the process that starts the others",
        oracles.the_command_ends_in_an_error,
        "name 'args' is not defined",
    ),
    proof(
        "__main__",
        "with plumbing.local_job(args.nproc) as init_method:",
        'if init_method := f"file://{plumbing.os.getcwd()}/store":',
        "a place to meet for this job alone; an error that all have is told once",
        oracles.error_not_told_in_one_line,
        "ProcessExitedException",
    ),
    proof(
        "__main__",
        "mp.spawn(main, args=(args.nproc, init_method, args), nprocs=args.nproc)",
        "main(0, 1, init_method, args)",
        "start the processes",
        oracles.not_one_process_for_each_rank,
    ),
]
