"""multinode.py and train_translation.py on two hosts: a network between them, a disk each."""

import re
import shutil
import sys
import time

import launch
import pytest
import torch
from hosts import Network, needs_namespaces
from launch import assert_same, snapshot
from llm_runs import metrics

from translation.grammar import default_pairs

pytestmark = needs_namespaces
# Of a weight after 50 epochs. A resume of four processes rounds otherwise than an unbroken run.
ROUNDING = 1e-3


@pytest.fixture
def network(request, tmp_path):
    with Network(tmp_path / "network", **getattr(request, "param", {})) as network:
        yield network


def start(hosts, endpoint, *args, **how):
    """Start the job on each host, in this order, with two processes on each."""
    return [host.start(launch.agent(endpoint, *args, nproc=2, **how)) for host in hosts]


def finish(agents, seconds=90):
    """Wait until both agents have ended well, and return what each printed."""
    ends = [launch.finish(agent, seconds) for agent in agents]
    assert [status for status, _ in ends] == [0, 0], "\n----\n".join(output for _, output in ends)
    return [output for _, output in ends]


def the_snapshot(network):
    """The snapshot that a job has left on the disk of one host, and not on the other's."""
    (path,) = [file for host in network.hosts for file in host.folder.glob("snapshot.pt*")]
    return path


def typed(address):
    """The command of README.md that is typed on each node, for two processes there."""
    text = (launch.ROOT / "README.md").read_text()
    (command,) = re.findall(r"^torchrun .*ADDRESS.*$", text, re.MULTILINE)
    command = command.replace("ADDRESS", address).replace("node=8", "node=2")
    _, *options = command.replace("multinode.py", launch.MULTINODE).split()
    return [sys.executable, "-m", "torch.distributed.run", *options]


@pytest.mark.parametrize(
    ("network", "address"),
    [({"ipv6": False}, "10.77.0.1"), ({"ipv4": False}, "[fd77::1]")],
    ids=["IPv4", "IPv6"],
    indirect=["network"],
)
def test_two_hosts_end_where_one_machine_ends(network, address, unbroken):
    """Bitwise; rank 0 is on one of them and saves there, and nothing is left behind."""
    outputs = finish([host.start(typed(address)) for host in network.hosts])
    for host, output in zip(network.hosts, outputs, strict=True):
        assert output.count(f"| World size: 4 | Local rank: 0 | Host: {host.name} |") == 1
        assert host.processes() == []
    assert_same(the_snapshot(network), unbroken(4, 50))


PODS = {
    "TrainJob": {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "2",
        "PET_NODE_RANK": "{number}",
        "PET_MASTER_ADDR": "alpha",
        "PET_MASTER_PORT": "29603",
    },
    "PyTorchJob": {
        "RANK": "{number}",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "alpha",
        "MASTER_PORT": "29603",
    },
    "indexed job": {"JOB_COMPLETION_INDEX": "{number}"},
}


@pytest.mark.parametrize("kind", PODS)
def test_what_kubernetes_sets_is_enough(network, kind, unbroken):
    """The commands of docs/clusters.md, with the variables of each kind of pod."""
    page = (launch.ROOT / "docs" / "clusters.md").read_text()
    (row,) = re.findall(rf"^\|.*{kind}.*$", page, re.MULTILINE)
    command = re.search("`(torchrun .*?)`", row)[1].replace("ddp-0.ddp", "alpha")
    command = command.replace("torchrun", f"{sys.executable} -m torch.distributed.run")
    command = command.replace("=gpu", "=2").replace("multinode.py", launch.MULTINODE)
    agents = []
    for number, host in enumerate(network.hosts):
        env = {name: value.format(number=number) for name, value in PODS[kind].items()}
        agents.append(host.start(["bash", "-c", f"exec {command}"], **env))
    finish(agents)
    assert_same(the_snapshot(network), unbroken(4, 50))


def test_the_check_reads_what_kubernetes_sets(network):
    """`python check_cluster.py` in the pods of a TrainJob: one check of all, by torchrun."""
    agents = [
        host.start(
            launch.python(launch.CHECK, "--max_mib=1"),
            **{name: value.format(number=number) for name, value in PODS["TrainJob"].items()},
        )
        for number, host in enumerate(network.hosts)
    ]
    assert "OK: all-reduce gives the right sums between 4 processes" in "".join(finish(agents))


