"""Two runs that several tests look at."""

import signal

import launch
import pytest
from launch import wait_for
from llm_runs import FIRST, LONG, descendants, llm, llm_by_torchrun


@pytest.fixture(scope="session")
def unbroken_run(local, tmp_path_factory):
    """The experiment folder of a run of three epochs on two ranks that nobody disturbed."""
    folder = tmp_path_factory.mktemp("unbroken")
    quiet = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    launch.run(llm(local, *LONG, nproc=2), cwd=folder, **quiet)
    return folder / "outputs" / "default"


@pytest.fixture(scope="session")
def stopped_run(local, tmp_path_factory):
    """The folder and the output of the same run, which had SIGTERM in its second epoch."""
    folder = tmp_path_factory.mktemp("stopped")
    quiet = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    job = launch.start(llm_by_torchrun(local, *LONG), folder, **quiet)
    wait_for(job, lambda output: "Step 57/" in output)
    workers = descendants(job.pid)
    job.send_signal(signal.SIGTERM)
    status, output = launch.finish(job, 30)
    return folder / "outputs" / "default", status, output, workers


@pytest.fixture(scope="module")
def first(local, tmp_path_factory):
    """The folder of a run of four steps."""
    folder = tmp_path_factory.mktemp("first")
    launch.run(llm(local, *FIRST), cwd=folder, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    return folder / "outputs"
