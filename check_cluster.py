r"""Look at a cluster before the job: who is there, can they talk, and how fast.

On one machine:
  python check_cluster.py
On several, run on each what the job will run, with `python check_cluster.py` for `torchrun`:
  python check_cluster.py --nproc_per_node=gpu --nnodes=2 --rdzv-id=456 --rdzv-backend=c10d \
  --rdzv-endpoint=ADDRESS:29603
It first tries what torchrun would only wait for, and then starts itself on every GPU by torchrun.
Started by torchrun or a file of slurm/ in place of the script, it does the second part only.
Copy the folder plumbing/ together with this file. It needs no other file of ours.

Exit status 0: the job can start. 2: it can't, and a line that begins with ERROR says why. (torchrun
itself exits with 1 in place of 2.)
"""

import argparse
import errno
import json
import logging
import os
import re
import shutil
import socket
import sys
import threading
import time
from collections import Counter
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousError
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from plumbing import devices, launch, processes, streams

HOST = socket.gethostname()
MIB = 2**20


def give_up(problem: str):
    """Tell the problem in one line and end this process with exit status 2."""
    if launch.number_here() > 0:
        time.sleep(5)  # local rank 0 tells it for all; then the launcher ends those who wait
    print(f"ERROR: {problem}", file=sys.stderr, flush=True)
    leave()


