"""Which GPU belongs to this process."""

import torch


def count_gpus() -> int:
    """Return how many GPUs of this machine can train together.

    Apple's GPU is not counted, because no backend connects several processes that use it.
    """
    return 0 if torch.backends.mps.is_available() else torch.accelerator.device_count()


def device_of(local_rank: int) -> torch.device:
    """Return the device of the process with this local rank: its GPU, or the CPU without any.

    The GPU has its index within what this process sees. A site's wrapper may show each process one
    GPU only, which then has index 0 in all of them.
    """
    if count_gpus() == 0:
        return torch.device("cpu")
    return torch.device(torch.accelerator.current_accelerator().type, local_rank % count_gpus())


def current_device() -> torch.device:
    """Return the device that this process has chosen: collectives of objects use it too."""
    if count_gpus() == 0:
        return torch.device("cpu")
    return device_of(torch.accelerator.current_device_index())


def name_of_gpu(device: torch.device) -> str | None:
    """Return what tells this GPU apart from all others, or None for a device without such a name.

    An index cannot: it counts what this process sees.
    """
    if device.type != "cuda":
        return None
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"  # as nvidia-smi -L prints it


def shared_gpu(gpus: list[tuple[str, str | None]]) -> str | None:
    """Return which two ranks use one GPU, in words, or None if each has its own.

    gpus: the host and the name_of_gpu of each rank, in the order of ranks.
    """
    first = {}
    for rank, (host, gpu) in enumerate(gpus):
        if gpu is not None and (other := first.setdefault(gpu, rank)) != rank:
            cure = "Start one process for each GPU"
            return f"ranks {other} and {rank} use the same GPU, {gpu} of {host}. {cure}"
    return None
