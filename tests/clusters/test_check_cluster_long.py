"""check_cluster.py between hosts, sound ones and broken ones, each broken for real."""

import re
import sys
import time
from pathlib import Path

import launch
import pytest
import torch
from hosts import Network, needs_namespaces
from test_check_cluster import (
    assert_good_on_one_machine,
    assert_told_by_srun,
    curve,
    errors,
    see_it_end,
    table,
    the_error,
)


def check(endpoint, *options, nproc=1):
    """The command for one of two machines, as its documentation gives it."""
    rendezvous = ("--rdzv-id=456", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}")
    nodes = ("--nnodes=2", f"--nproc_per_node={nproc}")
    return launch.python(launch.CHECK, *nodes, *rendezvous, *options)


@pytest.fixture
def network(tmp_path):
    with Network(tmp_path / "network") as network:
        yield network


def test_on_one_machine_by_torchrun():
    assert_good_on_one_machine(launch.torchrun(launch.CHECK, "--max_mib=1"))


def test_the_script_may_stay_in_the_command():
    """Not the script is started, but the check; and once, whatever --max-restarts says."""
    options = ("--nproc_per_node=2", "--max-restarts=3", launch.MULTINODE, "50", "10")
    output = launch.run(launch.python(launch.CHECK, "--max_mib=1", *options), 30)
    assert output.endswith("OK: all-reduce gives the right sums between 2 processes\n")
    assert "Epoch" not in output


def test_the_cpus_that_a_process_may_use():
    """As `taskset` left them."""
    output = launch.run(["taskset", "-c", "1", *launch.python(launch.CHECK, "--max_mib=1")], 30)
    assert [row["CPUs"] for row in table(output)] == ["1", "1"]


@needs_namespaces
def test_two_hosts(network):
    alpha, beta = network.hosts
    command = check("alpha:29603", "--max_mib=1", nproc=2)
    agents = [alpha.start(command), beta.start(command)]
    first, second = (see_it_end(agent, 0, 40) for agent in agents)
    if "rank  local" in second:
        first, second = second, first
    places = [(row["local"], row["host"]) for row in table(first)]
    assert sorted(places) == [("0", "alpha"), ("0", "beta"), ("1", "alpha"), ("1", "beta")]
    assert re.search(r"all-reduce +within a node +between all\n", first)
    assert all(len(pair) == 2 for pair in curve(first).values()) and len(curve(first)) == 6
    assert "rank" not in second.partition("waits up to")[2]  # only rank 0 prints
    assert alpha.processes() == beta.processes() == []


@needs_namespaces
def test_the_endpoint_does_not_resolve(network):
    error = the_error(network.hosts[0].start(check("nosuch.invalid:29603")))
    assert error.startswith("alpha cannot resolve the name nosuch.invalid: ")


@needs_namespaces
def test_the_own_name_does_not_resolve(network):
    network.hosts[0].know("10.77.0.2 beta")
    error = the_error(network.hosts[0].start(check("10.77.0.1:29603")))
    assert error.startswith("alpha cannot resolve its own name, as torchrun wants to: add it to")


@needs_namespaces
def test_one_machine_that_does_not_know_its_own_name(network):
    """The check ends within seconds, and both cures of docs/clusters.md work."""
    alpha = network.hosts[0]
    alpha.know("127.0.0.1 localhost")
    alone = launch.python(launch.CHECK, "--max_mib=1")
    error = the_error(alpha.start(alone))
    assert error.startswith("alpha cannot resolve its own name, ")
    options = ("--standalone", "--nproc_per_node=2", "--local-addr=localhost")
    assert "OK: " in see_it_end(alpha.start([*alone, *options]), 0, 60)
    alpha.know("127.0.1.1 alpha")
    assert "OK: " in see_it_end(alpha.start(alone), 0, 60)


@needs_namespaces
def test_nobody_listens(network):
    error = the_error(network.hosts[1].start(check("alpha:29603", "--wait=3")))
    assert error.startswith("nobody listens at alpha port 29603: start the check on that machine")


@needs_namespaces
def test_no_answer(network):
    network.cable(network.hosts[0], "down")
    error = the_error(network.hosts[1].start(check("10.77.0.1:29603")))
    assert error.startswith("beta gets no answer from 10.77.0.1 port 29603 (")


@needs_namespaces
def test_the_others_do_not_come(network):
    error = the_error(network.hosts[0].start(check("alpha:29603", "--wait=1")))
    assert error.startswith("not all 2 machines came (RendezvousTimeoutError): start the same")


