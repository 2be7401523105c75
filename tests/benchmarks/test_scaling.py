"""benchmarks/scaling.py: its model in cases that can be worked out by hand, and on slow links."""

import pytest
from scaling import Link, best_interval, fit, not_hidden, predict, sending


def test_an_all_reduce_by_hand():
    """Two ranks send half the message twice; of many the tree has fewer steps than the ring."""
    assert sending(2, 8e6, Link(1.0, 2e6)) == pytest.approx(2 * 1.0 + 8 / 2)
    assert sending(4, 8e6, Link(0.0, 2e6)) == pytest.approx(2 * 3 / 4 * 8 / 2)
    assert sending(1024, 8.0, Link(1.0, 2e6)) == pytest.approx(2 * 10 * 1.0, rel=1e-4)


def test_a_fit_finds_the_link_again():
    link = Link(3e-4, 5e8)
    curve = [(size, sending(2, size, link)) for size in (1e3, 1e5, 1e7)]
    found = fit(2, curve)
    assert found.latency == pytest.approx(3e-4) and found.bandwidth == pytest.approx(5e8)


@pytest.mark.parametrize(
    ("backward", "buckets", "expected"),
    [
        (1.0, [0.5], 0.5),  # one bucket is there when the pass is done
        (1.0, [0.25, 0.25], 0.25),  # the first is hidden
        (1.0, [1.0, 1.0], 1.5),  # the second waits for the first, which began in mid-pass
        (0.0, [0.5, 0.5], 1.0),
    ],
)
def test_what_is_not_hidden(backward, buckets, expected):
    assert not_hidden(backward, buckets) == pytest.approx(expected)


def test_the_best_interval_is_the_best():
    interval, lost = best_interval(2.0, 3600.0)

    def loses(seconds):
        return 2.0 / seconds + seconds / 2 / 3600.0

    assert lost == pytest.approx(loses(interval)) and interval == pytest.approx(120)
    assert lost < min(loses(0.9 * interval), loses(1.1 * interval))


# Measured on H200 of one host: tokens/s a GPU without accumulation and with 4, on 1, 2 and 4.
MEASURED = {1: (546, 550), 2: (527, 540), 4: (523, 540)}


# All-reduce between two of them: MiB, microseconds.
CURVE = [(1, 23.5), (4, 33.5), (16, 74.5), (64, 248.4), (256, 894.8), (1024, 3275.1)]


@pytest.mark.parametrize("column, accumulation", [(0, 1), (1, 4)])
def test_four_gpus_from_one_and_two(column, accumulation):
    """Within half a percentage point of the efficiency that was measured."""
    links = {"within a node": fit(2, [(mib * 2**20, us * 1e-6) for mib, us in CURVE])}
    seconds = {n: 65_536 * accumulation / speeds[column] / 1e3 for n, speeds in MEASURED.items()}
    run = {"bytes": 498e6, "steps": {f"{accumulation} 1": [seconds[1], 0.0, 0.0]}}
    two, four = (predict(run, f"{accumulation} 1", 1, gpus, links) for gpus in (2, 4))
    beyond = max(0.0, seconds[2] - two)
    assert seconds[1] / (four + beyond) == pytest.approx(seconds[1] / seconds[4], abs=0.005)
