import launch
import pytest


@pytest.fixture(scope="session")
def good(tmp_path_factory):
    """The bytes of a good snapshot: of one epoch, by one process with batches of 32."""
    folder = tmp_path_factory.mktemp("good")
    status, output = launch.quickly(launch.TORCHRUN_SCRIPT, 1, cwd=folder)
    assert status == {0}, output
    return (folder / "snapshot.pt").read_bytes()
