from pathlib import Path

import launch
import pytest


@pytest.fixture(scope="session")
def good(tmp_path_factory):
    """The bytes of a good snapshot: of one epoch, by one process with batches of 32."""
    folder = tmp_path_factory.mktemp("good")
    status, output = launch.quickly(launch.TORCHRUN_SCRIPT, 1, cwd=folder)
    assert status == {0}, output
    return (folder / "snapshot.pt").read_bytes()


@pytest.fixture
def saved(good):
    """`saved(script, path)` puts a file there that the script can go on from, and returns it."""

    def saved(script, path=None):
        path = Path(
            path or ("checkpoint.pt" if script in (launch.SINGLE, launch.MULTI) else "snapshot.pt")
        )
        path.write_bytes(b"good weights" if path.name == "checkpoint.pt" else good)
        return path

    return saved


@pytest.fixture
def multigpu(tmp_path):
    """`start(script)` and `end(job)`: a long run of multigpu.py, or of a copy, and how it ends.

    No process is left then, no file among the temporary ones, no semaphore.
    """
    temporary = tmp_path / "temporary"
    temporary.mkdir()

    def start(script=launch.MULTI):
        env = {"TMPDIR": str(temporary), "PYTHONPATH": str(launch.ROOT)}
        return launch.start(launch.python(script, 10**5), tmp_path / "run", **env)

    def end(job, seconds=30):
        status, output = launch.finish(job, seconds)
        assert len(launch.pids(output)) == 2 and launch.gone(launch.pids(output)), output
        # An empty folder for what is compiled is torch's own, and any use of an optimizer makes it.
        files = [path.name for path in temporary.iterdir() if "torchinductor" not in path.name]
        assert files == [], output
        assert "leaked" not in output, output
        return status, output

    return start, end
