"""What benchmarks/scaling.py predicts for two hosts on slow links, and what it measures there."""

import launch
import pytest
from hosts import Network, needs_namespaces
from test_scaling_long import SCALING, measured


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


@needs_namespaces
@pytest.mark.exclusive
def test_two_hosts_with_little_bandwidth(tmp_path):
    """400 Mbit/s, whether sending is hidden or not."""
    with Network(tmp_path / "network") as network:
        for host in network.hosts:
            host.sh("tc qdisc add dev eth0 root tbf rate 400mbit burst 64kb latency 400ms")
        assert_as_predicted(network.hosts)


@needs_namespaces
@pytest.mark.exclusive
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
