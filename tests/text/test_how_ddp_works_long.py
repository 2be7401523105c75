"""docs/how-ddp-works.md: a node dies as its picture tells."""

import re
import socket

import launch
import pictures
from test_how_ddp_works import DRAWN, texts


def is_open(port):
    with socket.socket() as probe:
        return probe.connect_ex(("localhost", port)) == 0


def test_a_node_dies_as_the_picture_tells(tmp_path):
    """Agent and worker of node B die in epoch 5. Typed again, both go on at epoch 4."""
    epoch = pictures.resumed(save_every=2, died_in=5)
    assert f"read: {epoch} epochs done, go on at epoch {epoch}" in texts(DRAWN / "crash.svg")
    launch.copy_scripts(tmp_path)
    script = tmp_path / "multinode.py"
    line = "        sampler.set_epoch(epoch)"
    code = script.read_text()
    assert code.count(line) == 1
    death = """
        import os, pathlib, signal
        died = pathlib.Path("died")
        if epoch == 5 and pathlib.Path.cwd().name == "b" and not died.exists():
            died.touch()
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
"""
    script.write_text(code.replace(line, death + line))
    port = launch.free_port()

    def node(name):
        options = ("--max-restarts=3",)
        command = launch.agent(f"localhost:{port}", 7, 2, options=options, script=str(script))
        return launch.start(command, tmp_path / name, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")

    a = node("a")
    launch.wait_for(a, lambda _: is_open(port))  # so that A, which survives, has the store
    status, output = launch.finish(node("b"), 60)
    assert status == -9, output
    again, printed = node("b"), []
    for process, before in (a, [0, 1, 2, 3, 4]), (again, []):
        status, output = launch.finish(process, 90)
        assert status == 0, output
        trained = re.findall(r"\] Epoch (\d+) \| Batchsize", output)
        assert [int(number) for number in trained] == [*before, *range(epoch, 7)]
        resumed = re.findall(r"Resuming training from snapshot at Epoch (\d+)", output)
        assert set(resumed) <= {str(epoch)}
        printed += resumed
    assert printed  # by rank 0
