"""For each line that a lesson adds: what it is for, and what tells that it is gone."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import lines

from exercises import checks, ways
from exercises.exercise import edited
from exercises.ways import Run

PREVIOUS = {
    "multigpu.py": "single_gpu.py",
    "multigpu_torchrun.py": "multigpu.py",
    "multinode.py": "multigpu_torchrun.py",
}


@dataclass(frozen=True)
class Proof:
    script: str
    where: str  # the function or method that contains the line
    line: str  # as it is in the script; of an `if`, `with` or `def` up to the colon
    without: str  # what one process has in its place, "" for nothing
    purpose: str
    check: Callable  # what says that something is wrong,
    says: str = ""  # and what has to be in its message
    also: tuple[tuple[str, str], ...] = ()  # what else must change for the script to go on
    way: Callable | None = None  # how the check has it run, if not in its first way
    part: str = ""  # what is missing in `without`, if that is only a part of the line
    earlier: bool = False  # the script before contains the line, too, but does not show this

    @property
    def statement(self) -> lines.Statement:
        """The one statement of the script that the proof is of."""
        found = lines.of(self.script)
        (one,) = (each for each in found if (each.where, each.text) == (self.where, self.line))
        return one

    def edited(self, folder: Path) -> str:
        """Write the script without the line, and return its path."""
        text = lines.without(self.script, self.statement, self.without)
        path = Path(folder) / self.script
        path.write_text(edited(text, self.also))
        return str(path.resolve())

    def try_without(self, folder: Path) -> tuple[Run, str | None]:
        """Run the script without the line: how it went, and what the check says."""
        run = (self.way or self.check.ways[0])(self.edited(folder), folder)
        return run, self.check(run)


NO_MODULE = ("self.model.module.state_dict()", "self.model.state_dict()")
NO_SET_EPOCH = ("        sampler.set_epoch(epoch)  #", "        #")
NO_SEED = (
    "torch.manual_seed(sampler.seed + epoch * dist.get_world_size() + self.rank)",
    "pass",
)
DISTRIBUTED = """\
return DataLoader(
    dataset,
    batch_size=batch_size,
    pin_memory=device.type == "cuda",  # lets a copy to the GPU run beside the computation
    sampler=DistributedSampler(dataset, seed=seed),  # shuffles, and takes this rank's share
)"""
SHUFFLED = """\
return DataLoader(
    dataset,
    batch_size=batch_size,
    pin_memory=device.type == "cuda",
    shuffle=True,
    generator=torch.Generator().manual_seed(seed),
)"""


def proof(where, line, without, purpose, check, says="", *, script="multigpu.py", **more):
    return Proof(script, where, line, without, purpose, check, says, **more)


PROOFS = [
    proof(
        "ddp_setup",
        "local_rank = rank",
        "local_rank = 0",
        "the number of this process's GPU",
        checks.a_process_takes_a_GPU_that_is_not_its_own,
        "takes GPU 0",
    ),
    proof(
        "ddp_setup",
        'device = torch.device("cpu")',
        "",
        "where there is no GPU, train on the CPU",
        checks.ends_in_an_error,
        "cannot access local variable 'device'",
    ),
    proof(
        "ddp_setup",
        "if plumbing.count_gpus() > 0:",
        "if True:",
        "take a GPU only where there is one",
        checks.ends_in_an_error,
    ),
    proof(
        "ddp_setup",
        "device = torch.device(local_rank)",
        "",
        "a GPU for each process",
        checks.a_process_takes_a_GPU_that_is_not_its_own,
        "takes cpu",
    ),
    proof(
        "ddp_setup",
        "torch.accelerator.set_device_index(device)",
        "pass",
        "calls that name no GPU take this process's own",
        checks.a_process_takes_a_GPU_that_is_not_its_own,
        "nobody tells torch which one",
    ),
    proof(
        "ddp_setup",
        "backend = dist.get_default_backend_for_device(device)",
        "backend = None",
        "NCCL between GPUs, gloo between CPUs, also where there is a GPU that we do not use",
        checks.ends_in_an_error,
        "mps",
        way=ways.as_on_a_mac,
    ),
    proof(
        "ddp_setup",
        "dist.init_process_group(backend, init_method, rank=rank, world_size=world_size)",
        "",
        "the processes meet: without it each is alone",
        checks.ends_in_an_error,
        "process group has not been initialized",
    ),
    proof(
        "ddp_setup",
        "return device",
        "",
        "tell the caller which device is this process's own",
        checks.ends_in_an_error,
        "'NoneType' object has no attribute 'type'",
    ),
    proof(
        "Trainer.__init__",
        "self.rank = dist.get_rank()",
        "self.rank = 0",
        "each process knows its number, and so who saves",
        checks.two_writers_of_one_file,
    ),
    proof(
        "Trainer.__init__",
        "self.model = DDP(self.model)",
        "",
        "all ranks train one model: gradients are averaged",
        checks.ranks_train_apart,
        also=(NO_MODULE,),
        way=ways.in_ranks,
    ),
    proof(
        "Trainer._run_epoch",
        "self.model.train()",
        "",
        "dropout and BatchNorm work as they have to in training, in whatever mode the model comes",
        checks.trained_in_eval_mode,
        earlier=True,
    ),
    proof(
        "Trainer._run_epoch",
        "sampler = self.train_data.sampler",
        "",
        "a short name for the sampler",
        checks.ends_in_an_error,
        "name 'sampler' is not defined",
    ),
    proof(
        "Trainer._run_epoch",
        "sampler.set_epoch(epoch)",
        "",
        "a new order in each epoch",
        checks.epoch_repeated,
    ),
    proof(
        "Trainer._run_epoch",
        "torch.manual_seed(sampler.seed + epoch * dist.get_world_size() + self.rank)",
        "",
        "dropout differs between ranks",
        checks.dropout_equal_on_ranks,
    ),
    proof(
        "Trainer._run_epoch",
        "dist.all_reduce(totals)",
        "",
        "the loss is that of all ranks",
        checks.loss_is_that_of_one_rank,
    ),
    proof(
        "Trainer._save_checkpoint",
        "if self.rank != 0:",
        "if False:",
        "one rank saves",
        checks.two_writers_of_one_file,
        "rank0 and rank1",
    ),
    proof(
        "Trainer._save_checkpoint",
        "return",
        "pass",
        "the other ranks do not save",
        checks.two_writers_of_one_file,
        "rank0 and rank1",
    ),
    proof(
        "Trainer._save_checkpoint",
        "weights = self.model.module.state_dict()",
        "weights = self.model.state_dict()",
        "the file can be loaded without DDP",
        checks.keys_with_module,
    ),
    proof(
        "Trainer.train",
        "if self.rank == 0:",
        "if True:",
        "what is true of the whole job is said once",
        checks.said_more_than_once,
    ),
    proof(
        "prepare_dataloader",
        DISTRIBUTED,
        SHUFFLED,
        "each rank has its own share of the samples",
        checks.ranks_saw_the_same_samples,
        also=(NO_SET_EPOCH, NO_SEED),
    ),
    proof(
        "parse_args",
        'defaults |= {"nproc": plumbing.count_gpus() or 2}',
        'defaults |= {"nproc": 1}',
        "as many processes as there are GPUs",
        checks.not_one_process_for_each_rank,
    ),
    proof(
        "main",
        "def main(rank, world_size, init_method, args):",
        "def main(args):",
        "each process receives its rank, the world size and the place where all meet",
        checks.ends_in_an_error,
        "main() takes 1 positional argument but 4 were given",
    ),
    proof(
        "main",
        "device = ddp_setup(rank, world_size, init_method)",
        'device = torch.device("cpu")',
        "join the group before all else",
        checks.ends_in_an_error,
        "process group has not been initialized",
    ),
    proof(
        "main",
        "del trainer",
        "",
        "DDP goes before the group that it talks through",
        checks.DDP_outlives_its_group,
    ),
    proof(
        "main",
        "dist.destroy_process_group()",
        "",
        "the group is taken down while all ranks are there",
        checks.group_is_left,
    ),
    proof(
        "__main__",
        "args = parse_args()",
        "",
        "the command line is read once, by the process that starts the others",
        checks.the_command_ends_in_an_error,
        "name 'args' is not defined",
    ),
    proof(
        "__main__",
        "with plumbing.local_job(args.nproc) as init_method:",
        'if init_method := f"file://{__file__}.store":',
        "a place to meet for this job alone; an error that all processes have is printed once",
        checks.error_not_told_in_one_line,
        "ProcessExitedException",
    ),
    proof(
        "__main__",
        "mp.spawn(main, args=(args.nproc, init_method, args), nprocs=args.nproc)",
        "main(0, 1, init_method, args)",
        "start the processes",
        checks.not_one_process_for_each_rank,
    ),
]


def by_torchrun(*given, **more):
    return proof(*given, script="multigpu_torchrun.py", **more)


SNAPSHOT = """\
snapshot = {  # the state of a scheduler or a GradScaler belongs here too
    "model": weights,
    "optimizer": self.optimizer.state_dict(),
    "epochs_run": epoch + 1,
    "seed": self.train_data.sampler.seed,
    "job_id": self.job_id,
    # A resume refuses a different optimizer, and prints how the sizes have changed.
    "optimizer_class": type(self.optimizer).__name__,
    "sizes": (self.train_data.batch_size, dist.get_world_size()),
}"""
OPTIMIZER_CLASS = '    "optimizer_class": type(self.optimizer).__name__,\n'

PROOFS += [
    by_torchrun(
        "ddp_setup",
        "def ddp_setup(timeout: int) -> torch.device:",
        "def ddp_setup() -> torch.device:",
        "the time-out is an argument; rank and place to meet come from torchrun",
        checks.ends_in_an_error,
        "takes 0 positional arguments but 1 was given",
        way=ways.resumed,
    ),
    by_torchrun(
        "ddp_setup",
        "plumbing.require_torchrun()",
        "",
        "plain `python` ends with the command to type",
        checks.without_torchrun_no_command_is_printed,
        "KeyError: 'LOCAL_RANK'",
    ),
    by_torchrun(
        "ddp_setup",
        'local_rank = int(os.environ["LOCAL_RANK"])',
        "local_rank = 0",
        "the number of this process's GPU",
        checks.a_process_takes_a_GPU_that_is_not_its_own,
        "takes GPU 0",
    ),
    by_torchrun(
        "ddp_setup",
        "device = torch.device(local_rank % plumbing.count_gpus())",
        "",
        "a GPU for each process, as before",
        checks.a_process_takes_a_GPU_that_is_not_its_own,
        "takes cpu",
    ),
    by_torchrun(
        "ddp_setup",
        "device = torch.device(local_rank % plumbing.count_gpus())",
        "device = torch.device(local_rank)",
        "a process that sees one GPU only takes that one, whatever its local rank is",
        checks.a_process_takes_a_GPU_that_is_not_its_own,
        "sees its own alone as GPU 0, and takes GPU 1",
        part="% plumbing.count_gpus()",
        way=ways.seeing_one_stand_in_gpu,
    ),
    by_torchrun(
        "ddp_setup",
        "dist.init_process_group(backend, timeout=timedelta(seconds=timeout))",
        "dist.init_process_group(backend)",
        "a rank that stands still is not waited for all day",
        checks.still_waiting_after_the_timeout,
    ),
    by_torchrun(
        "Trainer.__init__",
        "def __init__(self, model, train_data, optimizer, device, save_every, snapshot_path):",
        "def __init__(self, model, train_data, optimizer, device, save_every):",
        "the Trainer receives the path of its snapshot",
        checks.ends_in_an_error,
        "takes 6 positional arguments but 7 were given",
        way=ways.resumed,
    ),
    by_torchrun(
        "Trainer.__init__",
        "self.snapshot_path = snapshot_path",
        'self.snapshot_path = "snapshot.pt"',
        "the snapshot is where --snapshot_path says",
        checks.snapshot_path_not_obeyed,
        "and there is rank0/snapshot.pt",
    ),
    by_torchrun(
        "Trainer.__init__",
        "self.epochs_run = 0",
        "",
        "a job without a snapshot begins at epoch 0",
        checks.ends_in_an_error,
        "no attribute 'epochs_run'",
        way=ways.resumed,
    ),
    by_torchrun(
        "Trainer.__init__",
        "self.job_id = plumbing.all_new_job_id()",
        "self.job_id = None",
        "a job has a name that its restarts find again",
        checks.a_restart_is_another_wandb_run,
        "no id that a restart could find",
    ),
    by_torchrun(
        "Trainer.__init__",
        "self._load_snapshot()",
        "",
        "resume from the snapshot",
        checks.training_thrown_away,
        "begins with epoch 0",
    ),
    by_torchrun(
        "Trainer._save_snapshot",
        SNAPSHOT,
        "snapshot = weights",
        "all that a restart needs, not the weights alone",
        checks.ends_in_an_error,
        "is no snapshot of this script",
        way=ways.resumed,
    ),
    by_torchrun(
        "Trainer._save_snapshot",
        SNAPSHOT,
        SNAPSHOT.replace(OPTIMIZER_CLASS, ""),
        "the saved state of one optimizer is not loaded into a different one",
        checks.a_different_optimizer_resumes,
        "Adam before, AdamW now, and: Resuming",
        part=OPTIMIZER_CLASS,
    ),
    by_torchrun(
        "Trainer._save_snapshot",
        "plumbing.save_atomically(snapshot, self.snapshot_path)",
        "torch.save(snapshot, self.snapshot_path)",
        "a save that fails leaves the last one whole",
        checks.a_full_disk_harmed_the_last_snapshot,
        "no snapshot can be read any more",
    ),
    by_torchrun(
        "Trainer._load_snapshot",
        "snapshot = plumbing.all_read_snapshot(self.snapshot_path, self.model, self.optimizer)",
        "snapshot = None",
        "read the snapshot, if there is one",
        checks.training_thrown_away,
        "begins with epoch 0",
    ),
    by_torchrun(
        "Trainer._load_snapshot",
        "plumbing.all_exit_if_disks_differ(snapshot)",
        "",
        "machines that do not share a disk do not train apart, or begin anew",
        checks.ranks_train_apart,
    ),
    by_torchrun(
        "Trainer._load_snapshot",
        "if snapshot is not None:",
        "if True:",
        "the first start of a job has none",
        checks.ends_in_an_error,
        "'NoneType' object is not subscriptable",
        way=ways.resumed,
    ),
    by_torchrun(
        "Trainer._load_snapshot",
        "self._resume(snapshot)",
        "pass",
        "put back what was read",
        checks.training_thrown_away,
        "begins with epoch 0",
    ),
    by_torchrun(
        "Trainer._resume",
        "plumbing.print_resume(snapshot, self.train_data)",
        "",
        "a reader of the log sees where training resumes",
        checks.resume_is_not_told,
    ),
    by_torchrun(
        "Trainer._resume",
        'self.model.load_state_dict(snapshot["model"])',
        "",
        "put the weights back",
        checks.training_thrown_away,
        "begins with epoch 2",
    ),
    by_torchrun(
        "Trainer._resume",
        'self.optimizer.load_state_dict(snapshot["optimizer"])',
        "",
        "put the momentum back",
        checks.optimizer_state_lost,
    ),
    by_torchrun(
        "Trainer._resume",
        'self.epochs_run = snapshot["epochs_run"]',
        "",
        "go on with the epoch after the last one saved",
        checks.epochs_trained_again,
        "trains [0, 1, 2, 3]",
    ),
    by_torchrun(
        "Trainer._resume",
        'self.train_data.sampler.seed = snapshot["seed"]',
        "",
        "keep the order of samples that the job began with",
        checks.other_samples_than_an_unbroken_run,
    ),
    by_torchrun(
        "Trainer._resume",
        'self.job_id = snapshot["job_id"]',
        "",
        "a restart continues the same wandb run",
        checks.a_restart_is_another_wandb_run,
    ),
    by_torchrun(
        "Trainer.train",
        "if self.epochs_run >= total_epochs:",
        "if True:",
        "only a job that is done prints that nothing is left",
        checks.says_that_nothing_is_left,
    ),
    by_torchrun(
        "Trainer.train",
        "for epoch in range(self.epochs_run, total_epochs):",
        "for epoch in range(total_epochs):",
        "skip the epochs that are done",
        checks.epochs_trained_again,
        "trains [0, 1, 2, 3]",
    ),
    by_torchrun(
        "Trainer.train",
        "self._save_snapshot(epoch)",
        "pass",
        "save when it is due",
        checks.nothing_is_saved,
    ),
    by_torchrun(
        "parse_args",
        'defaults |= {"timeout": 600, "snapshot_path": "snapshot.pt"}',
        "",
        "two more options, and their defaults",
        checks.ends_in_an_error,
        "unrecognized arguments: --snapshot_path",
        way=ways.resumed,
    ),
    by_torchrun(
        "__main__",
        "@record",
        "",
        "torchrun's report has the traceback",
        checks.traceback_not_in_the_report_of_torchrun,
        "To enable traceback see",
    ),
    by_torchrun(
        "main",
        "def main(args):",
        "def main(rank, world_size, init_method, args):",
        "torchrun starts a process for each rank, with nothing to hand over but the command line",
        checks.ends_in_an_error,
        "missing 3 required positional arguments",
        way=ways.resumed,
    ),
    by_torchrun(
        "main",
        "device = ddp_setup(args.timeout)",
        "device = ddp_setup(600)",
        "the time-out is what --timeout says",
        checks.still_waiting_after_the_timeout,
    ),
    by_torchrun(
        "main",
        "plumbing.all_exit_if_args_bad(args)",
        "",
        "no rank trains with arguments that another has not",
        checks.args_differ_and_the_job_trains,
    ),
    by_torchrun(
        "main",
        "plumbing.all_exit_if_unusable(dataset, model)",
        "",
        "buffers that are finite at the start have to stay so; an empty dataset is refused",
        checks.what_is_not_finite_is_saved,
        "'seen' in snapshot.pt",
        earlier=True,
    ),
    by_torchrun(
        "main",
        "trainer = Trainer("
        "model, train_data, optimizer, device, args.save_every, args.snapshot_path)",
        "trainer = Trainer(model, train_data, optimizer, device, args.save_every, 'snapshot.pt')",
        "the snapshot is where --snapshot_path says",
        checks.snapshot_path_not_obeyed,
        "and there is rank0/snapshot.pt",
    ),
    by_torchrun(
        "main",
        "plumbing.start_wandb(args, trainer.job_id)",
        "plumbing.start_wandb(args)",
        "a restart continues the same wandb run",
        checks.a_restart_is_another_wandb_run,
        "no id that a restart could find",
    ),
    by_torchrun(
        "__main__",
        "main(parse_args())",
        "pass",
        "each process that torchrun starts does the whole",
        checks.nothing_was_trained,
    ),
]


def on_machines(line, *given, where="Trainer._load_snapshot", **more):
    return proof(where, line, *given, script="multinode.py", **more)


DIGEST = 'snapshot["digest"]'
MINE = f'mine = (snapshot["epochs_run"], {DIGEST}) if snapshot else (0, "")'

PROOFS += [
    on_machines(
        "self.job_id = plumbing.all_new_job_id()",
        'self.job_id = "job"',
        "no other job has this name",
        checks.snapshots_of_two_jobs_are_mixed,
        where="Trainer.__init__",
        earlier=True,
    ),
    on_machines(
        "self.job_id = plumbing.all_new_job_id()",
        "self.job_id = os.urandom(4).hex()",
        "all ranks of the job have the same name for it",
        checks.wandb_runs_of_one_job_have_different_groups,
        where="Trainer.__init__",
        earlier=True,
    ),
    on_machines(
        MINE,
        'mine = (0, "")',
        "each rank tells how far its snapshot is",
        checks.ranks_train_apart,
    ),
    on_machines(
        MINE,
        MINE.replace(DIGEST, '""'),
        "two snapshots of one epoch need not be the same",
        checks.ranks_train_apart,
        part=DIGEST,
        way=ways.with_two_snapshots_of_one_epoch,
    ),
    on_machines(
        "found = [None] * dist.get_world_size()",
        "",
        "room for what each rank has found",
        checks.ends_in_an_error,
        "name 'found' is not defined",
        way=ways.moved,
    ),
    on_machines(
        "dist.all_gather_object(found, mine)",
        "",
        "all ranks know what each has found",
        checks.ranks_train_apart,
    ),
    on_machines(
        "if len(set(found)) > 1:",
        "if True:",
        "nothing is sent if all ranks have read the same snapshot",
        checks.a_snapshot_is_sent_that_all_have,
    ),
    on_machines(
        "newest = found.index(max(found))",
        "newest = 0",
        "the snapshot comes from a rank that has the newest one, wherever rank 0 is",
        checks.training_thrown_away,
        "begins with epoch 0",
        way=ways.moved,
    ),
    on_machines(
        "snapshot = plumbing.all_broadcast_snapshot(snapshot, src=newest)",
        "pass",
        "all ranks continue from that snapshot",
        checks.ranks_train_apart,
    ),
    on_machines(
        "plumbing.start_wandb(args, trainer.job_id, group=trainer.job_id)",
        "plumbing.start_wandb(args, trainer.job_id)",
        "every rank has a run, and they are found together",
        checks.only_rank_0_has_a_wandb_run,
        where="main",
    ),
]