def leave():
    """End this process with exit status 2, on the machine where all meet after the others."""
    size, here = (int(os.environ.get(n, 1)) for n in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if size > here and any(map(is_here, resolve(os.environ.get("MASTER_ADDR", HOST)))):
        time.sleep(2)  # the launchers elsewhere lose their rendezvous when the one here ends
    os._exit(2)  # from any thread, and without waiting for what hangs


@contextmanager
def deadline(seconds: float, problem: str):
    """Give up with `problem` when the body raises, or is not done in time. Nothing may hang."""
    timer = threading.Timer(seconds, give_up, [f"{problem} (no answer in {seconds:g} s)"])
    timer.daemon = True
    timer.start()
    try:
        yield
    except Exception as error:
        give_up(f"{problem} ({first_line(error)})")
    finally:
        timer.cancel()


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


# ---- Addresses -----------------------------------------------------------------------------


def resolve(host: str) -> list[str]:
    """The addresses of a host name as this machine knows it, none if it does not know it."""
    ask = partial(socket.getaddrinfo, host, None, proto=socket.IPPROTO_TCP)
    return [address[0] for *_, address in processes.answer_within(12, ask) or []]


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def is_here(address: str) -> bool:
    """Whether `address` belongs to this machine: then, and only then, a socket binds to it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with closing(socket.socket(family)) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def is_taken(port: int) -> bool:
    """Whether another program on this machine already listens on `port`."""
    dual = socket.has_dualstack_ipv6()
    with closing(socket.socket(socket.AF_INET6 if dual else socket.AF_INET)) as probe:
        # It binds as a server does, but does not listen, or two of one job would meet here.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if dual:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            probe.bind(("", port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def interfaces() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def unreachable(host: str, port: int, wait: int) -> str | None:
    """Why this machine cannot connect to host:port, if it cannot within `wait` seconds."""
    end = time.monotonic() + wait
    while True:
        try:
            socket.create_connection((host, port), timeout=wait).close()
            return None
        except OSError as error:
            reason = error
        if time.monotonic() > end:
            break
        time.sleep(0.2)
    where = f"{host} port {port}"
    if isinstance(reason, ConnectionRefusedError):
        return (
            f"nobody listens at {where}: start the check on that machine too, with the same"
            f" endpoint (--wait is how many seconds to wait for it, now {wait})"
        )
    return (
        f"{HOST} gets no answer from {where} ({reason}): is the address right, is the machine up,"
        " and does a firewall between the two let this port through?"
    )


def is_our_rendezvous(host: str, port: int, rdzv_id: str | None) -> bool:
    """Whether another torchrun of this job, on this same machine, listens there already."""
    found = threading.Event()

    def ask():
        with suppress(RuntimeError):
            store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False)
            store.wait([f"torch.rendezvous.{rdzv_id}"])  # the key that all of a job share
            found.set()

    if rdzv_id is not None:  # in a thread, because a program of another kind never answers
        threading.Thread(target=ask, daemon=True).start()
        found.wait(5)
    return found.is_set()


def endpoint_problem(
    host: str, port: int, is_host: bool | None, wait: int, rdzv_id: str | None = None
) -> str | None:
    """What is wrong with the place where all meet, as seen from here.

    `is_host`: whether this machine is to listen there; None: the one that `host` belongs to is,
    as torchrun decides it when it is not told by --rdzv-conf=is_host=…
    """
    addresses, own = resolve(host), resolve(HOST)
    if not addresses:
        return (
            f"{HOST} cannot resolve the name {host}: correct it, add it to /etc/hosts,"
            " or give the address itself"
        )
    if is_host is None and not own:
        return f"{HOST} cannot resolve its own name, as torchrun wants to: add it to /etc/hosts"
    if is_host is False or (is_host is None and not any(map(is_here, addresses))):
        return unreachable(host, port, wait)
    if is_taken(port) and not is_our_rendezvous(host, port, rdzv_id):
        return (
            f"port {port} of {HOST} is taken by another program, perhaps by an earlier job:"
            f" end that (`ss -ltnp` lists them) or choose another port, the same on all machines"
        )
    known = host == HOST or any(map(is_loopback, addresses)) or set(addresses) & set(own)
    if is_host is None and not known:
        return (
            f"{host} belongs to this machine, but its name {HOST} resolves to {' '.join(own)},"
            " so torchrun would not listen there: correct /etc/hosts, or add"
            " --rdzv-conf=is_host=1 here and --rdzv-conf=is_host=0 elsewhere"
        )
    return None


def interface_problem(backend: str) -> str | None:
    """Whether the variable that names the network interface names one that can be used."""
    variable = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}.get(backend, "")
    value = os.environ.get(variable, "")
    if value.startswith("^"):  # NCCL: all but these
        return None
    # NCCL takes the beginning of a name, unless "=" stands in front; gloo takes whole names.
    prefix = backend == "nccl" and not value.startswith("=")
    for name in filter(None, value.lstrip("=").split(",")):
        if not any(there == name or (prefix and there.startswith(name)) for there in interfaces()):
            there = " ".join(interfaces())
            return f"{variable}={value}, but {HOST} has no such interface, only: {there}"
    return None


def name_problem(backend: str) -> str | None:
    """Whether gloo would tell the other machines a loopback address as this machine's own."""
    own = resolve(HOST)
    first = next(filter(is_here, own), "127.0.0.1")  # the one that gloo takes, or its own choice
    if backend != "gloo" or "GLOO_SOCKET_IFNAME" in os.environ or not is_loopback(first):
        return None
    return (
        f"the name {HOST} resolves to {' '.join(own) or 'nothing'} on {HOST} itself, and gloo"
        " would give that to the other machines: correct /etc/hosts, or set GLOO_SOCKET_IFNAME on"
        f" every machine to its interface to the others (there are: {' '.join(interfaces())})"
    )


# ---- First part: what torchrun would only wait for ------------------------------------------


def start_torchrun(options: list[str], own_options: list[str], wait: int):
    """Try the endpoint, then start this file by torchrun with its `options`."""
    if not options and not any(name.startswith("PET_") for name in os.environ):
        options = ["--standalone", f"--nproc_per_node={devices.count_gpus() or 2}"]
    parser = torchrun.get_args_parser()
    parser.usage = argparse.SUPPRESS
    args = parser.parse_args([*options, __file__])
    args.training_script, args.training_script_args = os.path.abspath(__file__), own_options
    args.max_restarts = 0  # what is wrong is told once
    alone = args.nnodes in ("1", "1:1")
    if alone and launch.one_of_several():
        give_up(launch.wrong_start())  # or each would say OK for itself
    if alone:
        processes.warn_if_perhaps_one_of_several()
    if not (alone or args.rdzv_endpoint) and is_loopback(args.master_addr):
        meet = "--rdzv-backend=c10d --rdzv-id=456 --rdzv-endpoint=ADDRESS:29603"
        give_up(f"{args.nnodes} machines, but no address where they meet: give all the same {meet}")
    if not args.standalone and (args.rdzv_endpoint or args.master_port or not alone):
        try:
            endpoint = args.rdzv_endpoint or f"{args.master_addr}:{args.master_port or 29500}"
            host, port = parse_rendezvous_endpoint(endpoint, 29400)
        except ValueError as error:
            give_up(f"--rdzv-endpoint: {error} An IPv6 address stands in brackets: [fd00::1]:29603")
        is_host = re.search(r"is_host=(\w+)", args.rdzv_conf)
        is_host = is_host and is_host[1].lower() in ("1", "true", "t", "yes", "y")
        if args.rdzv_backend == "static":
            is_host = int(args.node_rank) == 0
        if problem := endpoint_problem(host, port, is_host, wait, args.rdzv_id):
            give_up(problem)
        together = 6 * wait
        if not alone:
            where = f"until all {args.nnodes} machines are there"
            print(f"{HOST} waits up to {together} s {where}", flush=True)
        if "timeout" not in args.rdzv_conf:
            limits = f"timeout={together},join_timeout={together}"  # of static rendezvous, of c10d
            args.rdzv_conf = f"{limits},{args.rdzv_conf}".rstrip(",")
    if (args.standalone or args.rdzv_backend == "c10d") and not args.local_addr:
        published = (
            processes.answer_within(5, socket.getfqdn) or HOST
        )  # as the address where the processes meet
        if not processes.can_be_resolved(published, wait):
            cure = "localhost" if alone else "ADDRESS, with the address that the others reach"
            give_up(
                f"{HOST} cannot resolve its own name, {published}, at which torchrun lets the"
                f" processes meet: add it to /etc/hosts, or give --local-addr={cure}"
            )
    logging.disable(logging.ERROR)  # torchrun's report says less than the line that we print
    try:
        torchrun.run(args)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        if failure.exitcode not in (2, -15):  # those have told why
            print(f"ERROR: a process ended with exit status {failure.exitcode}", file=sys.stderr)
        sys.exit(2)
    except RendezvousConnectionError:
        give_up(f"{HOST} lost {args.rdzv_endpoint}, where all meet: look at the output there")
    except RendezvousError as error:
        give_up(
            f"not all {args.nnodes} machines came ({type(error).__name__}): start the same"
            " command on each, with the same --rdzv-id, --nnodes and endpoint"
        )
    except (SignalException, KeyboardInterrupt):
        sys.exit(130)
    except (ValueError, OSError, RuntimeError) as error:  # of torchrun's own, about its options
        give_up(f"torchrun does not start: {first_line(error)}")


# ---- Second part: in each process -----------------------------------------------------------


def ranges(numbers) -> str:
    """{0, 1, 2, 5} as 0-2,5."""
    spans = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in spans)


