"""How the tests start the scripts: as a reader does, with a time limit, leaving nothing behind."""

import math
import multiprocessing
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.multiprocessing as mp

from exercises import exercise, ranks
from exercises.ranks import ROOT, enter, on_the_cpu, process_of
from exercises.ranks import alone as alone
from exercises.ranks import free_port as free_port

multiprocessing.set_forkserver_preload(["torch._dynamo", "preloaded"])

SINGLE, MULTI, TORCHRUN_SCRIPT, MULTINODE, CHECK, LLM, CLASSIFIER = (
    str(ROOT / f"{name}.py")
    for name in (
        "single_gpu",
        "multigpu",
        "multigpu_torchrun",
        "multinode",
        "check_cluster",
        "train_llm",
        "classifier",
    )
)


# torchrun's own status after a signal, whatever its processes say: 1, or an abort, if it ends while
# its heartbeat is in a call of its store (docs/troubleshooting.md: `Fatal Python error: Aborted`).
SIGNALLED = {1, -signal.SIGABRT}

PACKAGES = [path.parent for path in ROOT.glob("*/__init__.py")]


def copy_scripts(folder):
    """Copy all scripts there, with the packages that they need."""
    for script in ROOT.glob("*.py"):
        shutil.copy(script, folder)
    for package in PACKAGES:
        shutil.copytree(package, Path(folder) / package.name)


def python(script, *args):
    return [sys.executable, script, *map(str, args)]


def torchrun(script, *args, nproc=2, options=("--standalone",)):
    launcher = [sys.executable, "-m", "torch.distributed.run", *options]
    return [*launcher, f"--nproc_per_node={nproc}", script, *map(str, args)]


class Forked(list):
    """The command `python script args`, for which `start` needs no new Python: it forks `nproc`
    ranks from a process that has imported what a real run needs.

    Unlike torchrun, nobody ends the other ranks when one has failed."""

    def __init__(self, command, nproc):
        super().__init__(command)
        self.nproc = nproc

    def __add__(self, more):
        return Forked([*self, *map(str, more)], self.nproc)


def forked(script, *args, nproc=1):
    return Forked(python(script, *args), nproc)


