"""Snapshots and checkpoints on a disk: saved whole or not at all, read whole or refused."""

import io
import os
import pickle
import socket
import zipfile
import zlib
from collections import OrderedDict
from pathlib import Path

import torch
import torch.distributed as dist

from plumbing import agree, devices, launch, locks, output
from plumbing.agree import Refused

PLAIN = (dict, OrderedDict, list, tuple)  # containers that torch.load accepts


def save_atomically(content: dict, path: str):
    """Save `content` whole or not at all: a job may be killed in mid-save, and a disk may be full.

    If torch.load could not read the new file, this rank ends and the old file stays.
    """
    try:
        write_atomically(content, path)
    except Refused as problem:
        agree.exit_alone(f"{path} is not saved: {problem}")


def write_atomically(content: dict, path: str):
    """Save as save_atomically does, but raise Refused if torch.load could not read the file."""
    path = os.path.realpath(path)  # a symbolic link stays one
    content = without_compiled(content)
    try:
        with open(f"{path}.tmp", "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())  # the data are on the disk before the name is
        if path not in read_back:
            read_it_back(content, f"{path}.tmp")
            read_back.add(path)
        os.replace(f"{path}.tmp", path)
    except BaseException:
        Path(f"{path}.tmp").unlink(missing_ok=True)  # otherwise it would keep a full disk full
        raise


read_back = set()  # paths of which this process has read the first file that it saved


def read_it_back(content: dict, path: str):
    try:
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        part = cannot_be_read_back(content, "") or str(error).splitlines()[0]
        raise Refused(part) from error


def cannot_be_read_back(value, name: str) -> str | None:
    """Return which part of `value` torch.load would refuse to read, in words, or None.

    torch.load creates no objects of unknown classes, since these could run code. Numbers of numpy
    are such objects. name: what the value is called.
    """
    if value is None or isinstance(value, torch.Tensor) or type(value) in (bool, int, float, str):
        return None
    if type(value) in PLAIN:
        if isinstance(value, dict):
            for key in value:
                if problem := cannot_be_read_back(key, f"a key of {name or 'it'}"):
                    return problem
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        found = (cannot_be_read_back(part, f"{name}[{key!r}]") for key, part in parts)
        return next(filter(None, found), None)
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception:
        kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        cure = "Make it a plain number, text, list or dict"
        return f"{name} is a {kind}, which torch.load would not read back. {cure}"
    return None


def plain_name(name: str) -> str:
    """Return the name that a weight has in a model that is not compiled."""
    return name.replace("_orig_mod.", "")


def without_compiled(content):
    """Return `content`, but with the names of a model that is not compiled.

    Then a model can load the file whether it is compiled or not.
    """
    if not isinstance(content, dict):
        return content
    if isinstance(content.get("model"), dict):
        content = content | {"model": without_compiled(content["model"])}
    if any(isinstance(name, str) and plain_name(name) != name for name in content):
        content = {plain_name(name): value for name, value in content.items()}
    return content


def all_read_snapshot(path: str, model, optimizer) -> dict | None:
    """Return the snapshot at `path`, on the CPU, or None if there is none.

    If any rank has one that cannot be used, all ranks end. They also end if the state of the
    optimizer could not be saved. To what is in the file this adds "digest", a checksum by which
    equal files are known.
    """
    agree.all_exit_if(cannot_be_read_back(optimizer.state_dict(), "optimizer.state_dict()"))
    snapshot, problem = None, None
    folder, name = os.path.split(os.path.realpath(path))
    busy = f"a different job uses {folder}/{name}"
    locks.all_own(f"{folder}/.{name}.lock", busy, "choose a different --snapshot_path")
    try:
        if os.path.exists(path):
            snapshot = load_whole(path, {"model", "optimizer", "epochs_run", "seed"})
            if not isinstance(snapshot["optimizer"], dict):
                raise Refused("is no snapshot of this script: use the one that wrote it")
            prepare(snapshot, model)
            refuse_misfit(snapshot, model, optimizer)
            snapshot["digest"] = digest_of(path)
    except Refused as error:
        problem = f"{path} {error}, or choose a different --snapshot_path"
    agree.all_exit_if(problem)
    all_exit_if_jobs_differ(path, snapshot)
    Path(f"{os.path.realpath(path)}.tmp").unlink(missing_ok=True)  # a save was cut off here
    return snapshot


def load_whole(path: str, keys: set) -> dict:
    """Return the snapshot in a file, with at least these keys, on the CPU.

    Its tensors stay on the disk until they are used, so it takes no memory of its own. Raises
    Refused for a file that is damaged or no snapshot.
    """
    try:
        with zipfile.ZipFile(path) as file:  # torch.load does not look at the checksums
            if file.testzip() or not any("data.pkl" in name for name in file.namelist()):
                raise zipfile.BadZipFile
    except OSError as error:
        raise Refused(f"cannot be read ({error.strerror}): change that") from error
    except Exception as error:  # a damaged archive raises errors of many kinds
        raise Refused("is damaged or no snapshot: move it away") from error
    try:
        snapshot = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        unsafe = "has objects in it that could run code, and is not read: save only plain values"
        raise Refused(unsafe) from error
    if not isinstance(snapshot, dict) or not keys <= snapshot.keys():
        raise Refused("is no snapshot of this script: use the one that wrote it")
    return snapshot


def prepare(snapshot: dict, model):
    """Adapt a snapshot to the names that this script and this model use, and to the CPU."""
    if "wandb_id" in snapshot:  # older versions of the scripts called it so
        snapshot.setdefault("job_id", snapshot["wandb_id"])
    if isinstance(snapshot["model"], dict):
        here = {plain_name(name): name for name in model.state_dict()}
        there = {name: here.get(plain_name(name), name) for name in snapshot["model"]}
        if any(name != new for name, new in there.items()):
            snapshot["model"] = {there[name]: value for name, value in snapshot["model"].items()}
    # What stays on the CPU load_state_dict keeps as it is, also single numbers beside a GPU. If it
    # were the file's own, the file would occupy its disk after a new one has replaced it.
    on_cpu = any(weight.device.type == "cpu" for weight in model.parameters())
    snapshot["optimizer"] = change_tensors(
        snapshot["optimizer"],
        lambda tensor: tensor.clone() if on_cpu or tensor.dim() == 0 else tensor,
    )


def refuse_misfit(snapshot: dict, model, optimizer):
    """Refuse a snapshot that is whole, but of a different model or optimizer."""
    if problem := misfit(snapshot["model"], model.state_dict()):
        raise Refused(f"is of a different model ({problem}): use that")
    name = type(optimizer).__name__
    before = snapshot.get("optimizer_class", name)  # older snapshots do not contain it
    here, there = optimizer.param_groups, snapshot["optimizer"]["param_groups"]
    sizes = [[len(group["params"]) for group in groups] for groups in (here, there)]
    # Values that are no switches belong to one method. New versions of torch add switches.
    names = {key for key, value in optimizer.defaults.items() if not isinstance(value, bool | None)}
    if before != name or sizes[0] != sizes[1] or any(names - group.keys() for group in there):
        other = f"{before}, not {name}" if before != name else f"than this {name}"
        raise Refused(f"is of a different optimizer ({other}): use that")


def misfit(there, here, name: str = "") -> str | None:
    """Return the first tensor that one side lacks, or that has different shapes, or None.

    there, here: what is in a snapshot, and what it is to be loaded into, trees of dicts.
    """
    there, here = (each if isinstance(each, dict) else {} for each in (there, here))
    for key in here | there:
        place = f"{name} {key}".strip()
        old, new = there.get(key), here.get(key)
        if isinstance(old, dict) or isinstance(new, dict):
            if problem := misfit(old, new, place):
                return problem
        elif shape_of(old) != shape_of(new):
            return f"{place} is {shape_of(old)} there, {shape_of(new)} here"
    return None


def shape_of(value) -> list[int] | str:
    return list(value.shape) if isinstance(value, torch.Tensor) else "missing"


def digest_of(path: str) -> str:
    """Return a checksum of a snapshot's content, made of those of its parts."""
    with zipfile.ZipFile(path) as file:
        parts = sorted((part.filename.partition("/")[2], part.CRC) for part in file.infolist())
    return f"{zlib.crc32(repr(parts).encode()):08x}"


def all_exit_if_jobs_differ(path: str, snapshot: dict | None):
    """End all ranks if machines have snapshots of different jobs."""
    hosts = {}
    mine = snapshot and snapshot.get("job_id")
    for host, job in agree.all_gather((socket.gethostname(), mine)):
        if job is not None:
            hosts.setdefault(job, host)
    where = "; ".join(f"that on {host} is of job {job}" for job, host in hosts.items())
    problem = f"{path} is not of the same job on all machines: {where}. Keep one job's"
    agree.all_exit_if(problem if len(hosts) > 1 else None)


def all_exit_if_disks_differ(snapshot: dict | None):
    """End all ranks if they have not all read the same snapshot, because they share no disk."""
    digest, kind = None, "none"
    if snapshot:
        digest, kind = snapshot["digest"], f"one of epoch {snapshot['epochs_run']}"
    found = agree.all_gather((digest, f"{kind} on {socket.gethostname()}"))
    which = ", ".join(dict.fromkeys(text for _, text in found))
    cure = "If each machine has its own disk, start multinode.py instead"
    problem = f"the snapshot is not the same on all machines ({which}). {cure}"
    agree.all_exit_if(problem if len({digest for digest, _ in found}) > 1 else None)


def all_broadcast_snapshot(snapshot: dict | None, src: int) -> dict:
    """Return the snapshot of rank `src` on every rank, on the CPU.

    The tensors travel one after the other, so that no GPU has to hold more than the largest.
    """
    outline = [change_tensors(snapshot, lambda tensor: tensor.to("meta"))]  # shapes and types only
    dist.broadcast_object_list(outline, src)
    if launch.rank() == src:
        return change_tensors(snapshot, lambda tensor: all_broadcast_tensor(tensor, src))
    return change_tensors(
        outline[0], lambda tensor: all_broadcast_tensor(torch.empty_like(tensor, device="cpu"), src)
    )


def all_broadcast_tensor(tensor: torch.Tensor, src: int) -> torch.Tensor:
    """Send a tensor on the CPU, or receive it into `tensor`; return it."""
    values = tensor.contiguous()
    as_bytes = values.view(-1).view(torch.uint8)  # because not every dtype can be sent
    on_device = as_bytes.to(devices.current_device())
    dist.broadcast(on_device, src)
    return on_device.cpu().view(values.dtype).view(values.shape)


def change_tensors(value, change):
    """Return `value`, a tree of dicts, lists and tuples, with change(tensor) for each tensor."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: change_tensors(part, change) for key, part in value.items()}
    if type(value) in PLAIN:
        return type(value)(change_tensors(part, change) for part in value)
    return value


def print_resume(snapshot: dict, train_data):
    """Print, on rank 0, where training resumes, and what differs from the run that was saved."""
    if launch.rank() != 0:
        return
    print(f"Resuming training from snapshot at Epoch {snapshot['epochs_run']}")
    seed = getattr(output.sampler_of(train_data), "seed", snapshot["seed"])
    if snapshot["seed"] != seed:
        print(f"The snapshot's seed stays, {snapshot['seed']}, not {seed}")
    now = output.batch_size_of(train_data), dist.get_world_size()
    before = tuple(snapshot.get("sizes", now))  # older snapshots do not contain them
    if now != before and None not in now + before:
        now, before = (f"{a * b} ({a} x {b} processes)" for a, b in (now, before))
        print(f"Global batch size: {now}, but {before} in the snapshot")