def parse_ranges(text: str) -> set[int]:
    """0-2,5 as {0, 1, 2, 5}."""
    spans = [span.split("-") for span in text.strip().split(",") if span]
    return {number for span in spans for number in range(int(span[0]), int(span[-1]) + 1)}


def cpus() -> tuple[str, str]:
    """The CPUs that this process may use, and the NUMA nodes that they belong to."""
    if not hasattr(os, "sched_getaffinity"):  # not on Linux
        return f"{os.cpu_count()} in all", "-"
    mine = os.sched_getaffinity(0)
    nodes = {
        int(path.parent.name.removeprefix("node"))
        for path in Path("/sys/devices/system/node").glob("node[0-9]*/cpulist")
        if parse_ranges(path.read_text()) & mine
    }
    return ranges(mine), ranges(nodes) or "-"


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(": ", 1)[1] for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return os.uname().machine


def choose_device(local_rank: int):
    """This process's device, its name, its free memory in bytes, and what is wrong with it."""
    if devices.count_gpus() == 0:
        problem = None
        drivers = [*Path("/proc/driver/nvidia/gpus").glob("*"), *Path("/dev").glob("kfd")]
        if drivers and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
            version = torch.version.cuda or torch.version.hip or "no CUDA"
            problem = (
                f"{HOST} has a GPU, but torch {torch.__version__} ({version}) sees none: is this"
                " the build for that kind of GPU, and is the driver new enough for it?"
            )
        return torch.device("cpu"), cpu_name(), None, problem
    device = devices.device_of(local_rank)
    tool = "amd-smi" if torch.version.hip else "nvidia-smi"
    try:
        torch.accelerator.set_device_index(device)
        torch.zeros(1, device=device)
        name = torch.get_device_module(device).get_device_name(device)
    except Exception as error:
        problem = (
            f"GPU {device.index} of {HOST} cannot be used ({first_line(error)}):"
            f" who uses it, and does the driver work? ({tool})"
        )
        return device, "?", None, problem
    try:
        free, total = torch.get_device_module(device).mem_get_info()
    except Exception:  # not every kind of device can tell
        return device, name, None, None
    problem = None
    if free < total / 2:
        used = f"{(total - free) / 2**30:.1f} of {total / 2**30:.1f} GiB"
        problem = (
            f"GPU {device.index} of {HOST} is busy: {used} are in use ({tool} shows by whom)."
            " Wait, or leave it out with CUDA_VISIBLE_DEVICES"
        )
    return device, name, free, problem


