"""Which CPU cores a process keeps to: those nearest to its GPU, and so near to what feeds it."""

import os
import socket
from pathlib import Path

import torch
import torch.distributed as dist

from plumbing import agree
from training.job import explain


def all_bind_cpus(device: torch.device):
    """Keep this process on its share of the cores near its GPU, and print the mask of these."""
    problem, rank = None, dist.get_rank()
    allowed = getattr(os, "sched_getaffinity", lambda process: set())(0)
    mine = near(device) & allowed or allowed
    found = agree.all_gather((socket.gethostname(), mine))
    sharers = [other for other, place in enumerate(found) if place == found[rank]]
    cpus = share(mine, sharers.index(rank), len(sharers))
    try:
        os.sched_setaffinity(0, cpus)
        torch.set_num_threads(min(torch.get_num_threads(), len(cpus)))
    except (AttributeError, OSError) as error:  # not on macOS, not with more processes than cores
        problem = f"bind-cpus: not on {socket.gethostname()}: {explain(error)}"
    agree.all_exit_if(problem)
    print(f"Rank {rank} | {device} | Bound to CPUs {mask_of(cpus)}, of {mask_of(mine)}")


def near(device: torch.device, system=Path("/sys")) -> set[int]:
    """The CPUs near a GPU, as the PCI bus knows it; none if it is not told, or there is no GPU."""
    try:
        gpu = torch.cuda.get_device_properties(device)
        address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
        text = (system / "bus/pci/devices" / address / "local_cpus").read_text()
    except (AssertionError, AttributeError, OSError, RuntimeError, ValueError):
        return set()
    mask = int(text.replace(",", ""), 16)
    return {cpu for cpu in range(mask.bit_length()) if mask >> cpu & 1}


def share(cpus: set[int], number: int, count: int, system=Path("/sys")) -> list[int]:
    """Share `number` of `count` equal ones. The hardware threads of a core stay together."""

    def place(cpu):
        folder = system / f"devices/system/cpu/cpu{cpu}/topology"
        names = ("physical_package_id", "core_id")
        return [int((folder / name).read_text()) for name in names if (folder / name).exists()]

    size = len(cpus) // count
    return sorted(cpus, key=place)[number * size : (number + 1) * size]


def mask_of(cpus) -> str:
    """Bit n stands for CPU n, as in the masks of srun and taskset."""
    return hex(sum(1 << cpu for cpu in cpus))
