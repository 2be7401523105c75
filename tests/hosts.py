"""Hosts for the tests: each a network, host name and /etc/hosts of its own, joined by a switch.

They are namespaces of this machine's kernel, so a packet from one to the other really takes the
way over a network card, and a name or address that only one of them knows is unknown to the other.
"""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import launch
import pytest


def has_namespaces():
    """Whether this user may make namespaces, and the commands are there."""
    if not all(map(shutil.which, ("ip", "unshare", "nsenter"))):
        return False
    probe = ["unshare", "--net", "--uts", "--mount", "ip", "link", "set", "lo", "up"]
    return subprocess.run(probe, capture_output=True).returncode == 0


needs_namespaces = pytest.mark.skipif(
    not has_namespaces(), reason="needs root, unshare and ip for network namespaces"
)


def sh(command):
    subprocess.run(["sh", "-ec", command], check=True)


class Host:
    """One machine. Its processes see its network, name and /etc/hosts; files are this machine's."""

    def __init__(self, name, folder):
        self.name = name
        self.folder = folder  # its disk
        self.folder.mkdir(exist_ok=True)
        self.holder = subprocess.Popen(["unshare", "--net", "--uts", "--mount", "sleep", "3600"])
        self.net = f"/proc/{self.holder.pid}/ns/net"
        while not os.path.exists(self.net) or os.readlink(self.net) == os.readlink(
            "/proc/self/ns/net"
        ):
            time.sleep(0.01)
        namespaces = (f"--target={self.holder.pid}", "--net", "--uts", "--mount")
        self.enter = ["nsenter", *namespaces]
        self.sh(f"hostname {name}; ip link set lo up")

    def sh(self, command):
        subprocess.run([*self.enter, "sh", "-ec", command], check=True)

    def know(self, lines):
        """Let /etc/hosts have these lines, beside localhost."""
        path = self.folder / "hosts"
        path.write_text(f"127.0.0.1 localhost\n::1 localhost\n{lines}\n")
        self.sh(f"mount --bind {path} /etc/hosts")

    def start(self, command, **env):
        return launch.start([*self.enter, f"--wd={self.folder}", *command], self.folder, **env)

    def processes(self):
        """The pids of all processes on this host."""
        network, found = os.readlink(self.net), []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if os.readlink(path / "ns/net") == network and launch.alive(int(path.name)):
                    found.append(int(path.name))
            except OSError:  # it has just ended
                continue
        return [pid for pid in found if pid != self.holder.pid]

    def die(self):
        """Kill every process on this host, as a power cut does."""
        while pids := self.processes():
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.02)

    def close(self):
        self.die()
        self.holder.kill()
        self.holder.wait()


class Network:
    """Hosts on one switch; host number n has 10.77.0.n and fd77::n, or only one of the two."""

    def __init__(self, folder, names=("alpha", "beta"), ipv4=True, ipv6=True):
        folder.mkdir(exist_ok=True)
        self.switch = Host("switch", folder / "switch")
        self.switch.sh("ip link add bridge type bridge; ip link set bridge up")
        self.hosts = []
        for number, name in enumerate(names, 1):
            host = Host(name, folder / name)
            self.hosts.append(host)
            ends = f"{host.holder.pid} type veth peer name {name} netns {self.switch.holder.pid}"
            sh(f"ip link add eth0 netns {ends}")
            self.switch.sh(f"ip link set {name} master bridge up")
            host.sh("ip link set eth0 up")
            host.addresses = ipv4 * [f"10.77.0.{number}"] + ipv6 * [f"fd77::{number}"]
            for address in host.addresses:
                length = "64 nodad" if ":" in address else "24"
                host.sh(f"ip address add {address}/{length} dev eth0")
        everyone = [f"{address} {host.name}" for host in self.hosts for address in host.addresses]
        for host in self.hosts:
            host.know("\n".join(everyone))

    def cable(self, host, state):
        """Pull the cable of `host` ("down") or plug it in again ("up")."""
        self.switch.sh(f"ip link set {host.name} {state}")

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for host in (*self.hosts, self.switch):
            host.close()
