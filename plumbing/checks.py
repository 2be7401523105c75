"""Checks before training and before each save: there is data, and the weights may be saved."""

import math
import socket
import sys

import torch
import torch.distributed as dist

from plumbing import agree, files, launch, output

LARGEST_ROUNDING = 1e-3  # relative to the weights
PART = 1000  # of the numbers of a tensor
compared_before = warned_of_rounding = False
finite_at_start: set[str] = set()  # the names of the buffers that have to stay finite


def all_exit_if_unusable(dataset, model: torch.nn.Module):
    """End all ranks if the dataset is empty. Note which buffers of the model are finite."""
    global finite_at_start
    buffers = model.named_buffers()
    finite_at_start = {plain_name(name) for name, buffer in buffers if is_finite(buffer)}
    empty = hasattr(dataset, "__len__") and len(dataset) == 0
    agree.all_exit_if("the dataset has 0 samples, nothing to train on" if empty else None)


def all_exit_if_not_finite(loss: float, model: torch.nn.Module, train_data):
    """End all ranks if training has diverged, because such weights must not be saved.

    What has to be finite, because NaN would be saved over good weights: the loss, the parameters
    that are trained, and the buffers that were finite at the start. (A mask may hold minus
    infinity.) And the ranks must have the same parameters, because only rank 0 saves its own.
    """
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    watched = trained | buffers_to_watch(model)
    sums = sums_of(watched)
    name, problem = not_finite(loss, watched, sums), None
    if len(train_data) == 0:
        sizes = f"{len(output.sampler_of(train_data))} samples for each process, batch size"
        problem = f"an epoch has no step: {sizes} {output.batch_size_of(train_data)}"
    elif name:
        cure = "Lower the learning rate (the smaller the batch, the lower) or look at the data"
        problem = f"training diverged, nothing is saved: {name} is not finite (loss {loss}). {cure}"
    found = agree.all_gather((problem, [sums[name] for name in trained]))
    if any(problem is not None for problem, _ in found):
        agree.all_exit_if(problem, in_training=True)
    if any(sums != found[0][1] for _, sums in found):
        all_compare_weights(model, trained)


def buffers_to_watch(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that were finite at the start."""
    buffers = model.named_buffers()
    return {name: buffer for name, buffer in buffers if plain_name(name) in finite_at_start}


def sums_of(values: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the sum of each tensor. It is finite only if all numbers of the tensor are."""
    sums = [numbers_of(value).sum(dtype=torch.float32) for value in values.values()]
    return dict(zip(values, to_floats(sums), strict=True))


def to_floats(scalars: list[torch.Tensor]) -> list[float]:
    """Return the value of each scalar, and wait for the GPU once only."""
    if not scalars:
        return []
    return torch.stack([each.to(scalars[0].device) for each in scalars]).tolist()  # from all GPUs


def numbers_of(weight: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a weight as a tensor of torch's ordinary types, without a gradient."""
    if torch.nn.parameter.is_lazy(weight):  # it has no numbers before the first batch
        return torch.zeros(1)
    weight = weight.detach()
    if hasattr(weight, "to_local"):  # a shard: the part that this rank has
        weight = weight.to_local()
    if weight.is_complex():
        return torch.view_as_real(weight)
    # torch has no sum for all types of 8 bits.
    return weight.float() if weight.is_floating_point() and weight.itemsize == 1 else weight


def not_finite(loss: float, values: dict, sums: dict[str, float]) -> str | None:
    """Return the name of the first value that is not finite, or None. sums: of all values."""
    if not math.isfinite(loss):
        return "the loss"
    for name, value in values.items():
        # The sum of large finite numbers may be infinite, too.
        if not math.isfinite(sums[name]) and not is_finite(value):
            return plain_name(name)
    return None


def all_compare_weights(model: torch.nn.Module, trained: dict[str, torch.Tensor]):
    """End all ranks if the weights of one differ from those of rank 0 by more than rounding does.

    DDP gives all ranks the same gradients, so they differ if an update does: in one process's code,
    or because the model is not in DDP. Machines of different kinds only round differently. Ranks
    that have parameters of different names or shapes hold different parts of a model, and are not
    compared. Neither are shards.
    """
    global compared_before, warned_of_rounding
    layout = [(plain_name(name), tuple(each.shape)) for name, each in trained.items()]
    layouts = agree.all_gather(None if is_sharded(model) else layout)
    if None in layouts or any(other != layouts[0] for other in layouts):
        return
    # Whole tensors the first time. If only rounding differs, a part of them is enough from then on.
    largest = all_largest_difference(trained, PART if compared_before else sys.maxsize)
    compared_before = True
    found = agree.all_gather((*largest, socket.gethostname()))
    rank, (excess, relative, name, host) = max(enumerate(found), key=lambda each: each[1][0])
    which = f"{name} of rank {rank} on {host} differs from that of rank 0 by {100 * relative:.2g} %"
    if excess > 1:
        cure = "Put the model into DDP, and make every update on all ranks alike"
        problem = f"the ranks have different weights, nothing is saved: {which}. {cure}"
        agree.all_exit_if(problem, in_training=True)
    if relative > 0 and not warned_of_rounding and launch.rank() == 0:
        kinds = "Machines of different kinds round differently. If they are equal, look for an"
        print(f"WARNING: {which}. {kinds} update that only some ranks make")
    warned_of_rounding |= relative > 0


def is_sharded(model: torch.nn.Module) -> bool:
    """Return whether each rank has a part of each weight, by either kind of FSDP."""
    if any(hasattr(weight, "to_local") for weight in model.parameters()):
        return True
    from torch.distributed.fsdp import FullyShardedDataParallel  # takes a second, so only here

    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


def all_largest_difference(trained: dict, part: int) -> tuple[float, float, str]:
    """Return how far the weight that is furthest from rank 0's is away, and its name.

    The first number is relative to what rounding may make of it, the second one to its size.
    part: how many numbers of a tensor to compare, evenly spread over it.
    """
    differences, norms, counts = [], [], []
    for weight in trained.values():
        mine = numbers_of(weight).flatten()
        mine = mine[:: max(1, len(mine) // part)].float()
        of_rank_0 = mine.contiguous().clone()
        dist.broadcast(of_rank_0, src=0)
        differences.append((mine - of_rank_0).norm())
        norms.append(torch.maximum(mine.norm(), of_rank_0.norm()))
        counts.append(len(mine))
    differences, norms = to_floats(differences), to_floats(norms)
    # A tensor near zero is measured by the size of all numbers, or its rounding would seem large.
    typical = math.sqrt(sum(norm**2 for norm in norms) / sum(counts))
    found = []
    for name, difference, norm, count in zip(trained, differences, norms, counts, strict=True):
        size = max(norm, typical * math.sqrt(count))
        relative = difference / size if size else 0.0
        rounding = max(LARGEST_ROUNDING, 4 * torch.finfo(trained[name].dtype).eps)
        found.append((relative / rounding, relative, plain_name(name)))
    return max(found)


def plain_name(name: str) -> str:
    """Return the name without what DDP and torch.compile add to it."""
    return files.plain_name(name.removeprefix("module."))


def is_finite(value: torch.Tensor) -> bool:
    return bool(numbers_of(value).isfinite().all())
