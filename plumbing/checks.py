"""Checks before training and before each save: there is data, and what is saved is finite."""

import torch

from plumbing import agree, files, output

finite_at_start: set[str] = set()  # the names of the buffers that have to stay finite


def all_exit_if_unusable(dataset, model: torch.nn.Module):
    """End all ranks if the dataset is empty. Note which buffers of the model are finite."""
    global finite_at_start
    buffers = model.named_buffers()
    finite_at_start = {plain_name(name) for name, buffer in buffers if is_finite(buffer)}
    empty = hasattr(dataset, "__len__") and len(dataset) == 0
    agree.all_exit_if("the dataset has 0 samples, nothing to train on" if empty else None)


def all_exit_if_not_finite(loss: float, model: torch.nn.Module, train_data):
    """End all ranks if training has diverged, because NaN must not be saved over good weights.

    What has to be finite: the loss, the parameters that are trained, and the buffers that were
    finite at the start. (A mask may hold minus infinity.)
    """
    if len(train_data) == 0:
        sizes = f"{len(output.sampler_of(train_data))} samples for each process, batch size"
        size = output.batch_size_of(train_data)
        agree.all_exit_if(f"an epoch has no step: {sizes} {size}", in_training=True)
    name, problem = not_finite(loss, model), None
    if name:
        cure = "Lower the learning rate (the smaller the batch, the lower) or look at the data"
        problem = f"training diverged, nothing is saved: {name} is not finite (loss {loss}). {cure}"
    agree.all_exit_if(problem, in_training=True)


def not_finite(loss: float, model: torch.nn.Module) -> str | None:
    """Return the name of the first value that has to be finite and is not, or None."""
    values = [("the loss", torch.tensor(loss))]
    values += [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    buffers = [(plain_name(name), buffer) for name, buffer in model.named_buffers()]
    values += [(name, buffer) for name, buffer in buffers if name in finite_at_start]
    return next((plain_name(name) for name, value in values if not is_finite(value)), None)


def plain_name(name: str) -> str:
    """Return the name without what DDP and torch.compile add to it."""
    return files.plain_name(name.removeprefix("module."))


def is_finite(value: torch.Tensor) -> bool:
    if torch.nn.parameter.is_lazy(value):  # it has no numbers before the first batch
        return True
    if value.is_floating_point() and value.element_size() == 1:
        value = value.float()  # torch has no isfinite for all types of 8 bits
    return bool(value.isfinite().all())
