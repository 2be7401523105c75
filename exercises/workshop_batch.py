"""The check of `batch_file`: a real job if Slurm is here, or bash with an environment like Slurm's.

Commands stand in for the program's starters, and note how they are called.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from exercises import ranks, workshop_looks
from exercises.workshop_looks import answer, commands

GIVEN = ["program.py", "--epochs", "1"]  # the program and its arguments, which the file gets
ONE, ALL = 5.6, 3.5  # seconds that the runs take: no number of processes is near them
FLAGS = {"standalone", "exclusive", "exact", "overlap", "overcommit", "label", "unbuffered", "pty"}
FLAGS |= {"kill-on-bad-exit", "verbose", "quiet", "requeue", "no-python", "l", "u", "v", "O", "Q"}
LONG = {"N": "nodes", "n": "ntasks", "c": "cpus-per-task", "G": "gpus"}


def bash_cannot_read(path):
    done = subprocess.run(["bash", "-n", path], capture_output=True, text=True, timeout=5)
    if done.returncode:
        return f"bash cannot read it: {done.stderr.strip().splitlines()[0].split(': ', 1)[-1]}"


def options_of(words):
    """The options that stand first, and the words after them."""
    words, options = list(words), {}
    while words and words[0].startswith("-"):
        word = words.pop(0)
        name, equals, value = word[2:].replace("_", "-").partition("=")
        if not word.startswith("--"):
            name, equals, value = LONG.get(word[1:2], word[1:2]), word[2:], word[2:]
        elif equals:
            value = word.partition("=")[2]
        if not equals and name not in FLAGS and words:
            value = words.pop(0)
        options[name] = value
    return options, words


def asked(text):
    """What a batch file asks for. sbatch reads until the first command."""
    options = {}
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            break
        if line.split()[:1] == ["#SBATCH"]:
            words = shlex.split(line.removeprefix("#SBATCH"), comments=True)
            options |= options_of(words)[0]
    return options


def count(options, name, default):
    """The number of such an option: of "gpu:a100:4" it is 4."""
    found = re.findall(r"\d+", options.get(name) or "")
    return int(found[-1]) if found else default


def tasks_of(options):
    return count(options, "ntasks", count(options, "ntasks-per-node", 1))


def gpus_of(options, default=0):
    names = ("gpus-per-node", "gpus", "gres")
    asked_for = [count(options, name, 0) for name in names]
    asked_for.append(count(options, "gpus-per-task", 0) * tasks_of(options))
    return next(filter(None, asked_for), default)


def cores_of(options):
    if "exclusive" in options:
        return 64
    each = count(options, "cpus-per-task", 0) * tasks_of(options)
    return each or count(options, "cpus-per-gpu", 0) * gpus_of(options) or 1


def asked_wrongly(text):
    if not text.startswith("#!"):
        return "sbatch refuses a file without #!/bin/bash in its first line"
    try:
        options = asked(text)
    except ValueError as error:
        return f"sbatch cannot read the lines that begin with #SBATCH: {error}"
    if (gpus := gpus_of(options)) < 2:
        return (
            f"It asks for {gpus or 'no'} GPU, two are wanted. (Slurm reads the lines that begin "
            "with #SBATCH, until the first command)"
        )
    if count(options, "nodes", 1) != 1:
        return f"It asks for {options['nodes']} nodes, one is wanted"


def stand_ins(folder, names):
    """Commands that note how they are called: look_at_call."""
    me = shlex.join([sys.executable, workshop_looks.__file__, __file__, "call"])
    start = f"PYTHONPATH={shlex.quote(str(ranks.ROOT))} exec {me}"
    texts = {name: f'{start} {name} "$@"' for name in names}
    env = commands(folder, texts | {"module": ""})
    activate = folder.parent / ".venv" / "bin" / "activate"  # a file may well ask for its own
    activate.parent.mkdir(parents=True)
    activate.touch()
    log = folder / "calls"
    log.touch()
    return env | {"CALLS": str(log)}


def by_bash(path, folder):
    """As Slurm would run the file on one node. Its exit status and output."""
    options = asked(Path(path).read_text())
    values = {
        "SLURM_JOB_ID": 1234,
        "SLURM_NNODES": 1,
        "SLURM_JOB_NUM_NODES": 1,
        "SLURM_NTASKS": tasks_of(options),
        "SLURM_GPUS_ON_NODE": gpus_of(options),
        "SLURM_JOB_NODELIST": "node1",
        "SLURMD_NODENAME": "node1",
        "SLURM_SUBMIT_DIR": folder,
        "SLURM_CPUS_ON_NODE": cores_of(options),
    }
    for name in "cpus-per-task cpus-per-gpu ntasks-per-node gpus-per-node gpus-per-task".split():
        if name in options:
            values[f"SLURM_{name.upper().replace('-', '_')}"] = options[name]
    env = os.environ | {name: str(value) for name, value in values.items()}
    env |= stand_ins(folder / "bin", ("srun", "torchrun", "python", "python3"))
    env["CORES"] = env["SLURM_CPUS_ON_NODE"]  # of the file itself, which may not use srun
    options = {"cwd": folder, "env": env, "text": True, "start_new_session": True}
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(["bash", path, *GIVEN], **options) as job:
        try:
            output, _ = job.communicate(timeout=16)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            return ranks.LATE, ""
    return job.returncode, output


def has_slurm_with_gpus():
    if not shutil.which("sbatch"):
        return False
    well, nodes = answer("sinfo", "--noheader", "--format=%G", seconds=5)
    return well and "gpu" in nodes


def by_slurm(path, folder):
    """Submit the file. Its exit status and output, or None if the job does not start soon."""
    env = stand_ins(folder / "bin", ("torchrun", "python", "python3"))
    log = folder / "log"
    where = ["--parsable", f"--chdir={folder}", f"--output={log}", f"--error={log}"]
    well, job = answer("sbatch", *where, path, *GIVEN, **env)
    if not well:
        return 1, job
    begin = time.monotonic()
    try:
        while (passed := time.monotonic() - begin) < 17:
            _, shown = answer("scontrol", "show", "job", job)
            state = (re.findall(r"JobState=(\w+)", shown) or ["gone"])[0]
            if state == "PENDING" and passed > 5:
                return None
            if state not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
                status = int((re.findall(r"ExitCode=(\d+)", shown) or [0])[0])
                return status, log.read_text() if log.exists() else ""
            time.sleep(0.3)
        return ranks.LATE, ""
    finally:
        answer("scancel", job)


def compares_one_gpu_with_a_node(path, folder):
    text = Path(path).read_text()
    if problem := asked_wrongly(text):
        return problem
    done, place = None, Path(folder)
    if has_slurm_with_gpus():  # the nodes have to see the folder: it is where the reader's file is
        with tempfile.TemporaryDirectory(prefix=".job-", dir=Path(path).parent) as shared:
            done = by_slurm(path, Path(shared))
            calls = noted(Path(shared))
    if done is None:
        done, calls = by_bash(path, place), noted(place)
    if done[0] == ranks.LATE:
        return "The job does not end: its runs take 10 s here, and it was ended after 16"
    if done[0] != 0:
        lines = done[1].strip().splitlines() or ["it prints nothing"]
        return f"The job ends with status {done[0]}: {lines[-1]}"
    return called_wrongly(calls, gpus_of(asked(text))) or seconds_are_missing(calls, done[1])


def noted(folder):
    log = folder / "bin" / "calls"
    return sorted(map(json.loads, log.read_text().splitlines()), key=lambda call: call["begin"])


def called_wrongly(calls, gpus):
    """What is wrong with the runs that a job made."""
    if not calls:
        return "No run of the program was seen, neither by torchrun nor by python"
    if other := [call["words"] for call in calls if call["words"] != GIVEN]:
        return f"The file was given {' '.join(GIVEN)}, and starts {' '.join(other[0]) or 'nothing'}"
    sizes = [call["processes"] for call in calls]
    for one, next_one in zip(calls, calls[1:], strict=False):
        if next_one["begin"] < one["end"]:
            return (
                f"Runs with {one['processes']} and {next_one['processes']} processes at the same "
                "time: they take each other's GPUs. (srun starts its command once for each task)"
            )
    if sorted(sizes) != [1, gpus]:
        runs = " and then ".join(map(str, sizes))
        return f"Runs with 1 and with {gpus} processes are wanted, one each; seen: {runs}"
    for call in calls:
        if call["cores"] < call["processes"]:
            return (
                f"The run with {call['processes']} processes has {call['cores']} core: ask for "
                "--cpus-per-task, and tell srun too, which in many versions does not take it over"
            )


def seconds_are_missing(calls, output):
    numbers_in_it = list(map(float, re.findall(r"\d+(?:\.\d+)?", output)))
    for call in calls:
        took = call["end"] - call["begin"]
        if not any(abs(number - took) < 1 for number in numbers_in_it):
            said = output.strip().splitlines() or ["nothing"]
            return (
                f"The run with {call['processes']} processes took {took:.1f} s, and no such number "
                f"is printed; the last line is: {said[-1]}"
            )


def look_at_call(name):
    """Be srun, torchrun or python for a batch file, and note what is asked for."""
    words = sys.argv[1:]
    if name.startswith("python") and words[:2] == ["-m", "torch.distributed.run"]:
        name, words = "torchrun", words[2:]
    options, rest = options_of(words)
    if name == "srun":
        tasks = count(options, "ntasks-per-node", int(os.environ["SLURM_NTASKS"]))
        tasks, asked_cores = count(options, "ntasks", tasks), os.environ.get("SRUN_CPUS_PER_TASK")
        gpus = gpus_of(options, int(os.environ["SLURM_GPUS_ON_NODE"]))
        each = count(os.environ | options, "SLURM_CPUS_PER_GPU", 0)  # this one srun takes over
        cores = options.get("cpus-per-task") or asked_cores or str(each * gpus or 1)
        env = os.environ | {"CORES": cores, "SLURM_GPUS_ON_NODE": str(gpus)}
        steps = [subprocess.Popen(rest, env=env) for _ in range(tasks)]
        sys.exit(max([step.wait() for step in steps]))
    if name.startswith("python") and rest != GIVEN:
        os.execv(sys.executable, [sys.executable, *words])
    number = options.get("nproc-per-node", "1") if name == "torchrun" else "1"
    gpus = os.environ.get("SLURM_GPUS_ON_NODE", "1")
    processes = int(number) if number.isdigit() else int(gpus)
    begin = time.time()
    time.sleep(ONE if processes == 1 else ALL)
    call = {"processes": processes, "words": rest, "begin": begin, "end": time.time()}
    call["cores"] = int(os.environ.get("CORES") or len(os.sched_getaffinity(0)))
    with open(os.environ["CALLS"], "a") as log:
        log.write(json.dumps(call) + "\n")
