"""Break training jobs on purpose, in every way that we know, and look at what is left.

  python tests/faults.py                                    each fault on each script, once
  python tests/faults.py --fault SIGKILL --script multinode.py
  python tests/faults.py --runs 200 --seed 1 --write docs/reliability.md

A run starts a script under its real launcher, on one host or two, does one thing to it at a moment
that the seed decides, and lets the launcher, or the command typed again as a person would, twice
at most, bring it back, until the training is done. It is counted as lost unless

- the job ended or went on, and did not hang longer than its time-out allows,
- no more was trained again than what came after the last save,
- the snapshot at the end is bit for bit that of a run that nobody disturbed,
- the snapshot before it was never harmed: what was announced as saved is there, and can be read,
- the output names the cause,
- no process, no temporary file and no open port is left.

It needs Linux, root and the commands ip, unshare, nsenter and setpriv, since each host is a
namespace of this machine with a network card and a disk of its own.
"""

import argparse
import ctypes
import dataclasses
import os
import random
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import launch
from hosts import Network, has_namespaces

TIMEOUT = 8  # seconds that a rank waits for another
KILLED_AFTER = 30  # seconds that torchrun gives a process to end, before it kills it
ALLOWED = TIMEOUT + KILLED_AFTER + 60  # seconds to notice a fault and start again, on slow cores
DRIVER = '''
"""Runs the script in sys.argv; SIGUSR2 brings about what `failure` says in this process."""
import runpy, signal, sys
import torch
from torch.utils.data._utils import fetch
broken = False
def signalled(*_):
    global broken
    broken = True
def failing(self, *args):
    if broken:
        {failure}
    return fetch_batch(self, *args)
fetch_batch = fetch._MapDatasetFetcher.fetch
fetch._MapDatasetFetcher.fetch = failing
signal.signal(signal.SIGUSR2, signalled)
sys.path.insert(0, {root!r})
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
'''
SITE = '''
"""Python imports this first: the disk is slow, and the clock ahead by the seconds in the file."""
import datetime, os, time
fsync, now = os.fsync, time.time
def slow_fsync(file):
    time.sleep({slow})
    fsync(file)
os.fsync = slow_fsync
def ahead():
    with open({clock!r}) as file:
        seconds = int(file.read() or 0)
    if seconds:
        open({clock!r} + ".used", "w").close()
    return seconds
class Datetime(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return super().now(tz) + datetime.timedelta(seconds=ahead())
Datetime.__name__ = Datetime.__qualname__ = "datetime"
Datetime.__module__ = "datetime"
if {clock!r}:
    datetime.datetime = Datetime
    time.time = lambda: now() + ahead()
'''
SLOW = 0.1  # seconds that the disks take for a save, so that a fault can fall into it
TRAINED = re.compile(r"^(?:\[rank 0\] Epoch|Step) (\d+)(?: \| Batch|/\d+ \| Loss)", re.MULTILINE)
SAVED = re.compile(r"^(?:Epoch|Step) (\d+) \| Training snapshot saved", re.MULTILINE)


@dataclasses.dataclass
class Script:
    """How a script is started here, and how its progress is counted, in epochs or steps."""

    name: str
    names: tuple[str, ...]  # of its hosts
    nproc: int  # on each host
    unit: str
    total: int
    every: int  # from one save to the next

    def command(self, options=(), driver=()):
        """What is typed on each host: `options` are the script's, `driver` runs it."""
        args = [f"--timeout={TIMEOUT}", *options]
        if self.name == "train_llm.py":
            args += ["--dataset-name", "../text.txt", "--model-name", "../gpt2.json"]
            args += ["--tokenizer-name", "bytes"]
            args += ["--max-steps", self.total, "--ckpt-freq", self.every, "--log-freq", 1]
            args += ["--eval-freq", 1000, "--batch-size", 2]
        else:
            args = [f"--total_epochs={self.total}", f"--save_every={self.every}", *args]
        script = [*driver, launch.ROOT / self.name]
        restarts = ["--max-restarts=3"]
        if len(self.names) == 1:
            launcher = ("--standalone", *restarts)
            return launch.torchrun(*map(str, script), *args, nproc=self.nproc, options=launcher)
        launcher = (*restarts, "--rdzv-conf=join_timeout=60,read_timeout=20")
        first, *rest = map(str, script)
        how = {"nproc": self.nproc, "nnodes": len(self.names), "options": launcher}
        return launch.agent("10.77.0.1:29603", *rest, *args, script=first, **how)


