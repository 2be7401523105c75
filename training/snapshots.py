"""Snapshots of a run: written beside the training, the newest of any machine found again."""

import itertools
import os
import re
import shutil
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from plumbing import agree, files, locks
from training.job import explain

ABOUT = {"steps_run", "seed", "global_batch_size", "best_loss", "wandb_id"}
UMASK = os.umask(0)  # it cannot be asked for without being set
os.umask(UMASK)


class Snapshots:
    """The snapshots of a run in `folder`, the last two or all of them, and models beside them.

    A snapshot is a dict: a tree of tensors, and beside it plain values: `steps_run`, `wandb_id`, by
    which a job is known, and others. `problem` says why the last save failed, or is None.
    """

    def __init__(
        self,
        folder: str,
        options: tuple[str, str],
        name: str,
        number_of=lambda steps: steps,
        keep_all=False,
    ):
        """`options` name the folder and the snapshot to go on from. `name` is that of a snapshot,
        such as "snapshots/step-{0:08d}.pt", with a place for number_of(its steps_run).
        """
        self.folder = Path(folder)
        self.option, self.resume = options
        self.another = f"choose another --{self.option}"
        self.name, self.number_of, self.keep_all = name, number_of, keep_all
        self.problem = None
        self.writer, self.buffers = ThreadPoolExecutor(1), {}
        self.writing = self.writer.submit(lambda: None)

    def all_lock(self):
        """Two jobs must not write in one folder. The end of the process opens the lock again."""
        busy = f"{self.option}: another job is writing in {self.folder}"
        locks.all_own(str(self.folder / "lock"), busy, self.another)

    def paths(self) -> list[Path]:
        """The snapshots on this machine, newest first."""
        found = self.folder.glob(re.sub("{.*}", "*", self.name))
        numbers = {path: number for path in found if (number := self.number(path)) is not None}
        return sorted(numbers, key=numbers.get, reverse=True)

    def number(self, path: Path) -> int | None:
        """That in the name of a snapshot, or None for any other file."""
        before, after = map(re.escape, re.split("{.*}", Path(self.name).name))
        match = re.fullmatch(f"{before}([0-9]+){after}", path.name)
        return int(match[1]) if match else None

    def make_buffers(self, tensors: dict):
        """Take the memory for copies of these before the first save needs it."""
        self.writing = self.writer.submit(self._copy_to_host, tensors)

    def save(self, tensors: dict, about: dict, exports: dict, tell: Callable):
        """Save a snapshot, unless `about` is empty, and models. Training waits for a copy only.

        exports[name](weights, path) writes a model to the folder `path`; then it is called `name`.
        tell(line) is called once each is there.
        """
        self.writing.result()  # the buffers are free once the last save is on the disk
        tensors = self._copy_to_host(tensors)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        # A name of its own, so that two of the same step are not taken for one.
        about = about and about | {"name": uuid.uuid4().hex}
        self.writing = self.writer.submit(self._write, tensors, about, exports, tell)

    def _copy_to_host(self, value):
        """Copy the tensors in `value`, a tree of dicts, into buffers that all saves use."""
        if isinstance(value, dict):
            return {key: self._copy_to_host(item) for key, item in value.items()}
        if not isinstance(value, torch.Tensor):
            return value
        key = value.data_ptr()  # tied weights are one tensor with two names: they stay one
        if key not in self.buffers:
            pin = value.device.type == "cuda"  # what is pinned is copied to at full speed
            self.buffers[key] = torch.empty_like(value, device="cpu", pin_memory=pin)
        return self.buffers[key].copy_(value, non_blocking=True)

    def _write(self, tensors, about, exports, tell):
        """Runs in a thread beside the training."""
        try:
            for name, export in exports.items():
                self._replace_folder(self.folder / name, export, tensors["model"])
                tell(f"Model saved at {self.folder / name}")
            if about:
                number = self.number_of(about["steps_run"])
                path = self.folder / self.name.format(number)
                path.parent.mkdir(exist_ok=True)
                files.write_atomically(tensors | about, str(path))
                older = [other for other in self.paths() if self.number(other) < number]
                for old in [] if self.keep_all else older[1:]:
                    old.unlink()  # the last but one is kept, in case that the last is damaged
                tell(f"Training snapshot saved at {path}")
        except Exception as error:
            while error.__context__:  # torch.save fails once more where it ends the file
                error = error.__context__
            why = f"{explain(error)}. The last snapshot stays"
            self.problem = f"cannot save in {self.folder}: {why}"

    def _replace_folder(self, path, write, weights):
        """Have a folder written, and put it in the place of `path`, which so is whole or absent."""
        temporary, replaced = path.with_suffix(".tmp"), path.with_suffix(".old")
        shutil.rmtree(temporary, ignore_errors=True)  # of a run that was killed
        write(weights, temporary)
        for file in temporary.iterdir():
            file.chmod(0o666 & ~UMASK)  # safetensors makes files that nobody else can read
        if path.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            path.rename(replaced)
        temporary.rename(path)
        shutil.rmtree(replaced, ignore_errors=True)

    def all_load(self, asked: str, tensors: dict, refusal: Callable) -> dict | None:
        """Fill `tensors` from the newest snapshot on any machine; return its plain values, or None.

        `asked` is latest, none or the number of one. refusal(snapshot) says why one that is
        whole must not be used here: then all end. Or it says nothing.
        """
        paths, problem = self.paths(), None
        if asked == "none" and paths:
            problem = f"{self.resume}: {self.folder} has snapshots: {self.another}"
        agree.all_exit_if(problem)
        if asked.isdecimal():
            paths = [path for path in paths if self.number(path) == int(asked)]
        snapshot, damaged = self._newest_whole(paths)
        problem = snapshot and (refusal(snapshot) or files.misfit(only(snapshot, tensors), tensors))
        problem = (
            problem and f"{self.folder} is of another run: {problem}: to keep it, {self.another}"
        )
        agree.all_exit_if(problem)
        about = {key: snapshot[key] for key in snapshot if key not in tensors} if snapshot else None
        # Every machine has a disk of its own: all ranks go on from the newest snapshot on any.
        abouts, lines = zip(*agree.all_gather((about, list(damaged.values()))), strict=True)
        lines = sorted(set(itertools.chain(*lines)))
        newest = max(filter(None, abouts), key=lambda about: about["steps_run"], default=None)
        if lines and not newest:
            problem = ": ".join(lines[-1])
        elif asked.isdecimal() and not newest:
            problem = f"{self.resume}: there is no {self.name.format(int(asked))} in {self.folder}"
        elif len({about["wandb_id"] for about in abouts if about}) > 1:
            problem = f"{self.folder} is not of the same job on all machines: move the others away"
        agree.all_exit_if(problem)
        if dist.get_rank() == 0:
            for line, _ in lines:
                print(f"WARNING: {line}. Another one is used, and this one is renamed")
        if newest:
            everywhere = all(about == newest for about in abouts)
            mine = snapshot if about == newest else None
            all_fill(tensors, mine, None if everywhere else abouts.index(newest))
        self._put_away(damaged, newest["number"] if newest else 0)
        return newest

    def _newest_whole(self, paths):
        """The first snapshot that can be read, or None, and {path: why not} for those before it."""
        damaged = {}
        for path in paths:
            try:
                snapshot = files.load_whole(str(path), ABOUT)
                return snapshot | {"number": self.number(path)}, damaged
            except agree.Refused as error:
                problem, _, cure = str(error).partition(": ")
                damaged[path] = f"{path} {problem}", f"{cure}, or {self.another}"
        return None, damaged

    def _put_away(self, damaged, number):
        """Leave no half file, and nothing that would be taken for the newest from here on."""
        for path in self.folder.glob(re.sub("{.*}", "*", self.name) + ".tmp"):
            path.unlink(missing_ok=True)  # a save was cut off here
        for path in self.paths():
            if path in damaged or self.number(path) > number:
                with suppress(FileNotFoundError):  # another rank of this machine was faster
                    path.rename(path.with_suffix(".unused"))