def test_two_jobs_with_one_id_at_one_endpoint_are_told(network):
    """They become one job, of which each machine was told something else."""
    agents = [
        host.start(launch.agent("alpha:29603", 20, 10, "--seed", number))
        for number, host in enumerate(network.hosts)
    ]
    for agent in agents:
        status, output = launch.finish(agent, 90)
        assert status == 1 and "ERROR: seed: not the same on all machines" in output


def test_two_jobs_with_one_snapshot_are_kept_apart(network, tmp_path):
    """On a disk that both machines share: each job has it for both of its machines."""
    path = tmp_path / "snapshot.pt"
    alpha, beta = network.hosts
    one = start([alpha, beta], "alpha:29603", 10**6, 1000, "--snapshot_path", path)
    for agent in one:
        launch.wait_for(agent, lambda output: "Epoch 3 |" in output)
    two = start([beta, alpha], "beta:29604", 10**6, 1000, "--snapshot_path", path)
    for agent in two:
        status, output = launch.finish(agent, 150)
        line = r"^ERROR: on (alpha|beta): a different job uses /.*snapshot.pt \(process \d+ of "
        line += "(alpha|beta), since "
        assert status == 1 and re.search(line, output, re.MULTILINE), output
    assert all(agent.poll() is None for agent in one)


def test_the_newest_snapshot_wins_when_the_hosts_change_their_order(network, unbroken):
    """Resumed with the newest snapshot on the other disk, an old one on the first, by name."""
    alpha, beta = network.hosts
    finish(start([alpha, beta], "alpha:29603", 20, 20))
    old = alpha.folder / "snapshot.pt"
    shutil.copy(old, beta.folder)
    torch.save({**torch.load(old, weights_only=True), "epochs_run": 10}, old)
    outputs = finish(start([beta, alpha], "beta:29603", 50, 50))
    assert "".join(outputs).count("Resuming training from snapshot at Epoch 20") == 1
    (rank_0,) = [
        host for host in network.hosts if snapshot(host.folder / "snapshot.pt")["epochs_run"] == 50
    ]
    assert_same(rank_0.folder / "snapshot.pt", unbroken(4, 50), ROUNDING)


def test_a_host_that_dies_and_comes_back(network, unbroken):
    """The other host waits for it, both resume from the snapshot, and end as if unbroken."""
    alpha, beta = network.hosts
    command = launch.agent("10.77.0.1:29603", 50, 5, nproc=2, options=["--max-restarts=3"])
    store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    first, second = alpha.start(command, **store), beta.start(command, **store)
    launch.wait_for(first, lambda output: "Epoch 9 | Training snapshot saved" in output)
    beta.die()
    assert second.wait() == -9
    launch.wait_for(first, lambda output: "Connection" in output)
    outputs = finish([first, beta.start(command, **store)])
    assert "".join(outputs).count("Resuming training from snapshot at Epoch") == 1
    assert_same(the_snapshot(network), unbroken(4, 50), ROUNDING)


def test_the_link_is_down_for_ten_seconds(network, unbroken):
    """Training stands still and goes on, without a restart."""
    alpha, beta = network.hosts
    agents = start([alpha, beta], "10.77.0.1:29603", 50, 5)
    launch.wait_for(agents[0], lambda output: "Epoch 9 | Training snapshot saved" in output)
    network.cable(beta, "down")
    time.sleep(1)  # what is under way arrives or is lost
    before = agents[0].log.read_text()
    time.sleep(9)
    assert agents[0].log.read_text() == before
    network.cable(beta, "up")
    finish(agents)
    assert_same(the_snapshot(network), unbroken(4, 50))


def test_an_elastic_job_goes_on_with_one_host(network):
    """`--nnodes=1:2`: when one host dies, the other goes on alone from the snapshot."""
    alpha, beta = network.hosts
    options = ["--max-restarts=3", "--rdzv-conf=last_call_timeout=8"]
    command = launch.agent("alpha:29603", 60, 10, nproc=2, nnodes="1:2", options=options)
    store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    first, second = alpha.start(command, **store), beta.start(command, **store)
    launch.wait_for(first, lambda output: "Epoch 9 | Training snapshot saved" in output)
    assert "World size: 4" in first.log.read_text()
    beta.die()
    assert second.wait() == -9
    status, output = launch.finish(first, 90)
    assert status == 0, output
    assert "World size: 4" in output and "World size: 2" in output
    assert output.count("Resuming training from snapshot at Epoch 10") == 1
    assert snapshot(alpha.folder / "snapshot.pt")["epochs_run"] == 60


