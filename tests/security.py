"""What a stranger could make of a job, asked of any script: ports, files, and what is told."""

import os
import re
import socket
from pathlib import Path

import launch
from hosts import Network

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


def listening(host, owners):
    """The addresses at which processes in `owners` listen on `host`, without ports."""
    inodes = set()
    for pid in owners:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes.update(re.findall(r"socket:\[(\d+)\]", os.readlink(fd)))
            except OSError:  # closed meanwhile
                continue
    found = set()
    for name in "tcp", "tcp6":
        for line in Path(f"/proc/{host.holder.pid}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.add(fields[1].partition(":")[0])
    return found


def assert_no_other_machine_can_reach(command, folder):
    """All that a script opens is on the loopback interface, on a machine that has another.

    torchrun's own store listens everywhere: this is PyTorch's, and told in docs/reliability.md.
    """
    with Network(folder / "network", ("alpha",)) as network:
        (host,) = network.hosts
        job = host.start(command)
        launch.wait_for(job, lambda output: re.search("Epoch 1 |Step 1/", output))
        processes = set(host.processes())
        if "torch.distributed.run" in command:
            processes.remove(job.pid)
        found = listening(host, processes)
        assert found and found <= LOOPBACK, found
        if "torch.distributed.run" in command:
            assert not listening(host, {job.pid}) <= LOOPBACK, "then the text can say so"


def written_outside(commands, folder):
    """The files that `commands` leave in `folder` with its home and temporary folder, outside of
    `work/out`. In the user's cache, two libraries keep what they know of fonts and of data sets.
    """
    for name in "home", "temporary", "work":
        (folder / name).mkdir()
    env = {"HOME": str(folder / "home"), "TMPDIR": str(folder / "temporary")}
    env |= {name: str(folder / "home" / name) for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME")}
    env |= {"PYTHONDONTWRITEBYTECODE": "1", **OFFLINE}
    before = {path for path in folder.rglob("*")} | {folder / "work"}
    for command in commands:
        job = launch.start(command, folder / "work", **env)
        assert launch.finish(job)[0] == 0, job.log.read_text()
    new = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
    new -= {path.relative_to(folder) for path in before}
    outside = {str(path) for path in new if not f"{path}".startswith(("work/out/", "work/output-"))}
    caches = "home/XDG_CACHE_HOME/matplotlib/", "home/XDG_CACHE_HOME/huggingface/"
    return {path for path in outside if not path.startswith(caches)}


def assert_wandb_has_no_secret(command, folder):
    """Nothing of what wandb has written, and would send, holds the value of a variable."""
    secret = {"AWS_SECRET_ACCESS_KEY": "correct-horse", "HF_TOKEN": "battery-staple"}
    quiet = {"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}
    launch.run([*command, "--wandb", "offline"], **secret, **quiet, **OFFLINE)
    files = [path for path in folder.rglob("*") if path.is_file() and "wandb" in str(path)]
    sent = [path.read_bytes() for path in files if path.suffix == ".wandb"]
    assert sent and all(socket.gethostname().encode() in text for text in sent), "it can be read"
    for path in files:
        for value in secret.values():
            assert value.encode() not in path.read_bytes(), path
