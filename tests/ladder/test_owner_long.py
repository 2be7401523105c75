"""A second job on one snapshot, started for real."""

import os
import re
import signal

import launch
from launch import TORCHRUN_SCRIPT, start, torchrun, wait_for


def test_the_second_job_is_refused_and_the_first_trains_on(tmp_path):
    """Then the first is killed, all at once, and the next goes on from its snapshot."""
    script = TORCHRUN_SCRIPT
    first = start(torchrun(script, 10**6, 1, "--seed=1"))
    wait_for(first, lambda output: "Epoch 3 | Training snapshot saved" in output)
    status, output = launch.finish(start(torchrun(script, 10**6, 1, "--seed=2")))
    (holder,) = re.findall(r"Rank: 0 .* Pid: (\d+)", first.log.read_text())
    path = f"{tmp_path}/snapshot.pt"
    named = rf"^ERROR: a different job uses {path} \(process {holder} of .*\)\. Wait until it has "
    assert status == 1 and re.search(named, output, re.MULTILINE), output
    assert len(re.findall("^ERROR: ", output, re.MULTILINE)) == 1 and "] Epoch " not in output
    before = first.log.read_text()
    wait_for(first, lambda output: output.count("] Epoch ") > before.count("] Epoch ") + 4)
    pids = launch.pids(first.log.read_text())
    for pid in (first.pid, *pids):
        os.kill(pid, signal.SIGKILL)
    first.wait()
    epochs = launch.snapshot("snapshot.pt")["epochs_run"]
    output = launch.run(torchrun(script, epochs + 2, 1, "--seed=1"))
    assert f"Resuming training from snapshot at Epoch {epochs}\n" in output
