"""A real Slurm cluster for the tests: a login node and two compute nodes, each its own host."""

import os
import re
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

import launch
import pytest
from hosts import Network

PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"  # where Debian has the daemons
NEEDED = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "munged")
MISSING = " ".join(name for name in NEEDED if shutil.which(name, path=PATH) is None)
needs_slurm = pytest.mark.skipif(bool(MISSING), reason=f"needs Slurm: {MISSING} not found")

# Two GPUs on each node, which are devices like /dev/null: Slurm hands them out, nobody opens them.
CONFIGURATION = """
ClusterName=test
SlurmctldHost=login
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CommunicationParameters=EnableIPv6{disable_ipv4}
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdSpoolDir={folder}/spool-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
JobRequeue=0
SchedulerParameters=bf_interval=1,sched_interval=2
MpiDefault=none
KillWait=20
GresTypes=gpu
SlurmdParameters=config_overrides
NodeName=node[1-2] Sockets=1 CoresPerSocket={cores} RealMemory=1000000 Gres=gpu:2
PartitionName=gpu Nodes=node[1-2] Default=YES MaxTime=1440
"""


class Cluster:
    """Login node and nodes; `project` is the checkout that they all see, as on a shared disk."""

    def __init__(self, folder, **options):
        self.network = Network(folder, names=("login", "node1", "node2"), **options)
        self.login, *self.nodes = self.network.hosts
        self.project = folder / "project"
        shutil.copytree(launch.ROOT / "slurm", self.project / "slurm")
        launch.copy_scripts(self.project)
        (self.project / ".venv").symlink_to(sys.prefix)

        etc = folder / "etc"
        (etc / "state").mkdir(parents=True)
        only_ipv6 = all(":" in address for address in self.login.addresses)
        self.env = {"SLURM_CONF": str(etc / "slurm.conf"), "PATH": PATH}
        (etc / "slurm.conf").write_text(
            CONFIGURATION.format(
                folder=etc, cores=os.cpu_count(), disable_ipv4=",DisableIPv4" * only_ipv6
            )
        )
        (etc / "gres.conf").write_text(f"Name=gpu File={etc}/gpu[0-1]\n")
        for name in ("gpu0", "gpu1"):
            os.mknod(etc / name, stat.S_IFCHR | 0o600, os.makedev(1, 3))  # as /dev/null
        (etc / "munge.key").write_bytes(os.urandom(128))
        (etc / "munge.key").chmod(0o400)
        names = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log"}
        files = [f"--{option}={etc}/munge.{name}" for option, name in names.items()]
        self.login.start(["munged", "--foreground", "--force", *files], **self.env)
        self.login.start(["slurmctld", "-D"], **self.env)
        for node in self.nodes:
            node.start(["slurmd", "-D", "-N", node.name], **self.env)
        self.wait_for(lambda: self.command("sinfo", "-hN", "-o", "%T").split() == ["idle"] * 2)

    def command(self, *command, **env):
        """Run a command on the login node, in the project's folder; return what it printed."""
        enter = [*self.login.enter, f"--wd={self.project}"]
        done = subprocess.run(
            [*enter, *command],
            env=os.environ | self.env | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=30,
        )
        return done.stdout

    def submit(self, file, *args, options=(), **env):
        """Submit a file of slurm/ with the script's arguments; return the job's id."""
        command = " ".join(["sbatch", f"slurm/{file}", *map(str, args)])
        return self.submit_typed(command, options, **env)

    def submit_typed(self, command, options, **env):
        """Type `command` on the login node, with `options` for sbatch; return the job's id."""
        command = command.replace("sbatch ", f"sbatch {' '.join(options)} ", 1)
        output = self.command("bash", "-c", command, **env)
        assert "Submitted batch job" in output, output
        return int(output.split()[-1])

    def state(self, job):
        """The state of a job (PENDING, RUNNING, COMPLETED, FAILED, …) and its exit status."""
        shown = self.command("scontrol", "show", "job", str(job))
        state = re.search(r"JobState=(\w+)", shown)[1]
        return state, int(re.search(r"ExitCode=(\d+)", shown)[1])

    def log(self, job):
        path = self.project / f"ddp-{job}.log"
        return path.read_text() if path.exists() else ""

    def wait_for(self, condition, seconds=30, what="", pause=0.3):
        """Wait until the condition holds. Most ask Slurm, which takes time from the jobs."""
        limit = time.monotonic() + seconds
        while not (result := condition()):
            assert time.monotonic() < limit, f"not within {seconds} s\n{what and what()}"
            time.sleep(pause)
        return result

    def wait_for_log(self, job, line):
        self.wait_for(lambda: line in self.log(job), 60, lambda: self.log(job), pause=0.05)

    def finish(self, job, seconds=60):
        """Wait for the end of a job; return its state, exit status and log."""

        def ended():
            state, status = self.state(job)
            return state not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING") and (
                state,
                status,
            )

        def shown():
            return f"{self.command('scontrol', 'show', 'job', str(job))}\n{self.log(job)}"

        state, status = self.wait_for(ended, seconds, shown)
        return state, status, self.log(job)

    def job_processes(self):
        """The processes on the nodes but Slurm's own daemons."""
        found = []
        for node in self.nodes:
            for pid in node.processes():
                try:
                    name = Path(f"/proc/{pid}/comm").read_text().strip()
                except OSError:  # it has just ended
                    continue
                if name not in ("slurmd", "slurmstepd"):
                    found.append((pid, name))
        return found

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.network.__exit__(*error)