class ForkedJob:
    """The ranks of a `Forked` command, as subprocess.Popen has a process. Its status is that of the
    first rank whose status is not 0."""

    def __init__(self, command, cwd, log, env):
        port, cwd, script = free_port(), os.path.abspath(cwd), command[1:]
        one = command.nproc == 1
        self.ranks = [
            process_of(
                _run, script, env | ({} if one else alone(rank, command.nproc, port)), cwd, log
            )
            for rank in range(command.nproc)
        ]
        for rank in self.ranks:
            rank.start()
        self.pid = self.ranks[0].pid

    @property
    def returncode(self):
        return self.poll()

    def poll(self):
        statuses = [rank.exitcode for rank in self.ranks]
        return None if None in statuses else next(filter(None, statuses), 0)

    def wait(self, seconds=None):
        limit = time.monotonic() + (math.inf if seconds is None else seconds)
        for rank in self.ranks:
            rank.join(min(max(0, limit - time.monotonic()), 10**6))
        if self.poll() is None:
            raise subprocess.TimeoutExpired(self.ranks[0].name, seconds)
        return self.returncode

    def send_signal(self, number):
        for rank in self.ranks:
            if rank.is_alive():
                os.kill(rank.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def _run(argv, env, cwd, log):
    """Be the process that `python *argv` would be."""
    on_the_cpu()
    os.setsid()
    os.environ.clear()
    os.environ.update(env)
    enter(cwd, log)
    more = filter(None, env.get("PYTHONPATH", "").split(":"))
    sys.path[:0] = [str(Path(argv[0]).parent.resolve()), *more]
    sys.argv = argv
    runpy.run_path(argv[0], run_name="__main__")


def agent(endpoint, *args, nproc=1, nnodes=2, options=(), script=MULTINODE):
    """The command of one of the nodes of a job of multinode.py, or of `script`."""
    rendezvous = ("--rdzv-id=456", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}")
    options = (f"--nnodes={nnodes}", *rendezvous, *options)
    return torchrun(script, *args, nproc=nproc, options=options)


def start(command, cwd=".", **env):
    """Start `command` with stdout and stderr in `output` (one file, as in a log) in `cwd`."""
    Path(cwd).mkdir(exist_ok=True)
    sees_gpus = (os.environ | env).get("CUDA_VISIBLE_DEVICES") != ""
    if isinstance(command, Forked) and sees_gpus:  # a forked process could not use them
        command = command if command.nproc == 1 else torchrun(*command[1:], nproc=command.nproc)
    elif isinstance(command, Forked):
        log = Path(cwd).resolve() / f"output-{len(list(Path(cwd).glob('output-*')))}.log"
        log.touch()
        process = ForkedJob(
            command, cwd, log, os.environ | {name: str(value) for name, value in env.items()}
        )
        process.log = log
        return process
    log = open(Path(cwd) / f"output-{len(list(Path(cwd).glob('output-*')))}.log", "w+")  # noqa: SIM115
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=os.environ | env,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        # A shell that starts pytest in the background has it ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    process.log = Path(log.name)
    return process


def start_typed(command, cwd=".", **env):
    """Start `command` as a reader types it, in the activated environment."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return start(["bash", "-c", command], cwd, PATH=path, **env)


def finish(process, seconds=60):
    """Wait for `process` and return (exit status, output). Past the limit, end it and fail."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        output = process.log.read_text()
        process.kill()
        for pid in pids(output):
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        raise AssertionError(f"still running after {seconds} s:\n{output}") from None
    return process.returncode, process.log.read_text()


def run(command, seconds=60, status=0, cwd=".", **env):
    """Run `command` to its end, expect that exit status and return what it printed."""
    returncode, output = finish(start(command, cwd, **env), seconds)
    assert returncode == status, f"exit status {returncode} of {command}:\n{output}"
    return output


def wait_for(process, condition, seconds=60):
    """Read the output of `process` until `condition(output)`, and return the output."""
    limit = time.monotonic() + seconds
    while not condition(output := process.log.read_text()):
        ended = process.poll() is not None
        if ended or time.monotonic() > limit:
            finish(process, 1)
            raise AssertionError(f"did not happen before the job ended:\n{output}")
        time.sleep(0.05)
    return output


def in_processes(count, function, *args):
    """Run `function(rank, init_method, *args)` in `count` new processes; fail if one of them fails.

    `init_method` says where they meet.
    """
    with tempfile.TemporaryDirectory() as folder:
        given = (function, f"file://{folder}/store", args)
        mp.start_processes(_on_this_machine, given, nprocs=count, start_method="forkserver")


def _on_this_machine(rank, function, init_method, args):
    on_the_cpu()
    function(rank, init_method, *args)


def edited(script, name, *changes):
    """A copy of `script` called `name`, as a reader makes it: each old text, in it once, is new."""
    Path(name).write_text(exercise.edited(Path(script).read_text(), changes))
    return str(Path(name).resolve())


def quickly(script, *args, seconds=60, **options):
    """As in exercises.ranks, but ranks that are still running at the limit are a failure."""
    statuses, output = ranks.quickly(script, *args, seconds=seconds, **options)
    assert ranks.LATE not in statuses, f"still running after {seconds} s:\n{output}"
    return statuses, output


def pids(output):
    """The pids that the processes of a job printed when they started."""
    return [int(pid) for pid in re.findall(r"\| Pid: (\d+) \|", output)]


def snapshot(path):
    """A snapshot without its name, which is each job's own."""
    return {**torch.load(path, weights_only=True), "job_id": None}


def assert_same(path, other, tolerance=0):
    """Two snapshots are the same: bit for bit, or up to a `tolerance` for each number."""
    assert_equal(snapshot(path), snapshot(other), tolerance)


def assert_same_weights(path, other, tolerance):
    """The models of two snapshots are the same, up to a `tolerance` for each number."""
    one, other = (snapshot(each)["model"] for each in (path, other))
    torch.testing.assert_close(one, other, rtol=0, atol=tolerance)


def assert_equal(one, other, tolerance=0):
    """Two snapshots that have been read are the same, as for `assert_same`."""
    assert one.get("optimizer_class") == other.get("optimizer_class")  # torch compares no texts
    one, other = ({**each, "optimizer_class": None} for each in (one, other))
    torch.testing.assert_close(one, other, rtol=0, atol=tolerance)


def alive(pid):
    """Whether process `pid` runs; a zombie, which its parent has yet to reap, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone(pids, seconds=10):
    """Whether all of `pids` have ended within that time. Those that have not are ended here."""
    limit = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < limit:
        time.sleep(0.05)
    left = list(filter(alive, pids))
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return not left


def gpus(count):
    """The environment in which a process sees that many GPUs."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(count)))}