def look_around(device, name, free) -> dict:
    """What the table says of this process, column by column."""
    mine, numa = cpus()
    nccl = "-"
    if device.type == "cuda":
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    shared = shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else None
    return {
        "rank": os.environ["RANK"],
        "local": os.environ["LOCAL_RANK"],
        "host": HOST,
        "device": str(device),
        "name": name,
        "free": f"{free / 2**30:.1f} GiB" if free else "-",
        "CPUs": mine,
        "NUMA": numa,
        "threads": str(torch.get_num_threads()),
        "/dev/shm": f"{shared / 2**30:.1f} GiB" if shared else "-",
        "torch": torch.__version__,
        "CUDA": torch.version.cuda or torch.version.hip or "-",
        "NCCL": nccl,
    }


def gather(store, facts, wait: int) -> list | None:
    """Give `facts` to rank 0. There, return those of all, in the order of ranks; elsewhere None."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store.set(f"facts/{rank}", json.dumps(facts))
    if rank != 0:
        return None
    keys = [f"facts/{other}" for other in range(world_size)]
    end = time.monotonic() + wait
    while not store.check(keys):
        if time.monotonic() > end:
            missing = " ".join(key.split("/")[-1] for key in keys if not store.check([key]))
            give_up(f"nothing was heard of rank {missing} in {wait} s: look at its own output")
        time.sleep(0.1)
    return [json.loads(value) for value in store.multi_get(keys)]


def print_table(rows: list[dict]):
    """Print the rows below their names; mark with * what differs from most of the others."""
    table = [list(rows[0])] + [list(row.values()) for row in rows]
    differs = False
    for column, title in enumerate(rows[0]):
        if title in ("name", "threads", "/dev/shm", "torch", "CUDA", "NCCL"):
            (usual, _), *others = Counter(row[title] for row in rows).most_common()
            differs |= bool(others)
            for line in table[1:]:
                line[column] += "" if line[column] == usual else " *"
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        print("  ".join(cells).rstrip())
    if differs:
        print("* differs from most of the others")


def disagreements(rows: list[dict]) -> list[str]:
    """What must be the same in all processes of a job and is not, with the hosts that have it."""
    problems = []
    for title in ("torch", "CUDA", "NCCL"):
        hosts = {}
        for row in rows:
            if row[title] != "-":  # told below as a GPU that is missing
                hosts.setdefault(row[title], {})[row["host"]] = True
        if len(hosts) > 1:
            which = "; ".join(f"{version} on {' '.join(names)}" for version, names in hosts.items())
            problems.append(f"{title} differs: {which}. Install the same version on all machines")
    kinds = {}
    for row in rows:
        kinds.setdefault(row["device"].split(":")[0], {})[row["host"]] = True
    if len(kinds) > 1 and "cpu" in kinds:
        without = " ".join(kinds["cpu"])
        problems.append(
            f"no GPU for a process on {without}, while others have one: is the driver there, and"
            " what do CUDA_VISIBLE_DEVICES and the number of processes say?"
        )
    return problems


def seconds_per_all_reduce(size: int, group, device: torch.device) -> float:
    """How long one all-reduce of `size` bytes takes in the slowest process, on average.

    Before it is timed, the sums are checked: rank r of n adds r + 1, so each is n (n + 1) / 2.
    """

    def synchronize():
        if device.type != "cpu":
            torch.accelerator.synchronize()

    def timed(repeats):
        synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            dist.all_reduce(tensor, group=group)
        synchronize()
        seconds = torch.tensor((time.perf_counter() - start) / repeats, device=device)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)  # of all: every group repeats equally often
        return float(seconds)

    ranks = dist.get_world_size(group)
    tensor = torch.full((size // 4,), dist.get_rank(group) + 1.0, device=device)
    dist.all_reduce(tensor, group=group)
    if not (tensor == ranks * (ranks + 1) / 2).all():
        give_up(f"rank {dist.get_rank()} on {HOST}: an all-reduce of {size} bytes gave wrong sums")
    tensor.zero_()
    timed(1)
    return timed(max(2, min(50, int(0.2 / timed(2)))))


def measure(nodes: list[int], device: torch.device, largest: int, wait: int):
    """Print latency and bus bandwidth of all-reduce for messages of 1 KiB to `largest` bytes.

    `nodes` has the node of each rank. Those of one node talk among themselves, then all with all.

    In a ring of n processes each sends and receives 2 (n - 1) / n of the message, so that much
    per second, the bus bandwidth, can be compared with the speed of the links, whatever n is.
    Source: github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md.
    """
    groups = {}
    if len({*nodes}) < len(nodes):  # some node has several processes
        mine = [rank for rank, node in enumerate(nodes) if node == nodes[dist.get_rank()]]
        groups["within a node"] = dist.new_group(mine, use_local_synchronization=True)
    if len({*nodes}) > 1:
        groups["between all"] = dist.group.WORLD
    if not groups:
        return
    print_on_rank_0 = print if dist.get_rank() == 0 else lambda *_: None
    print_on_rank_0(f"{'all-reduce':>10}" + "".join(f"  {title:>26}" for title in groups))
    size, slowest = 1024, 0.0
    while size <= largest and slowest < 0.5:
        shown = f"{size // MIB} MiB" if size >= MIB else f"{size // 1024} KiB"
        cells = []
        for group in groups.values():
            with deadline(
                2 * wait, f"all-reduce of larger messages does not work, from {shown} on"
            ):
                seconds = seconds_per_all_reduce(size, group, device)
            ranks = dist.get_world_size(group)
            bandwidth = 2 * (ranks - 1) / ranks * size / seconds
            cells.append(f"  {seconds * 1e6:>11.1f} us {bandwidth / 1e9:>7.2f} GB/s")
            slowest = max(slowest, seconds)
        print_on_rank_0(f"{shown:>10}" + "".join(cells))
        size *= 4
    if size <= largest:
        print_on_rank_0("Larger messages were left out: one takes longer than half a second.")


def compare(everyone: list, master_addr: str, port: int, backend: str) -> bool:
    """Print the table and what is wrong. Return whether all is well."""
    rows, problems, of_names, gpus = zip(*everyone, strict=True)
    found = [(row["host"], "", gpu) for row, gpu in zip(rows, gpus, strict=True)]
    problems += (devices.clash(found),)
    if len({row["host"] for row in rows}) > 1:
        problems += of_names
    nodes = len({row["node"] for row in rows})
    print(f"Processes: {len(rows)} | Nodes: {nodes} | Backend: {backend}", end="")
    print(f" | MASTER_ADDR: {master_addr} | MASTER_PORT: {port}")
    print_table([{title: row[title] for title in row if title != "node"} for row in rows])
    problems = [*dict.fromkeys(filter(None, problems)), *disagreements(rows)]
    for problem in problems:
        print(f"ERROR: {problem}", file=sys.stderr, flush=True)
    return not problems


def check_process(wait: int, max_mib: int | None):
    """Compare this process with the others, and then talk with them."""
    streams.print_whole_lines()
    if problem := launch.wrong_start():
        give_up(problem)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
    rank, world_size, local_rank, port = (int(os.environ[n]) for n in names)
    master_addr = os.environ["MASTER_ADDR"]
    agent_listens = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    listens = rank == 0 and not agent_listens
    addresses = resolve(master_addr)
    if listens and addresses and not any(map(is_here, addresses)):
        give_up(f"MASTER_ADDR: {master_addr} is another machine, but rank 0 runs on {HOST}")
    if trouble := endpoint_problem(master_addr, port, listens, wait):
        if rank != local_rank and any(map(is_loopback, addresses)):
            trouble = (
                f"{master_addr} is {HOST} itself, and not the machine of rank 0, which calls itself"
                " so: correct /etc/hosts there, or give it --local-addr, see docs/clusters.md"
            )
        give_up(f"MASTER_ADDR: {trouble}")
    with deadline(wait, f"the store at {master_addr} port {port} does not work"):
        patience = timedelta(seconds=6 * wait)
        store = dist.TCPStore(
            master_addr, port, world_size, listens, patience, wait_for_workers=False
        )
    # torchrun keeps one store for all its attempts.
    store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)

    device, name, free, problem = choose_device(local_rank)
    backend = dist.get_default_backend_for_device(device)
    if trouble := interface_problem(backend):
        give_up(trouble)
    node = os.environ.get("GROUP_RANK") or os.environ.get("SLURM_NODEID") or rank - local_rank
    row = look_around(device, name, free) | {"node": int(node)}
    gpu = None if problem else devices.name_of_gpu(device)
    everyone = gather(store, [row, problem, name_problem(backend), gpu], 6 * wait)
    if rank == 0:
        well = compare(everyone, master_addr, port, backend)
        store.set("nodes", json.dumps([row["node"] for row, *_ in everyone] if well else None))
    with deadline(6 * wait + 5, "rank 0 did not say how to go on: look at its output"):
        nodes = json.loads(store.get("nodes"))
    if nodes is None:
        # All have to know before the first one ends, since then the launcher ends the others.
        with suppress(RuntimeError):
            store.set(f"bye/{rank}", "")
            store.wait([f"bye/{other}" for other in range(world_size)], patience)
        leave()

    causes = "a wrong interface, IPv4 here and IPv6 there, or a firewall that lets few ports pass"
    with deadline(wait, f"the processes met, but {backend} cannot connect them: {causes}"):
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("group", store),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=300),  # the deadlines here are shorter
            device_id=None if device.type == "cpu" else device,
        )
        hello = torch.zeros(1, device=device)
        dist.all_reduce(hello)
        float(hello)  # on a GPU all_reduce has only begun when it returns
    measure(nodes, device, (max_mib or (64 if device.type == "cpu" else 1024)) * MIB, wait)
    with deadline(2 * wait, "the processes do not meet at the end"):
        dist.barrier()
    if rank == 0:
        print(f"OK: all-reduce gives the right sums between {world_size} processes")
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(
        usage=argparse.SUPPRESS,
        description=__doc__,
        epilog="All other options are torchrun's.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    option = parser.add_argument
    option("--wait", default=10, help="seconds for an answer (10); for all to come, six times that")
    option("--max_mib", "--max-mib", help="largest message in MiB (with GPUs 1024, without 64)")
    args, others = parser.parse_known_args()
    for name, least, most in ("wait", 1, 3600), ("max_mib", 1, 65536):
        text = str(getattr(args, name) or most)
        if not (text.isdecimal() and len(text) < 6 and least <= int(text) <= most):
            parser.error(f"{name}: give a whole number from {least} to {most}, not {text!r}")
    wait, max_mib = int(args.wait), int(args.max_mib) if args.max_mib else None
    if "LOCAL_RANK" in os.environ:
        check_process(wait, max_mib)
    else:
        own = [f"--wait={wait}"] + ([f"--max_mib={max_mib}"] if max_mib else [])
        start_torchrun(others, own, wait)


if __name__ == "__main__":
    main()