def only(snapshot: dict, tensors: dict) -> dict:
    """Return the part of a snapshot that `tensors` names, without the plain values beside it."""
    return {key: snapshot.get(key) for key in tensors}


def all_fill(tensors: dict, snapshot: dict | None, source: int | None):
    """Copy this rank's snapshot into `tensors`, if it has one. Then all take those of `source`."""
    for key, tensor in tensors.items():
        if isinstance(tensor, dict):
            all_fill(tensor, snapshot and snapshot[key], source)
            continue
        if snapshot:
            tensor.copy_(snapshot[key])
        if source is not None:
            dist.broadcast(tensor, source)


def differences(there: dict, here: dict) -> str:
    """What is another in a snapshot than here, in words. What one of them does not have is equal.

    A pair is (what it is known by, how it is called), and only the first is compared.
    """
    told = []
    for name in [name for name in there if name in here]:
        old, new = (
            (each if isinstance(each, tuple) else (each, each))
            for each in (there[name], here[name])
        )
        if old[0] != new[0]:
            words = (str(b) if a == b else f"{b} ({a:.12})" for a, b in (old, new))
            told.append("{} is {} there, {} here".format(name, *words))
    return ", ".join(told)


def all_compare(identity: dict, name: str) -> str:
    """End all if that of the run differs between machines. Return the `name` that rank 0 has."""
    ranks = agree.all_gather((identity, name))
    told = next(filter(None, (differences(ranks[0][0], each) for each, _ in ranks)), "")
    agree.all_exit_if(f"not the same on all machines: {told}" if told else None)
    return ranks[0][1]