@needs_namespaces
def test_the_machine_of_the_endpoint_is_lost(network):
    alpha, beta = network.hosts
    command = check("alpha:29603", "--nnodes=3")
    _, agent = alpha.start(command), beta.start(command)
    launch.wait_for(agent, lambda output: "beta waits up to" in output)  # so alpha listens
    time.sleep(2)  # both wait for the third
    alpha.die()
    assert the_error(agent, 30) == "beta lost alpha:29603, where all meet: look at the output there"


@needs_namespaces
@pytest.mark.parametrize("address", ["", "127.0.0.1"], ids=["everywhere", "on loopback"])
def test_the_port_is_taken(network, address):
    code = f"import socket, time; s = socket.create_server(({address!r}, 29603)); time.sleep(60)"
    network.hosts[0].start([sys.executable, "-c", code])
    time.sleep(1)
    error = the_error(network.hosts[0].start(check("alpha:29603")))
    assert error.startswith("port 29603 of alpha is taken by another program")


def test_two_of_one_job_on_one_machine():
    """The second finds the port taken, by the first, and that is right."""
    command = check(f"localhost:{launch.free_port()}", "--max_mib=1")
    for agent in [launch.start(command), launch.start(command)]:
        see_it_end(agent, 0, 30)


@needs_namespaces
def test_the_name_resolves_to_loopback_and_the_endpoint_is_an_address(network):
    """torchrun then does not know itself for the host of the endpoint, and nobody listens."""
    network.hosts[0].know("127.0.1.1 alpha\n10.77.0.2 beta")
    error = the_error(network.hosts[0].start(check("10.77.0.1:29603")))
    assert error.startswith("10.77.0.1 belongs to this machine, but its name alpha resolves to 127")
    assert "--rdzv-conf=is_host=1" in error


@needs_namespaces
def test_the_name_resolves_to_loopback_and_the_endpoint_is_that_name(network):
    """gloo would tell beta to look for alpha at 127.0.1.1. The cure that is named helps."""
    alpha, beta = network.hosts
    alpha.know("127.0.1.1 alpha\n10.77.0.2 beta")
    command = check("alpha:29603", "--max_mib=1")
    agents = [alpha.start(command), beta.start(command)]
    (error,) = errors("".join(map(see_it_end, agents)))
    assert error.startswith("the name alpha resolves to 127.0.1.1 on alpha itself, and gloo would")
    assert "(there are: lo eth0)" in error
    agents = [host.start(command, GLOO_SOCKET_IFNAME="eth0") for host in network.hosts]
    for agent in agents:
        see_it_end(agent, 0, 40)


@needs_namespaces
def test_rank_0_is_called_localhost(tmp_path):
    """Its name is an alias of localhost there, and the other host looks for it on itself."""
    with Network(tmp_path / "network", names=("alpha", "zeta"), ipv6=False) as network:
        alpha, zeta = network.hosts
        (alpha.folder / "hosts").write_text("127.0.0.1 localhost alpha\n10.77.0.2 zeta\n")
        interface = {"GLOO_SOCKET_IFNAME": "eth0"}
        agents = [
            alpha.start(check("10.77.0.1:29603", "--rdzv-conf=is_host=1", "--wait=2"), **interface),
            zeta.start(check("10.77.0.1:29603", "--rdzv-conf=is_host=0", "--wait=2"), **interface),
        ]
        error = the_error(agents[1])
        assert error.startswith(
            "MASTER_ADDR: localhost is zeta itself, and not the machine of rank"
        )
        assert "nothing was heard of rank 1" in the_error(agents[0], 30)


@needs_namespaces
def test_the_interface_does_not_exist(network):
    alpha, beta = network.hosts
    command = check("alpha:29603")
    agents = [alpha.start(command, GLOO_SOCKET_IFNAME="ens5"), beta.start(command)]
    error = the_error(agents[0])
    assert error == "GLOO_SOCKET_IFNAME=ens5, but alpha has no such interface, only: lo eth0"
    launch.finish(agents[1], 30)


@needs_namespaces
def test_the_interface_leads_nowhere(network):
    alpha, beta = network.hosts
    for host, address in zip(network.hosts, ("10.88.1.1", "10.88.2.1"), strict=True):
        host.sh("ip link add side type veth peer name other; ip link set other up")
        host.sh(f"ip address add {address}/24 dev side; ip link set side up")
        host.sh("ip route add unreachable 10.88.0.0/16")
    command = check("alpha:29603")
    agents = [host.start(command, GLOO_SOCKET_IFNAME="side") for host in network.hosts]
    for agent in agents:
        error = the_error(agent, 40)
        assert error.startswith("the processes met, but gloo cannot connect them: a wrong inter")


