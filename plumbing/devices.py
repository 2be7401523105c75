"""Which GPU belongs to this process."""

import torch


def count_gpus() -> int:
    """Return how many GPUs of this machine can train together.

    Apple's GPU is not counted, because no backend connects several processes that use it.
    """
    return 0 if torch.backends.mps.is_available() else torch.accelerator.device_count()


def device_of(local_rank: int) -> torch.device:
    """Return the device of the process with this local rank: its GPU, or the CPU if there is none.

    The index counts the GPUs that this process sees. A site's wrapper may show each process a
    single GPU, which then has index 0 in all of them.
    """
    if count_gpus() == 0:
        return torch.device("cpu")
    return torch.device(torch.accelerator.current_accelerator().type, local_rank % count_gpus())


def current_device() -> torch.device:
    """Return the device that this process has chosen."""
    if count_gpus() == 0:
        return torch.device("cpu")
    return device_of(torch.accelerator.current_device_index())


def name_of_gpu(device: torch.device) -> str | None:
    """Return a name that no other GPU has, or None for a device without one.

    An index is no such name, because it counts the GPUs that this process sees.
    """
    if device.type != "cuda":
        return None
    about = torch.cuda.get_device_properties(device)
    # Some drivers give all cards of a machine one UUID, and all partitions of a card one PCI bus.
    return f"GPU-{about.uuid}/PCI-{getattr(about, 'pci_bus_id', 0):02x}"


def clash(found: list[tuple[str, str, str | None]]) -> str | None:
    """Return which two ranks cannot train together on their devices, in words, or None.

    found: the host, the type of the device and its name_of_gpu, of each rank in their order.
    """
    first = {}
    for rank, (host, kind, gpu) in enumerate(found):
        if gpu is not None and (other := first.setdefault((host, gpu), rank)) != rank:
            cure = "Start one process for each GPU"
            return f"ranks {other} and {rank} use the same GPU, {gpu} of {host}. {cure}"
        if kind != found[0][1]:
            devices = f"rank 0 on {found[0][0]} has a {found[0][1]}, rank {rank} on {host} a {kind}"
            return f"not all ranks have the same kind of device: {devices}. Run check_cluster.py"
    return None
