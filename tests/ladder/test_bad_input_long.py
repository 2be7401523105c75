"""Bad input, as told by a real launcher or on one of two machines."""

import socket

import launch
import pytest
from test_bad_input import (
    EMPTY,
    WITH_SNAPSHOT,
    assert_mistake_ends_both,
    assert_not_for_torchrun,
    assert_told_once,
)

# The ranks train on the CPU, and plumbing takes that for one GPU.
ONE_GPU = """
import torch
from plumbing import devices
import {script} as script
devices.count_gpus = lambda: 1
devices.current_device = lambda: torch.device("cpu")
devices.name_of_gpu = lambda device: "GPU-7"
script.main(script.parse_args())
"""


def test_torchrun_is_not_for_a_script_that_starts_its_processes():
    assert_not_for_torchrun(launch.MULTI)


def test_job_of_two_ranks_tells_once(tmp_path):
    """Wrong count, damaged snapshot, too few GPUs or samples: one line, status 2 in the report."""
    (tmp_path / "damaged.pt").write_text("damaged")
    for script in WITH_SNAPSHOT:
        (tmp_path / f"one_gpu_{script}.py").write_text(ONE_GPU.format(script=script))
    launch.edited(launch.MULTINODE, "own_multinode.py", EMPTY)
    torchrun, env = launch.torchrun, {"PYTHONPATH": str(launch.ROOT)}
    jobs = {
        "save_every: ": torchrun(launch.TORCHRUN_SCRIPT, 5, 0),
        "damaged.pt is damaged": torchrun(launch.TORCHRUN_SCRIPT, "--snapshot_path=damaged.pt"),
        f"ranks 0 and 1 use the same GPU, GPU-7 of {socket.gethostname()}. Start one process for "
        "each GPU": torchrun("one_gpu_multinode.py"),
        "the dataset has 0 samples, nothing to train on": torchrun("own_multinode.py"),
    }
    jobs = {line: launch.start(command, **env) for line, command in jobs.items()}
    for line, job in jobs.items():
        status, output = launch.finish(job)
        assert status == 1, output  # torchrun's own
        assert_told_once(output, line)
        assert "exitcode  : 2 " in output.partition("Root Cause")[2], output
    assert not list(tmp_path.glob("snapshot.pt*"))


@pytest.mark.parametrize(("node", "wrong"), [(0, "argument"), (1, "snapshot")])
def test_any_mistake_on_one_of_two_machines_ends_both(tmp_path, node, wrong):
    """Typed or found, on either machine."""
    assert_mistake_ends_both(tmp_path, node, wrong)