TINY = "--dataset pairs.tsv --d_model 16 --layers 1 --heads 2 --d_ff 32 --dropout 0 --seq-len 40"
TINY += " --num-decode 4 --num-epochs 5 --log-freq 1 --lr 2e-3"
STEPS = 36  # in an epoch


def typed_for_translation(address, *options):
    """The command of docs/translation.md for two machines, made small, with torchrun's options."""
    text = (launch.ROOT / "docs/translation.md").read_text().replace("\\\n", " ")
    (command,) = re.findall(r"^torchrun .*HOST.*$", text, re.MULTILINE)
    _, *typed = command.replace("HOST", address).split()
    return [sys.executable, "-m", "torch.distributed.run", *options, *typed, *TINY.split()]


def on_a_new_disk(folder):
    """A copy of the scripts and of the data."""
    folder.mkdir(exist_ok=True)
    launch.copy_scripts(folder)
    pairs = map("\t".join, [("en", "it"), *default_pairs()[::10]])
    (folder / "pairs.tsv").write_text("\n".join(pairs))
    return folder


def kill_in_mid_epoch(dying, job, rank_0, epoch):
    """Kill all on the host `dying` in mid-epoch, after the snapshot of `epoch`; the others have to
    end by themselves. `job` has {host: its agent}. Return what all printed."""
    saved, step = f"snapshot saved at weights/tmodel_{epoch:02d}.pt\n", STEPS * (epoch + 1) + 4
    launch.wait_for(job[rank_0], lambda output: saved in output and f"Step {step}/" in output)
    dying.die()
    outputs = []
    for host, agent in job.items():
        status, output = launch.finish(agent, 60)
        assert status == (-9 if host is dying else 1), output
        assert host.processes() == []
        outputs.append(output)
    return "".join(outputs)


def epochs_saved(host):
    """The epochs of the snapshots on its disk."""
    return sorted(int(path.stem[-2:]) for path in host.folder.glob("weights/tmodel_*.pt"))


def test_translation_goes_on_when_a_host_has_died(network, tmp_path):
    """First the host without a snapshot dies, then, when rank 0 has moved to it, that with the
    newest. It ends with the bits of one machine with 4 processes, and the losses of one process.
    """
    one = on_a_new_disk(tmp_path / "one")
    args = ["train_translation.py", *TINY.split(), "--batch_size"]
    launch.run(launch.python(*args, 32, "--model_folder", "alone"), cwd=one)
    launch.run(launch.torchrun(*args, 8, nproc=4), cwd=one)

    alpha, beta = network.hosts
    for host in network.hosts:
        on_a_new_disk(host.folder)
    command = typed_for_translation("10.77.0.1")
    job = {host: host.start(command) for host in network.hosts}
    kill_in_mid_epoch(beta, job, rank_0=alpha, epoch=0)
    assert epochs_saved(beta) == []
    begin = STEPS * (1 + max(epochs_saved(alpha)))

    # Ranks follow the addresses, sorted as text.
    job = {}
    for host, address in (alpha, "fd77::1"), (beta, "10.77.0.2"):
        swapped = typed_for_translation("10.77.0.2", f"--local-addr={address}")
        job[host] = host.start(swapped)
    output = kill_in_mid_epoch(beta, job, rank_0=beta, epoch=2)
    assert output.count(f"Resuming training from snapshot at Step {begin}\n") == 1
    assert max(epochs_saved(alpha)) < max(epochs_saved(beta))
    begin = STEPS * (1 + max(epochs_saved(beta)))

    outputs = finish([host.start(command) for host in network.hosts])
    assert "".join(outputs).count(f"Resuming training from snapshot at Step {begin}\n") == 1
    final = "weights/final/model.pt"
    assert not (beta.folder / final).exists()
    found, unbroken = (torch.load(disk / final) for disk in (alpha.folder, one))
    torch.testing.assert_close(found, unbroken, rtol=0, atol=0)
    for name in "train/loss", "validation/loss":
        parts = [metrics(host.folder / "weights", name) for host in (beta, alpha)]
        found = parts[0] | parts[1]  # those in the middle are on the disk of beta
        assert found == metrics(one / "weights", name)
        assert found == pytest.approx(metrics(one / "alone", name), rel=1e-4)
