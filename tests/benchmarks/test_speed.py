"""The benchmark of the ladder runs; that its figures are right, people judge."""

import launch
import pytest


@pytest.mark.parametrize("name", sorted(path.name for path in launch.ROOT.glob("benchmarks/*.py")))
def test_a_benchmark_says_what_it_measures(name):
    output = launch.run(launch.forked(launch.ROOT / "benchmarks" / name, "--help"))
    assert f"Run:  python benchmarks/{name}" in output


def test_every_benchmark_has_a_row():
    """With what it measures, and where and when it last ran."""
    page = (launch.ROOT / "docs" / "performance.md").read_text()
    for path in (launch.ROOT / "benchmarks").glob("*.py"):
        assert f"\n| {path.name} | " in page, path.name