def named(name: str) -> Script:
    return next(script for script in SCRIPTS if script.name == name)


SCRIPTS = [
    Script("multigpu_torchrun.py", ("alpha",), 2, "epoch", 80, 4),
    Script("multinode.py", ("alpha", "beta"), 1, "epoch", 80, 4),
    Script("train_llm.py", ("alpha",), 2, "step", 320, 16),
]
GPT2 = (
    '{"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2, "n_positions": 32,'
    ' "vocab_size": 257, "bos_token_id": 256, "eos_token_id": 256}'
)
TEXT = "\n".join(f"{n} times {n} is {n * n}." for n in range(2000))


class Job:
    """A script on its hosts: its processes, its disks and what it has printed."""

    def __init__(self, script: Script, network: Network, rng: random.Random, fault=None):
        self.script, self.network, self.rng = script, network, rng
        self.hosts = network.hosts
        self.options = {host: [] for host in self.hosts}  # what is typed on one host only
        self.launchers, self.readers = {}, []
        self.lines = []  # all that was printed, on any host, in its order
        # Before a save, when there is no time to look: the pids by rank and by host, and which
        # host is saving.
        self.pid_of_rank, self.pids_on, self.saving = {}, {}, None
        self.starting = False  # when the fault came
        self.env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
        self.env |= {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "eth0"}
        if len(self.hosts) == 1:
            del self.env["GLOO_SOCKET_IFNAME"]
        self.driver = []
        for host in self.hosts:
            disk, temporary = host.folder / "disk", host.folder / "tmp"
            disk.mkdir()
            temporary.mkdir()
            host.sh(f"mount -t tmpfs -o size=24m tmpfs {disk}")
            # The disk as it is seen from outside of the host.
            host.disk = Path(f"/proc/{host.holder.pid}/root{disk}")
            (host.folder / "gpt2.json").write_text(GPT2)
            (host.folder / "text.txt").write_text(TEXT)
            (host.folder / "sitecustomize.py").write_text(SITE.format(slow=SLOW, clock=""))
        if fault and fault.failure:
            path = self.hosts[0].folder.parent / "driver.py"
            path.write_text(DRIVER.format(failure=fault.failure, root=str(launch.ROOT)))
            self.driver = [path]
        if fault and fault.moves_the_clock:
            self.set_clock(0)

    def set_clock(self, seconds):
        """Move the clock of the last host, as its Python programs see it."""
        folder = self.hosts[-1].folder
        (folder / "clock").write_text(str(seconds))
        site = SITE.format(slow=SLOW, clock=str(folder / "clock"))
        (folder / "sitecustomize.py").write_text(site)

    def start(self, host):
        """Type the command on `host`."""
        command = self.script.command(self.options[host], self.driver)
        enter = ["sh", "-c", 'cd "$0" && exec "$@"', str(host.folder / "disk")]
        env = {"TMPDIR": str(host.folder / "tmp")} | self.env
        env["PYTHONPATH"] = str(host.folder)  # where sitecustomize.py is
        env = [f"{key}={value}" for key, value in env.items()]
        not_almighty = ["setpriv", "--bounding-set=-dac_override"]  # or root writes anywhere
        self.launchers[host] = subprocess.Popen(
            [*host.enter, *not_almighty, "env", *env, *enter, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        reader = threading.Thread(target=self.lines.extend, args=(self.launchers[host].stdout,))
        self.readers.append(reader)
        reader.start()

    def start_all(self):
        for host in self.hosts:
            if self.ended(host) is not None:
                self.start(host)

    def ended(self, host):
        """The exit status of the launcher on `host`, or None while it runs."""
        return self.launchers[host].poll() if host in self.launchers else -1

    def output(self, begin=0):
        """What was printed on all hosts, from that line on."""
        return "".join(self.lines[begin:])

    def ranks(self) -> dict[int, int]:
        """The pid of each rank that runs now."""
        found = {}
        for host in self.hosts:
            for pid in host.processes():
                try:
                    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                    lines = Path(f"/proc/{pid}/environ").read_text().split("\0")
                except OSError:  # it has just ended
                    continue
                env = dict(line.partition("=")[::2] for line in lines)
                if "RANK" in env and int(stat[1]) == self.launchers[host].pid:
                    found[int(env["RANK"])] = pid
        return found

    def rank(self, number) -> int:
        limit = time.monotonic() + 30
        while number not in (ranks := self.ranks()):
            if time.monotonic() > limit:
                raise Lost(f"rank {number} does not start")
            time.sleep(0.01)
        return ranks[number]

    def temporary_files(self):
        """Files that are half written or on their way out, and what lies among temporary files."""
        found = []
        for host in self.hosts:
            found += [*host.disk.rglob("*.tmp"), *host.disk.rglob("*.old")]
            found += (host.folder / "tmp").iterdir()
        # Folders that PyTorch and Python leave, see docs/reliability.md.
        theirs = ("torchelastic_", "torchinductor_", "pymp-")
        return [path for path in found if not path.name.startswith(theirs)]

    def host_that_saves(self):
        """The host where a snapshot is being written, if one is."""
        for host in self.hosts:
            if any(host.disk.rglob("*.pt.tmp")):
                return host

    def snapshots(self):
        """All snapshots on all disks."""
        names = ("snapshot.pt", "outputs/default/snapshots/step-*.pt")
        return [path for host in self.hosts for name in names for path in host.disk.glob(name)]

    def newest(self):
        """The contents of the newest snapshot, without what differs between any two jobs."""
        found = []
        for path in self.snapshots():
            with zipfile.ZipFile(path) as file:
                if file.testzip():
                    raise Lost(f"{path} is damaged")
            found.append(torch.load(path, weights_only=True))
        if not found:
            return {"epochs_run": 0}
        newest = max(found, key=progress)
        for key in "job_id", "wandb_id", "name", "identity", "settings", "optimizer_class":
            newest.pop(key, None)
        return newest

    def listening(self):
        """Ports that somebody listens at on the hosts."""
        found = []
        for host in self.hosts:
            for name in "tcp", "tcp6":
                lines = Path(f"/proc/{host.holder.pid}/net/{name}").read_text().splitlines()[1:]
                found += [line.split()[1] for line in lines if line.split()[3] == "0A"]
        return found

    def die(self):
        """A power cut on all hosts."""
        for host in self.hosts:
            host.die()
        for host in self.hosts:
            self.launchers[host].wait()


def progress(snapshot) -> int:
    return snapshot.get("epochs_run", snapshot.get("steps_run"))


class Lost(Exception):
    """A run in which something was lost, and what."""


# --- The faults


@dataclasses.dataclass
class Fault:
    name: str
    do: Callable[[Job], None]
    sees: str = ""  # what a person sees that names the cause; nothing: the job just goes on
    undo: Callable[[Job], None] = lambda job: None  # what a person does before the next command
    scripts: tuple[str, ...] = tuple(script.name for script in SCRIPTS)
    in_a_save: bool = False
    moves_the_clock: bool = False
    may_mean_nothing: bool = False  # then nobody need see it
    at_any_time: bool = False  # also before the first save
    patience: float = 3  # seconds that a person waits for the launchers on the other hosts
    failure: str = ""  # of Python, raised in a rank that gets SIGUSR2
    costs_the_snapshot: bool = False  # of a script that keeps only one
    train_llm_saves_first: bool = False  # so it repeats nothing


def kill(job, rank=None, everything=False):
    """Kill a rank, or a launcher, or everything on its host: one that saves, if one does."""
    host = job.saving or job.rng.choice(job.hosts)
    if rank is not None:
        return os.kill(job.pid_of_rank.get(rank) or job.rank(rank), signal.SIGKILL)
    job.launchers[host].kill()
    if everything:
        for pid in job.pids_on.get(host, []):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        host.die()


def send(job, number, to, times):
    """Send the signal once, or again after a moment, to one or to many processes."""
    host, rank = job.rng.choice(job.hosts), job.rng.choice([0, 1])
    pids = [job.launchers[host].pid if to == "the launcher" else job.rank(rank)]
    if to == "the process group of a rank":  # its own, with the process that reads its data
        pids = [pid for host in job.hosts for pid in host.processes() if group(pid) == pids[0]]
    if to == "every process of a host":  # as a scheduler does
        pids = host.processes()
    for pid in pids:
        os.kill(pid, number)
    if times == 2:
        time.sleep(job.rng.choice([0.1, 1, 2]))
        for pid in pids:
            with suppress(ProcessLookupError):  # it has left after the first
                os.kill(pid, number)


def group(pid):
    with suppress(ProcessLookupError):
        return os.getpgid(pid)


def cut_link(job, seconds):
    host = job.rng.choice(job.hosts)
    job.network.cable(host, "down")
    if seconds:
        time.sleep(seconds / 2)
        count = len(job.lines)
        time.sleep(seconds / 2)
        if len(job.lines) > count:
            raise Lost("it went on without the link")
        job.network.cable(host, "up")


def mend_link(job):
    """A launcher that was cut off from the store waits as long as TCP does, so it is killed."""
    for host in job.hosts:
        if job.ended(host) is None:
            host.die()
            job.launchers[host].wait()
    for host in job.hosts:
        job.network.cable(host, "up")


def fill_disk(job):
    """Fill all disks while no save is under way: it gives back the room of the snapshot before."""
    saving = True
    while saving and "No space left" not in job.output():
        saving = job.host_that_saves()
        for host in job.hosts:
            with open(host.disk / "filler", "ab", buffering=0) as file:
                for size in 2**16, 2**12, 1:  # to the last byte
                    with suppress(OSError):
                        while True:
                            file.write(bytes(size))
        saving = saving or job.host_that_saves()


def empty_disk(job):
    for host in job.hosts:
        (host.disk / "filler").unlink(missing_ok=True)


def limit_files(job):
    resource.prlimit(job.rank(0), resource.RLIMIT_FSIZE, (100_000, 100_000))


def change_mode(job, how):
    for host in job.hosts:
        subprocess.run(["chmod", "-R", how, host.disk], check=True)


def latest(job):
    return max(job.snapshots(), key=lambda path: path.stat().st_mtime)


def damage(job, how):
    """While the job is down, cut the newest snapshot off somewhere, or flip a bit of it."""
    job.die()
    path = latest(job)
    content = bytearray(path.read_bytes())
    position = job.rng.randrange(len(content))
    if how == "truncate":
        content = content[:position]
    else:
        content[position] ^= 1 << job.rng.randrange(8)
    path.write_bytes(content)
    job.start_all()


def move_damaged_away(job):
    for path in job.snapshots():
        if path.name == "snapshot.pt":  # train_llm.py has renamed its own
            path.unlink()


def leave_older(job):
    """An older snapshot of the same job lies on the other host."""
    source = latest(job)
    older = source.read_bytes()
    count = len(SAVED.findall(job.output()))
    wait_for(job, lambda: len(SAVED.findall(job.output())) > count)
    job.die()
    for host in job.hosts:
        if host.disk not in source.parents:
            (host.disk / "snapshot.pt").write_bytes(older)
    job.start_all()


def leave_foreign(job):
    """A snapshot of another job lies on the other host."""
    source = latest(job)
    job.die()
    for host in job.hosts:
        if host.disk not in source.parents:
            foreign = torch.load(source, weights_only=True) | dict.fromkeys(
                ("job_id", "wandb_id"), "foreign"
            )
            torch.save(foreign, host.disk / "snapshot.pt")
    job.start_all()


def move_foreign_away(job):
    for path in job.snapshots():
        if torch.load(path, weights_only=True).get("job_id") == "foreign":
            path.unlink()


def leave_temporary(job):
    """A temporary file that is none of a snapshot lies about, on any host."""
    job.die()
    path = latest(job)
    host = job.rng.choice(job.hosts)
    target = host.disk / path.relative_to(next(h.disk for h in job.hosts if h.disk in path.parents))
    target.with_name(f"{path.name}.tmp").write_bytes(job.rng.randbytes(job.rng.randrange(100000)))
    job.start_all()


def fail_in_data(job):
    """SIGUSR2 to a rank, which makes it fail where it reads its next batch."""
    os.kill(job.rank(job.rng.choice([0, 1])), signal.SIGUSR2)


def other_arguments(job):
    """What is typed on one of two hosts differs."""
    job.die()
    options = ["--seed=7"], ["--batch_size=16"], ["--total_epochs=70"], ["--save_every=3"]
    job.options[job.hosts[1]] = job.rng.choice(options)
    job.start_all()


def same_arguments(job):
    job.options = {host: [] for host in job.hosts}


def faults() -> list[Fault]:
    # torchrun names the rank that was killed, or now and then only its partner, who says the rest.
    lost, two = "exitcode: -9|closed by peer|reset by peer", ("multinode.py",)
    found = []
    for who, how, sees in [
        ("rank 0", {"rank": 0}, lost),
        ("another rank", {"rank": 1}, lost),
        ("the launcher", {}, "exit status -9"),
        ("every process of a host", {"everything": True}, "exit status -9"),
    ]:
        action = partial(kill, **how)
        saves_first = {"train_llm_saves_first": who == "the launcher"}
        found += [Fault(f"SIGKILL of {who}", action, sees, at_any_time=True, **saves_first)]
        found += [Fault(f"SIGKILL of {who} in a save", action, sees, in_a_save=True, **saves_first)]
    for name in "SIGTERM", "SIGINT", "SIGUSR1":
        number = signal.Signals[name]
        for to in (
            "the launcher",
            "a rank",
            "the process group of a rank",
            "every process of a host",
        ):
            for times, word in (1, "once"), (2, "twice"):
                action = partial(send, number=number, to=to, times=times)
                sees = rf"{name}: saved at|got signal: {number}\b"
                sees += rf"|(exitcode:|exit status) -{number}\b"
                sees += "|KeyboardInterrupt" if name == "SIGINT" else ""
                fault = Fault(f"{name} to {to}, {word}", action, sees, train_llm_saves_first=True)
                found += [fault]
    late = "[Tt]imed out waiting"
    found += [
        Fault("SIGSTOP of a rank, for good", lambda job: os.kill(
            job.rank(job.rng.choice([0, 1])), signal.SIGSTOP), late),
        Fault("the link is cut for 4 s", partial(cut_link, seconds=4), scripts=two),
        Fault("the link is cut for good", partial(cut_link, seconds=0), late,
              undo=mend_link, scripts=two, patience=10),
        Fault("the disk is full", fill_disk, "No space left on device", undo=empty_disk),
        Fault("the size of files is limited", limit_files, "File too large"),
        Fault("the folder becomes read-only", partial(change_mode, how="a-w"),
              "Permission denied", undo=partial(change_mode, how="u+w")),
        Fault("the newest snapshot is cut off", partial(damage, how="truncate"),
              "is damaged", undo=move_damaged_away, costs_the_snapshot=True),
        # A bit between the parts of the file means nothing.
        Fault("a bit of the newest snapshot is flipped", partial(damage, how="flip"),
              "is damaged", undo=move_damaged_away, costs_the_snapshot=True,
              may_mean_nothing=True),
        Fault("the other host has an older snapshot", leave_older, scripts=two),
        Fault("the other host has a snapshot of another job", leave_foreign,
              "not of the same job", undo=move_foreign_away, scripts=two),
        Fault("a temporary file is left over", leave_temporary),
        Fault("the clock is moved", lambda job: job.set_clock(job.rng.choice([-3600, 3600])),
              moves_the_clock=True),
        Fault("a rank is out of memory", fail_in_data,
              "you tried to allocate|not enough memory", failure="torch.empty(2**45)"),
        Fault("an exception in the data of a rank", fail_in_data, "record 17 is broken",
              failure="raise ValueError('record 17 is broken')"),
        Fault("the arguments differ between hosts", other_arguments,
              "not the same on all machines", undo=same_arguments, scripts=two),
    ]  # fmt: skip
    return found


# --- A run


@dataclasses.dataclass
class Result:
    number: int
    script: Script
    fault: Fault
    lost: str = ""  # what was lost, or nothing
    noticed: float | None = None  # seconds
    seen: str = ""  # what named the cause
    commands: int = 0  # that a person had to type
    repeated: int = 0  # epochs or steps
    in_a_save: bool = False  # a snapshot was half written when it was done
    folder: Path | None = None
    output: str = ""

    def __str__(self):
        noticed = f"{self.noticed:.1f} s" if self.noticed is not None else "-"
        by = f"command x {self.commands}" if self.commands else "itself"
        parts = [self.script.name, self.fault.name, f"noticed after {noticed}", f"back by {by}"]
        parts += [f"{self.repeated} {self.script.unit}s again"]
        parts += [f"LOST: {self.lost} ({self.folder})" if self.lost else "ok"]
        return " | ".join(parts)


def wait_for(job, condition, seconds=60):
    limit = time.monotonic() + seconds
    while not condition():
        if any(job.ended(host) is not None for host in job.hosts):
            raise Lost("the job ended before its time")
        if time.monotonic() > limit:
            raise Lost("what was waited for did not happen")
        time.sleep(0.02)


def wait_for_a_new_file(folders, seconds=20):
    """Return at once when a temporary file is made. The kernel tells: to look would be too slow."""
    libc, in_create, limit = ctypes.CDLL(None), 0x100, time.monotonic() + seconds
    watch = libc.inotify_init()
    for folder in folders:
        libc.inotify_add_watch(watch, os.fsencode(folder), in_create)
    try:
        while select.select([watch], [], [], max(0, limit - time.monotonic()))[0]:
            if b".tmp" in os.read(watch, 4096):
                return
    finally:
        os.close(watch)
    raise Lost("no save came")


def reach_the_moment(job, fault):
    """Wait for a random moment of training or, if the fault is for that, of a save."""
    rng, script = job.rng, job.script
    if fault.at_any_time and rng.random() < 0.2:  # while it starts
        job.rank(1)
        time.sleep(rng.uniform(0, 3))
        job.starting = True
        return
    saves = rng.randint(1, int(0.5 * script.total / script.every))
    wait_for(job, lambda: len(SAVED.findall(job.output())) >= saves)
    if not fault.in_a_save:
        time.sleep(rng.uniform(0, 0.5))
        return
    job.pid_of_rank, job.pids_on = job.ranks(), {host: host.processes() for host in job.hosts}
    folder = "." if script.unit == "epoch" else "outputs/default/snapshots"
    while job.saving is None:  # this process may have been too slow
        wait_for_a_new_file([host.disk / folder for host in job.hosts])
        # At once, while it is being written, or later, while the disk takes its time.
        delay = time.perf_counter() + rng.choice([0, rng.uniform(0, SLOW / 2)])
        while time.perf_counter() < delay:
            pass
        job.saving = job.host_that_saves()


def undisturbed(script: Script, folder: Path):
    """The last snapshot of a run that nobody disturbs."""
    with Network(folder, script.names, ipv6=False) as network:
        job = Job(script, network, random.Random(0))
        job.start_all()
        limit = time.monotonic() + 120
        while any(job.ended(host) is None for host in job.hosts):
            if time.monotonic() > limit:
                break
            time.sleep(0.1)
        if any(job.ended(host) != 0 for host in job.hosts):
            sys.exit(f"ERROR: {script.name} does not even run undisturbed:\n{job.output()}")
        return job.newest()


def note_cause(job, result, begin, first_line):
    """Look for what names the cause in the output since the fault, and in the exit statuses."""
    statuses = [job.ended(host) for host in job.hosts]
    marks = "".join(f"exit status {status}\n" for status in statuses if status)
    text = job.output(first_line) + marks
    named = [match.group() for match in re.finditer(result.fault.sees, text)]
    if named and result.noticed is None:
        result.noticed = time.monotonic() - begin
    if named:  # the launcher's own words, if it has any, rather than a partner's
        result.seen = min(named, key=lambda text: "peer" in text)


def bring_back(job, result, begin, first_line, saved):
    """Do what a person does, until the job has ended well."""
    fault, deadline, commands = result.fault, begin + ALLOWED, 0
    seen_before = 0
    while True:
        if fault.sees:
            note_cause(job, result, begin, first_line)
        statuses = [job.ended(host) for host in job.hosts]
        if all(status == 0 for status in statuses):
            return
        count = len(TRAINED.findall(job.output()))
        if count > seen_before:  # it goes on
            seen_before, deadline = count, max(deadline, time.monotonic() + 30)
        if time.monotonic() > deadline:
            raise Lost(f"it hangs {time.monotonic() - begin:.0f} s after the fault")
        if any(statuses):  # one ended badly
            ended = [host for host in job.hosts if job.ended(host) is not None]
            # They need time to save, or to import torch if they were still at that.
            slow = job.script.name == "train_llm.py" or job.starting
            limit = TIMEOUT + 5 if slow else 3
            if not wait_until(lambda hosts=ended: not processes_on(hosts), limit):
                raise Lost(f"processes outlive their launcher: {processes_on(ended)}")
            if commands == 0 and result.seen.startswith("exit status"):
                result.noticed = time.monotonic() - begin  # by its processes
            patience = time.monotonic() + fault.patience
            while time.monotonic() < patience and None in map(job.ended, job.hosts):
                time.sleep(0.05)
            if all(job.ended(host) == 0 for host in job.hosts):
                continue
            commands += 1
            result.commands = commands
            if commands > 2:
                raise Lost("two more commands did not help")
            if not fault.costs_the_snapshot and progress(job.newest()) < saved:
                raise Lost(f"snapshot {saved} was announced and is not there")
            fault.undo(job)
            job.start_all()
            deadline = time.monotonic() + ALLOWED
        time.sleep(0.03)


def processes_on(hosts):
    return [pid for host in hosts for pid in host.processes()]


def wait_until(condition, seconds):
    limit = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > limit:
            return False
        time.sleep(0.05)
    return True


def run(number, script: Script, fault: Fault, seed: int, expected, base: Path) -> Result:
    folder = base / f"run-{number}"
    result = Result(number, script, fault, folder=folder)
    rng = random.Random(f"{seed} {number}")
    with Network(folder, script.names, ipv6=False) as network:
        job = Job(script, network, rng, fault)
        try:
            job.start_all()
            reach_the_moment(job, fault)
            numbers = [int(n) for n in SAVED.findall(job.output())]
            saved = max(numbers, default=0) + (script.unit == "epoch" and bool(numbers))
            if any(job.ended(host) is not None for host in job.hosts):
                raise Lost("the job ended before its time")
            begin, first_line = time.monotonic(), len(job.lines)
            fault.do(job)
            result.in_a_save = job.host_that_saves() is not None
            bring_back(job, result, begin, first_line, saved)
            check(job, result, expected)
        except Lost as error:
            result.lost = str(error)
        except Exception as error:
            result.lost = f"{type(error).__name__}: {error}"
        result.output = job.output()
        if result.lost:
            (folder / "output.log").write_text(result.output)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return result


def run_planned(args, number, base: Path) -> Result:
    """The run of this number, in a process of its own: only so its moments are exact."""
    script, fault = plan(args)[number]
    expected = torch.load(base / f"{script.name}.pt", weights_only=True)
    result = run(number, script, fault, args.seed, expected, base)
    result.script = result.fault = None  # what is in them cannot be sent
    return result


def check(job, result, expected):
    """Whether anything is lost or left behind at the end."""
    script, fault = result.script, result.fault
    if not wait_until(lambda: not processes_on(job.hosts), 10):
        raise Lost("processes are left")
    for reader in job.readers:
        reader.join(10)
    if job.listening():
        raise Lost(f"ports are left open: {job.listening()}")
    if files := job.temporary_files():
        raise Lost(f"files are left: {files}")
    if fault.sees and result.noticed is None and not fault.may_mean_nothing:
        raise Lost("the cause was not named")
    if fault.moves_the_clock and not list(job.hosts[-1].folder.glob("*.used")):
        raise Lost("the clock was not used")
    result.repeated = repeated(job.lines, script, fault)
    try:
        torch.testing.assert_close(job.newest(), expected, rtol=0, atol=0)
    except AssertionError as error:
        raise Lost(f"it ends with another snapshot: {str(error).splitlines()[0]}") from None


def repeated(lines, script, fault) -> int:
    """How many epochs or steps were trained again. Lost if one was that had been saved."""
    first = 0 if script.unit == "epoch" else 1
    last = saved = before_that = first - 1
    count = 0
    for line in lines:
        if match := SAVED.search(line):
            saved, before_that = int(match.group(1)), saved
        if match := TRAINED.search(line):
            number = int(match.group(1))
            least = saved
            if fault.costs_the_snapshot:
                least = before_that if script.unit == "step" else first - 1
            if fault.train_llm_saves_first and script.name == "train_llm.py":
                least = last
            if not least < number <= last + 1:
                text = f"{script.unit} {number} came after {last}, when {saved} was saved"
                raise Lost(text)
            count += last + 1 - number
            last = number
    return count


# --- The table


def table(results: list[Result], seed: int) -> str:
    """The results as a table in Markdown: a row for each fault."""
    lost = sum(bool(result.lost) for result in results)
    aimed = [result for result in results if result.fault.in_a_save]
    hit = sum(result.in_a_save for result in aimed)
    commands = [sum(result.commands == number for result in results) for number in (1, 2)]
    lines = [
        f"{len(results)} runs with seed {seed}, {lost} lost. {len(aimed)} were aimed into a save,"
        f" and in {hit} of these a snapshot was being written at that moment. {commands[0]} needed"
        f" one more command, {commands[1]} needed two.",
        "",
        "| fault | runs | lost | noticed after, at most | went on by itself | after a command |"
        " repeated, at most | what names the cause |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(result.fault.name for result in results):
        rows = [result for result in results if result.fault.name == name]
        runs = " + ".join(
            str(count)
            for script in SCRIPTS
            if (count := sum(result.script.name == script.name for result in rows))
        )
        noticed = [result.noticed for result in rows if result.noticed is not None]
        seen = Counter(result.seen for result in rows if result.seen)
        repeated = {
            unit: max((r.repeated for r in rows if r.script.unit == unit), default=None)
            for unit in ("epoch", "step")
        }
        repeated = [f"{n} {unit}s" for unit, n in repeated.items() if n is not None]
        by_itself = sum(not result.commands and not result.lost for result in rows)
        by_command = sum(result.commands > 0 and not result.lost for result in rows)
        cells = [name, runs, sum(bool(result.lost) for result in rows)]
        cells += [f"{max(noticed):.1f} s" if noticed else "", by_itself, by_command]
        seen = [f"`{text}`" + (f" ({n})" if len(seen) > 1 else "") for text, n in seen.items()]
        cells += [", ".join(repeated), ", ".join(seen)]
        lines += ["| " + " | ".join(map(str, cells)) + " |"]
    return "\n".join(lines) + "\n"


BEGIN, END = "<!-- tests/faults.py writes this -->\n", "<!-- end -->"


def write(path: Path, text: str):
    """Replace what stands between the two marks in the file."""
    before, rest = path.read_text().split(BEGIN)
    path.write_text(before + BEGIN + text + rest[rest.index(END) :])


def refuse(problem: str):
    print(f"ERROR: {problem}", file=sys.stderr)
    sys.exit(2)


def at_least_1(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"give a whole number from 1 on, not {text!r}")
    return int(text)


def expression(text: str) -> re.Pattern:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"not a regular expression: {error}") from None


def plan(args) -> list[tuple[Script, Fault]]:
    """Each fault on each script once, or as many runs as asked: then more of those in a save."""
    pairs = [
        (script, fault)
        for fault in faults()
        for script in SCRIPTS
        if script.name in fault.scripts
        and args.fault.search(fault.name)
        and args.script in script.name
    ]
    if not pairs:
        refuse("no fault and script of these names: see --list")
    more = [pair for pair in pairs if pair[1].in_a_save] or pairs
    runs = args.runs or len(pairs)
    while len(pairs) < runs:
        pairs += more[: runs - len(pairs)]
    return pairs[:runs]


def main():
    parser = argparse.ArgumentParser(
        usage=argparse.SUPPRESS,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.error = refuse
    option = parser.add_argument
    option("--runs", type=at_least_1, help="how many (each fault on each script once)")
    option("--seed", type=int, default=1, help="decides the moments (1)")
    option("--script", default="", help="only scripts whose name contains this")
    option(
        "--fault",
        type=expression,
        default="",
        help="only faults in whose name this regular expression is found",
    )
    option("--number", type=int, help="only that run, if all else is typed as it was")
    option("--jobs", type=at_least_1, default=2, help="how many at the same time (2)")
    option("--write", type=Path, help="a file to write the table into, between its two marks")
    option("--list", action="store_true", help="name the faults, and end")
    args = parser.parse_args()
    if args.list:
        return print("\n".join(fault.name for fault in faults()))
    if not (has_namespaces() and shutil.which("setpriv")):
        refuse("needs root, and ip, unshare, nsenter and setpriv (packages iproute2, util-linux)")
    if args.write and not (args.write.is_file() and BEGIN in args.write.read_text()):
        refuse(f"{args.write} has no line {BEGIN.strip()}: add it, and {END} below it")
    if args.write and (args.fault.pattern or args.script or args.number is not None):
        refuse("--write: the table is for all faults and scripts: leave --fault and others out")
    runs = list(enumerate(plan(args)))
    if args.number is not None:
        runs = [run for run in runs if run[0] == args.number]
    if not runs:
        refuse(f"--number {args.number}: there is no such run")
    base, results = Path(tempfile.mkdtemp(prefix="faults-")), []
    for script in SCRIPTS:
        if any(pair[0].name == script.name for _, pair in runs):
            torch.save(undisturbed(script, base / script.name), base / f"{script.name}.pt")
    begin = time.monotonic()
    with ProcessPoolExecutor(args.jobs) as pool:
        jobs = [pool.submit(run_planned, args, number, base) for number, _ in runs]
        for (number, (script, fault)), job in zip(runs, jobs, strict=True):
            results.append(job.result())
            results[-1].script, results[-1].fault = script, fault
            minutes = (time.monotonic() - begin) / 60
            print(f"{number}: {results[-1]} [{minutes:.1f} min]", flush=True)
    text = table(results, args.seed)
    print(text)
    if args.write:
        write(args.write, text)
    if not any(result.lost for result in results):
        return shutil.rmtree(base)
    sys.exit(1)


if __name__ == "__main__":
    main()