@needs_namespaces
def test_large_packets_are_lost(network):
    """The machines send 9000 bytes, and what is between them takes 1500 and says nothing."""
    for host in network.hosts:
        host.sh("ip link set eth0 mtu 9000 gso_max_segs 1")
    agents = [host.start(check("alpha:29603")) for host in network.hosts]
    lines = [see_it_end(agent, seconds=40) for agent in agents]
    told = [error for output in lines for error in errors(output)]
    assert told and all(
        "all-reduce of larger messages does not work, from " in line for line in told
    )
    assert "1 KiB" in lines[0] + lines[1], "smaller ones were measured"


@needs_namespaces
def test_versions_differ(network):
    """On beta torch has another version.py over its own."""
    alpha, beta = network.hosts
    path = Path(torch.__file__).parent / "version.py"
    other = beta.folder / "version.py"
    other.write_text(path.read_text() + "\n__version__ = '2.99.0'\n")
    beta.sh(f"mount --bind {other} {path}")
    command = check("alpha:29603")
    outputs = [see_it_end(agent) for agent in [alpha.start(command), beta.start(command)]]
    output = "".join(outputs)
    assert [row["torch"].split()[0] for row in table(output)] == [torch.__version__, "2.99.0"]
    assert "* differs from most of the others" in output
    wanted = f"torch differs: {torch.__version__} on alpha; 2.99.0 on beta. Install the same"
    assert [error[: len(wanted)] for error in errors(output)] == [wanted]


OTHERS_BY_SRUN = [
    (1, "localhost", False, "MASTER_ADDR: nobody listens at localhost port {port}"),
    (0, "192.0.2.9", False, "MASTER_ADDR: 192.0.2.9 is another machine, but rank 0 runs on"),
    (0, "localhost", True, "MASTER_ADDR: port {port} of {host} is taken by another program"),
    (0, "localhost", False, "nothing was heard of rank 1 in 6 s"),
]


@pytest.mark.parametrize(("rank", "address", "taken", "expected"), OTHERS_BY_SRUN)
def test_started_by_srun_in_other_ways(rank, address, taken, expected):
    assert_told_by_srun(rank, address, taken, expected)


@pytest.mark.gpu(2)
def test_check_cluster_shows_both_gpus_and_their_speed():
    output = launch.run(launch.python(launch.CHECK, "--max_mib=64"), 60, **launch.gpus(2))
    rows = table(output)
    assert [row["device"] for row in rows] == ["cuda:0", "cuda:1"]
    for row in rows:
        assert row["name"] == torch.cuda.get_device_name(0)
        assert row["NCCL"] == ".".join(map(str, torch.cuda.nccl.version()))
    assert list(curve(output))[-1] == "64 MiB"
    assert output.endswith("OK: all-reduce gives the right sums between 2 processes\n")


@pytest.mark.gpu(1)
def test_check_cluster_tells_of_a_busy_gpu():
    size = int(0.6 * torch.cuda.mem_get_info(0)[1])
    hold = f"import torch, time; x = torch.ones({size}, dtype=torch.uint8, device='cuda')"
    other = launch.start(
        ["python3", "-c", f"{hold}; print('held', flush=True); time.sleep(60)"], **launch.gpus(1)
    )
    try:
        launch.wait_for(other, lambda output: "held" in output)
        output = launch.run(launch.python(launch.CHECK), 20, status=2, **launch.gpus(1))
    finally:
        other.kill()
        other.wait()
    (error,) = errors(output)
    assert re.match(r"GPU 0 of \S+ is busy: \d+\.\d of \d+\.\d GiB are in use", error)


@pytest.mark.gpu(1)
def test_check_cluster_tells_of_more_processes_than_gpus():
    (error,) = errors(
        launch.run(
            launch.python(launch.CHECK, "--nproc_per_node=2"), 20, status=2, **launch.gpus(1)
        )
    )
    assert re.match(
        r"ranks 0 and 1 use the same GPU, GPU-\S+ of \S+\. Start one process for each GPU$", error
    )


@pytest.mark.gpu(1)
def test_check_cluster_tells_of_a_node_without_gpu():
    command = check(f"localhost:{launch.free_port()}")
    agents = [
        launch.start(command, "node0", **launch.gpus(1)),
        launch.start(command, "node1", **launch.gpus(0)),
    ]
    ends = [launch.finish(agent, 30) for agent in agents]
    assert [status for status, _ in ends] == [2, 2]
    (error,) = errors("".join(output for _, output in ends))
    assert error.startswith("no GPU for a process on ")
