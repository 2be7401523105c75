"""benchmarks/scaling.py: its model in cases that can be worked out by hand, and on slow links."""

import math
import re
import sys

import launch
import pytest
from hosts import Network, needs_namespaces

sys.path.insert(0, str(launch.ROOT / "benchmarks"))
import scaling
from scaling import Link, best_interval, fit, not_hidden, predict, sending

SCALING = str(launch.ROOT / "benchmarks" / "scaling.py")


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


def measured(output):
    """{accumulation and buckets: (together, predicted)} of the last size, in ms."""
    rows = re.findall(r"^ +\d+ +\d+ +(\d \d) +\S+ +(\S+) +(\S+) +\S+%$", output, re.MULTILINE)
    return {key: (float(together), float(predicted)) for key, together, predicted in rows}


@pytest.mark.long
def test_it_measures_predicts_and_draws(tmp_path):
    options = ("--width", 64, "--picture", "picture.png")
    output = launch.run(launch.python(SCALING, *options), 120)
    assert measured(output).keys() == {"1 1", "4 1", "1 4", "4 4"}
    table = re.findall(r"^ +(\d+) +(?:[\d.]+% *){4}$", output, re.MULTILINE)
    assert [int(nodes) for nodes in table] == scaling.NODES
    assert (tmp_path / "picture.png").stat().st_size > 10_000
    lost = [float(each) for each in re.findall(r"([\d.]+)% of the time is lost", output)]
    assert lost[-1] == pytest.approx(lost[-2] * math.sqrt(1024 / 128), rel=0.1)


def not_as_predicted(hosts, *args, buckets, **env):
    """Which steps with so many buckets are 5 % off the prediction, and what was printed."""
    agents = []
    for number, host in enumerate(hosts, 1):
        options = [f"--rdzv-conf=is_host={2 - number}", f"--local-addr=10.78.0.{number}"]
        options = options if "GLOO_SOCKET_IFNAME" in env else []
        endpoint = "10.78.0.1:29603" if options else "10.77.0.1:29603"
        command = launch.agent(endpoint, *args, options=options, script=SCALING)
        agents.append(host.start(command, OMP_NUM_THREADS="1", **env))
    ends = [launch.finish(agent, 300) for agent in agents]
    output = "".join(text for _, text in ends)
    assert [status for status, _ in ends] == [0, 0], output
    found = measured(output)
    assert len(found) == 4, output
    counted = {key: pair for key, pair in found.items() if key[-1] in buckets}
    wrong = [key for key, pair in counted.items() if pair[1] != pytest.approx(pair[0], rel=0.05)]
    return wrong, output


def assert_as_predicted(hosts, *args, buckets="14", **env):
    """What else runs on this machine disturbs a measurement. A wrong model is wrong each time."""
    for _ in range(3):
        wrong, output = not_as_predicted(hosts, *args, buckets=buckets, **env)
        if not wrong:
            return
    pytest.fail(f"{wrong}\n{output}")


@pytest.mark.long
@needs_namespaces
def test_two_hosts_with_little_bandwidth(tmp_path):
    """400 Mbit/s, whether sending is hidden or not."""
    with Network(tmp_path / "network") as network:
        for host in network.hosts:
            host.sh("tc qdisc add dev eth0 root tbf rate 400mbit burst 64kb latency 400ms")
        assert_as_predicted(network.hosts)


@pytest.mark.long
@needs_namespaces
def test_two_hosts_far_from_each_other(tmp_path):
    """Messages that fit into TCP's first window, of which each takes 10 ms.

    (Of several buckets gloo sends two at once, and the model one.)
    """
    with Network(tmp_path / "network") as network:
        delay = launch.python(launch.ROOT / "tests" / "delay.py", 0.01)
        cable = launch.start([*delay, *(host.net for host in network.hosts)], tmp_path / "cable")
        try:
            launch.wait_for(cable, lambda output: "plugged in" in output)
            for number, host in enumerate(network.hosts, 1):
                host.sh(f"ip address add 10.78.0.{number}/24 dev slow0; ip link set slow0 up")
            assert_as_predicted(
                network.hosts, "--width", 16, buckets="1", GLOO_SOCKET_IFNAME="slow0"
            )
        finally:
            cable.kill()
            cable.wait()
