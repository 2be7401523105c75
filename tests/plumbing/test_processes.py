"""Which process is the torchrun of this one, and how the processes of a job end."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launch import ROOT, alive, gone

from plumbing import processes

SPAWNING = """
import signal, sys, time
import torch.multiprocessing as mp
from plumbing import processes

def stay(rank):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as one that has a wandb run to finish
    print("child", flush=True)
    time.sleep(60)

if __name__ == "__main__":
    with processes.local_job(2):
        mp.spawn(stay, nprocs=2)
"""


@pytest.mark.parametrize(
    ("found", "session", "loaded", "launcher"),
    [
        ([30, 20, 1], 40, {40, 20}, 20),  # a wrapper is between the two
        ([30, 1], 40, {40, 30}, 30),
        ([30, 20, 1], 30, {40, 30, 20}, 20),  # the wrapper is a program in Python with torch
        ([30, 20, 1], 20, {40, 30}, 30),  # started by a program without sessions, below a shell
        ([30, 1], 30, {40, 30}, 30),  # by a notebook
        ([1], 40, {40, 1}, 1),  # torchrun is process 1 of a container
        ([20, 1], 40, {40}, None),  # it is gone, and 20 has adopted this process
        ([30, 1], 1, {40}, 30),  # it is outside of this container
        ([1], 0, {40}, 1),
        ([30, 20], 40, {40}, 30),  # the ancestors of 20 cannot be seen
        ([30], 40, set(), 30),  # no /proc
    ],
)
def test_the_launcher_is_an_ancestor_with_torch(monkeypatch, found, session, loaded, launcher):
    monkeypatch.setattr(os, "getpid", lambda: 40)
    monkeypatch.setattr(os, "getppid", lambda: found[0])
    monkeypatch.setattr(os, "getsid", lambda process: session)
    monkeypatch.setattr(processes, "ancestors", lambda: found)
    monkeypatch.setattr(processes, "has_loaded_torch", loaded.__contains__)
    assert processes.find_launcher() == launcher


def test_an_address_that_is_unknown_is_named():
    begin = time.monotonic()
    line = processes.unknown_address("nowhere.invalid", seconds=1.5)
    assert 1 < time.monotonic() - begin < 5
    assert "does not know the name nowhere.invalid, where the ranks meet (MASTER_ADDR). " in line
    assert processes.unknown_address("localhost") is None


def test_a_name_server_that_does_not_answer_holds_nobody_up(monkeypatch):
    monkeypatch.setattr(processes.socket, "getaddrinfo", lambda *_: time.sleep(10))
    begin = time.monotonic()
    assert processes.unknown_address("nowhere.invalid", seconds=0.5)
    assert time.monotonic() - begin < 5


AS_PROCESS_1 = """
import os, signal, sys
os.getpid = lambda: {pid}
import plumbing
print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
"""


@pytest.mark.parametrize("pid, is_default", [(1, "False"), (2, "True")])
def test_only_process_1_gets_a_handler(tmp_path, pid, is_default):
    (tmp_path / "driver.py").write_text(AS_PROCESS_1.format(pid=pid))
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "driver.py"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{is_default}\n", done.stderr


def test_the_ancestors_of_this_process():
    found = processes.ancestors()
    assert found[0] == os.getppid() and found[-1] <= 1
    assert processes.has_loaded_torch(os.getpid()) and not processes.has_loaded_torch(2**22 + 1)


def test_a_second_ctrl_c_does_not_keep_the_children_alive(tmp_path):
    """They ignore SIGTERM, so that they get SIGKILL after 10 s, however impatient somebody is."""
    (tmp_path / "driver.py").write_text(SPAWNING)
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    job = subprocess.Popen(
        [sys.executable, "driver.py"], env=env, stdout=subprocess.PIPE, text=True
    )
    assert [job.stdout.readline() for _ in range(2)] == ["child\n"] * 2
    found = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text()
    children = [int(child) for child in found.split()]
    begin = time.monotonic()
    for _ in range(3):
        job.send_signal(signal.SIGINT)
        time.sleep(0.5)
    assert any(map(alive, children))
    assert job.wait(20) == 130 and time.monotonic() - begin < 13
    assert gone(children)
