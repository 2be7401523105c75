"""wandb: what each script logs, read back from the files that wandb wrote; and what goes wrong."""

import re
import signal
from pathlib import Path

import launch
from wandb_files import QUIET, read_runs, records

CPU = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(launch.ROOT)}


ALL_SCRIPTS_IN_ONE_PROCESS = """
import sys
import plumbing, single_gpu, multigpu, multigpu_torchrun, multinode
for script in single_gpu, multigpu_torchrun, multinode:
    script.main(script.parse_args())
with plumbing.local_job(1) as init_method:
    multigpu.main(0, 1, init_method, multigpu.parse_args())
print("wandb imported:", "wandb" in sys.modules)
"""


def logged(run):
    """The (epoch, loss) of each row of a run."""
    return [(row["epoch"], f"{row['loss']:.6f}") for row in run.history]


def printed(output, rank=0):
    """The (epoch, loss) of each epoch that a rank printed."""
    lines = re.findall(rf"\[rank {rank}\] Epoch (\d+) .* Loss: (\S+)", output)
    return [(int(epoch), loss) for epoch, loss in lines]


def assert_finished(folder):
    """wandb has had the time to write all, and has noted the end."""
    paths = list(folder.glob("wandb/offline-run-*/*.wandb"))
    kinds = [[record.WhichOneof("record_type") for record in records(path)] for path in paths]
    assert kinds and all(kind[-1:] == ["exit"] for kind in kinds), kinds


def one_process():
    """The environment of a job of one process, as torchrun would set it."""
    return CPU | launch.alone()


FOREVER = 100000


def test_a_signal_finishes_the_run(tmp_path):
    """The file has the epochs that were logged, and wandb's last word."""
    command = launch.python(launch.MULTI, FOREVER)
    assert_a_signal_finishes(tmp_path, command, signal.SIGTERM, {143})


def assert_a_signal_finishes(tmp_path, command, number, status, ranks=1):
    """So many runs are finished when that signal comes, and the job ends with such a status."""
    job = launch.start([*command, "--wandb", "offline"], **QUIET)
    before = launch.wait_for(job, lambda output: "[rank 0] Epoch 9 |" in output)
    job.send_signal(number)
    ended, output = launch.finish(job)
    assert ended in status, output
    assert launch.gone(launch.pids(output))
    assert_finished(tmp_path)
    runs = read_runs(tmp_path)
    assert len(runs) == ranks
    for rank, run in enumerate(sorted(runs)):
        epochs = logged(run)
        assert len(epochs) >= 9 and epochs == printed(output, rank)[: len(epochs)]
        # The last before the signal may have been under way, and those after it need not be there.
        assert len(epochs) >= len(printed(before, rank)) - 1
        assert run.x_axes == {"*": "epoch"}


def test_nothing_of_wandb_without_the_flag(tmp_path):
    """No import and no files, in any of the scripts."""
    Path("driver.py").write_text(ALL_SCRIPTS_IN_ONE_PROCESS)
    output = launch.run(launch.forked("driver.py", 1), **one_process())
    assert "wandb imported: False\n" in output
    assert {path.name for path in tmp_path.glob("[!.]*")} == {
        "driver.py",
        "output-0.log",
        "checkpoint.pt",
        "snapshot.pt",
    }
