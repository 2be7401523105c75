"""The Trainer of a real run: micro-batches, a schedule, and a loop that can be stopped."""

import inspect
import math
import signal
import time
import uuid
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

from training.buckets import all_fix_bucket_order
from training.job import all_count_machines
from training.memory import all_fit_batch_size, problem_with_gradients
from training.metrics import Log, Stopwatch, line_of_step, memory_used, peak_flops
from training.optimizer import make_gradients, make_optimizer_state
from training.sampler import all_exit_on_remainder
from training.signals import StopSignals
from training.snapshots import Snapshots, all_compare, differences


class Trainer:
    """Trains a model by steps, and says how it goes. A subclass says what is particular to it:

    _run_batch(model, batch, targets_in_step): the share of a micro-batch in the loss of the step,
        backward too if gradients are on
    _targets_in_step(step): by how much the loss of a step is divided, over all ranks
    _largest_batch(batch_size): a batch that takes as much memory as any
    _evaluate(): the loss of the model, in eval mode, on the held-out data, or None if a signal came
    _export(weights, path): write the model, for others to use
    """

    flops_per_token = None  # if known, the lines show MFU
    tokens_in_sample = None  # where all samples have equally many
    dynamic = False  # whether batches have many shapes, so that one compilation has to do for all

    def __init__(
        self,
        model: torch.nn.Module,
        train_data: DataLoader,
        optimizer: torch.optim.Optimizer,
        snapshots: Snapshots,
        device: torch.device,
        args,
        identity: dict,
    ):
        """`args` is of options.all_start, with what the program adds. `identity` is what makes it
        this run: a snapshot that has other values is of another."""
        self.rank = dist.get_rank()
        self.model = model.to(device)
        self.train_data = train_data
        self.sampler = train_data.batch_sampler
        self.optimizer = optimizer
        self.device = device
        self.args = args
        self.identity = identity | {"optimizer": type(optimizer).__name__}
        self.steps_run = self.steps_evaluated = 0
        self.best_loss = math.inf
        self.losses, self.norms, self.targets = [], [], 0  # since the last report
        self.stopwatch = Stopwatch(device)
        self.signals, self.snapshots = StopSignals(), snapshots
        self.snapshots.all_lock()
        self.wandb_id = all_compare(self.identity, uuid.uuid4().hex[:8])  # identifies the job
        make_optimizer_state(optimizer)
        self._load_snapshot()
        if self.rank == 0:
            self.snapshots.make_buffers(self._tensors())
        if args.compile:
            self._compile()
        # No buffers are sent: they are tables that never change. torch 2.13 renamed the option.
        names = ("forward_sync_buffers", "broadcast_buffers")
        constant = next(name for name in names if name in inspect.signature(DDP).parameters)
        self.model = DDP(  # gives every rank the weights of rank 0
            self.model,
            bucket_cap_mb=args.bucket_cap_mb,
            gradient_as_bucket_view=True,  # gradients are sent from where they lie
            **{constant: False},
        )
        self.model.train()  # from_pretrained hands out a model in eval mode
        self.model.register_comm_hook(self.stopwatch, sum_gradients)
        self._fit_batch_size()
        all_fix_bucket_order(self.model)
        make_gradients(optimizer)
        self.log = Log(snapshots.folder, self.steps_run, self.total_steps)
        if self.rank == 0:
            self._print_steps()

    def _load_snapshot(self):
        """Go on from the newest snapshot on any machine, or from the step that --resume names."""
        about = self.snapshots.all_load(self.args.resume, self._tensors(), self._another_run)
        if about:
            self.steps_run = self.sampler.first_step = about["steps_run"]
            self.steps_evaluated = about.get("steps_evaluated", self.steps_run)
            self.best_loss = about["best_loss"]
            self.wandb_id = about["wandb_id"]
            self.sampler.seed = about["seed"]
            self.sampler.global_batch_size = about["global_batch_size"]
        self._plan_steps()
        if about and self.rank == 0:
            print(f"Resuming training from snapshot at Step {self.steps_run}")
            self._print_changes(about)

    def _plan_steps(self):
        args = self.args
        args.global_batch_size = self.sampler.global_batch_size
        all_exit_on_remainder(args)
        self.total_steps = args.max_steps or args.num_epochs * self.sampler.steps_per_epoch
        warmup = args.warmup_steps
        self.warmup_steps = min(self.total_steps // 10, 2000) if warmup is None else warmup

    def _another_run(self, snapshot):
        """Why this snapshot is not of this run, in words, or an empty text."""
        typed = {"seed": self.args.seed} if self.args.seed_is_typed else {}
        if self.args.global_batch_size:
            typed["global batch size"] = self.args.global_batch_size
        there = {"seed": snapshot["seed"], "global batch size": snapshot["global_batch_size"]}
        return differences(there | snapshot.get("identity", {}), self.identity | typed)

    def _settings(self):
        """All that a later run of this job may have otherwise."""
        names = ("lr", "weight_decay", "clip_norm", "dropout", "dtype")
        settings = {name: getattr(self.args, name) for name in names}
        settings |= {"warm-up steps": self.warmup_steps, "steps": self.total_steps}
        return settings | {"processes": dist.get_world_size()}

    def _print_changes(self, about):
        """Tell what is not as it was, and what follows from it."""
        if "settings" not in about:
            print("It is of an older version: model, weights, optimizer, schedule are not compared")
            return
        before, now, another = about["settings"], self._settings(), self.snapshots.another
        if changed := differences(before, now):
            step, names = self.steps_run, ("lr", "warm-up steps", "steps")
            rates = [f"{learning_rate(step, *map(run.get, names)):.2e}" for run in (before, now)]
            if rates[0] != rates[1]:
                changed += "; the next step has LR {1} and not {0}".format(*rates)
            print(f"Not as in the snapshot: {changed}. For a run of its own: {another}")

    def _compile(self):
        # Between machines gradients travel slowly. So there the model is compiled in pieces, one
        # for each bucket of gradients: the first can be sent while the next are computed. On one
        # machine the pieces cost more than that saves.
        torch._dynamo.config.optimize_ddp = all_count_machines() > 1
        self.model.compile(dynamic=self.dynamic)  # in place: the parameters keep their names

    def _fit_batch_size(self):
        """Divide the batch until it fits on all GPUs. More accumulation makes the same steps."""
        args, asked = self.args, self.args.batch_size

        def try_pass(batch_size):
            # no_sync: another rank may not get as far as to send gradients.
            with self.model.no_sync():
                self._run_batch(self.model, self._largest_batch(batch_size), 1)

        args.batch_size = all_fit_batch_size(asked, try_pass, args.compile and self.dynamic)
        self.sampler.batch_size, args.fits = args.batch_size, True
        if args.batch_size < asked and self.rank == 0:
            sizes = f"--batch-size {args.batch_size} --global-batch-size {args.global_batch_size}"
            print(f"WARNING: {asked} sequences do not fit on a GPU. Going on with {sizes}")

    def _print_steps(self):
        args, processes = self.args, dist.get_world_size()
        samples = args.global_batch_size
        accumulation = samples // (args.batch_size * processes)
        epochs = self.total_steps / self.sampler.steps_per_epoch
        tokens = f" = {samples * self.tokens_in_sample:,} tokens" if self.tokens_in_sample else ""
        print(
            f"Global batch size: {args.batch_size} (batch) x {accumulation} (accumulation)"
            f" x {processes} (processes) = {samples} sequences{tokens}\n"
            f"Steps: {self.total_steps:,} ({epochs:.2f} epochs) | LR: {args.lr:.2e}"
            f" after {self.warmup_steps} steps of warm-up"
        )
        if self.steps_run >= self.total_steps:
            print(f"Step {self.steps_run} is done already, so there is nothing to train")

    def _run_step(self, step):
        # Dropout has to differ between ranks and steps, but not between two runs.
        torch.manual_seed(self.sampler.seed + step * dist.get_world_size() + self.rank)
        # The loss is divided by the number of targets in the step, on all ranks and in all batches.
        # So the gradient is that of one big batch, also where a step has fewer samples.
        targets_in_step = self._targets_in_step(step)
        loss = torch.zeros((), device=self.device)
        for batches_left in reversed(range(self.sampler.accumulation(step))):
            begin = time.perf_counter()
            batch = next(self.batches)
            self.stopwatch.add("data", begin)
            # Only the last backward pass sends gradients: by then all of them are added up.
            with self.model.no_sync() if batches_left else nullcontext():
                loss += self._run_batch(self.model, batch, targets_in_step)
        self.stopwatch.gradients_arrived()
        clip_norm = self.args.clip_norm or math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate(step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)  # they stay where they are sent from
        self.losses.append(loss)
        self.norms.append(norm)
        self.targets += targets_in_step

    def _learning_rate(self, step):
        return learning_rate(step, self.args.lr, self.warmup_steps, self.total_steps)

    def _problem_with_gradients(self):
        """What is wrong since the last report, on all ranks the same, or None. Waits for a GPU."""
        return problem_with_gradients(self.norms, self.steps_run, self.snapshots)

    def _report(self):
        """Print and log the steps since the last report."""
        losses = torch.stack(self.losses)
        dist.all_reduce(losses)  # sums over the ranks: each has divided by the targets of all
        loss, norm = float(losses.mean()), float(self.norms[-1])
        seconds, parts = self.stopwatch.read()
        speed = self.targets / seconds
        peak, flops = peak_flops(self.device), self.flops_per_token
        mfu = speed / dist.get_world_size() * flops / peak if peak and flops else None
        self.losses, self.norms, self.targets = [], [], 0
        metrics = {
            "train/loss": loss,
            "train/lr": self._learning_rate(self.steps_run - 1),
            "train/grad_norm": norm,
            "train/tokens_per_second": speed,
            "train/mfu": mfu,
            "train/memory_gib": memory_used(self.device) / 2**30,
            **{f"time/{name}": part for name, part in parts.items()},
        }
        self.log.log(self.steps_run, line_of_step(metrics), metrics)

    def _tensors(self):
        """All that a snapshot has to put back, but plain values."""
        model = self.model.module if isinstance(self.model, DDP) else self.model
        return {
            "model": model.state_dict(),
            "optimizer": {"state": self.optimizer.state_dict()["state"]},
        }

    def _save(self, snapshot: bool, exports: list[str]):
        """Save a snapshot and models. Training waits for a copy in memory, not for the disk."""
        if self.rank != 0 or not (snapshot or exports):
            return  # all ranks have the same weights: one file, one writer
        begin = time.perf_counter()
        about = {
            "steps_run": self.steps_run,
            "steps_evaluated": self.steps_evaluated,
            "seed": self.sampler.seed,
            "global_batch_size": self.sampler.global_batch_size,
            "best_loss": self.best_loss,
            "wandb_id": self.wandb_id,
            "identity": self.identity,
            "settings": self._settings(),
        }
        tensors = self._tensors()
        if not snapshot:
            del tensors["optimizer"]
        step = f"Step {self.steps_run} | "
        self.snapshots.save(
            tensors,
            about if snapshot else {},
            dict.fromkeys(exports, self._export),
            lambda line: self.log.write(step + line),
        )
        self.stopwatch.add("save", begin)

    def _agree(self):
        """Tell all ranks of a signal or a problem here; return what any of them told."""
        told = torch.tensor([self.signals.number, self.snapshots.problem is not None])
        dist.all_reduce(told, dist.ReduceOp.MAX)  # on the CPU: it does not wait for the GPU
        return told.tolist()

    def train(self) -> tuple[int, str | None]:
        """Train to the last step or until a signal; return the signal or 0, and what went wrong."""
        with self.signals:
            stop, problem = self._train()
            self.snapshots.writing.result()
            self._agree()  # no rank may end, and torchrun with it, while rank 0 still writes
        problem = problem or self.snapshots.problem
        if not problem:
            self.log.close()
            if stop and self.rank == 0:
                print(f"{signal.Signals(stop).name}: saved at step {self.steps_run}, leaving")
        return stop, problem

    def _train(self):
        args = self.args
        self.batches = iter(self.train_data)
        self.stopwatch.reset()
        stop, exports = self._evaluate_if_due(0)  # a run that was stopped has left it undone
        self._save(False, exports)
        while self.steps_run < self.total_steps and not stop:
            self._run_step(self.steps_run)
            self.steps_run += 1
            self.log.bar.update()
            stop, failed = self._agree()
            finished = self.steps_run == self.total_steps
            report = stop or finished or self.steps_run % args.log_freq == 0
            save = stop or finished or self.steps_run % args.ckpt_freq == 0
            problem = self._problem_with_gradients() if report or save else None
            if problem or failed:
                return stop, problem
            if report:
                self._report()
            stop, exports = self._evaluate_if_due(stop)
            if stop and self.losses:  # it came in the evaluation
                if problem := self._problem_with_gradients():
                    return stop, problem
                self._report()
            self._save(save or stop, exports)
        return stop, None

    def _evaluate_if_due(self, stop):
        """Return `stop`, or the signal that came meanwhile, and what models are to be saved."""
        finished = self.steps_run >= self.total_steps
        exports = ["final"] if finished else []
        due = finished or self.steps_run % self.args.eval_freq == 0
        if due and not stop and self.steps_evaluated < self.steps_run:
            if self.device.type != "cpu":
                torch.accelerator.synchronize()  # what is in the queue is still training
            begin = time.perf_counter()
            self.model.eval()
            loss = self._evaluate()
            self.model.train()
            self.stopwatch.begin += time.perf_counter() - begin  # it is not a part of any step
            stop, _ = self._agree()  # a signal may have come after its last batch
            if loss is not None:
                self.steps_evaluated = self.steps_run
                if loss < self.best_loss:
                    self.best_loss = loss
                    exports.append("best")
        return stop, exports


def sum_gradients(
    stopwatch: Stopwatch, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """How DDP sends a bucket of gradients: it sums. (By itself it would take the mean.)"""
    if bucket.is_last():
        stopwatch.ready = stopwatch.mark()
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def learning_rate(step: int, highest: float, warmup_steps: int, total_steps: int) -> float:
    """Rises in a line over the warm-up steps, then falls as a cosine does, to a tenth."""
    if step < warmup_steps:
        return highest * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return highest * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))
