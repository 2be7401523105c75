"""The files of slurm/, submitted to a real Slurm with two nodes."""

import re
import sys
import time

import launch
import pytest
from cluster import Cluster, needs_slurm
from hosts import needs_namespaces
from launch import assert_same
from test_check_cluster import table

from exercises import __main__ as exercises

pytestmark = [needs_namespaces, needs_slurm]

TORCHRUN, SRUN, SINGLE_NODE = (
    f"{name}.sbatch" for name in ("multinode_torchrun", "multinode_srun", "single_node")
)
# The files ask for 4 GPUs on each node; sbatch's own options win. `small` is half a node.
SIZES = {
    (TORCHRUN, "whole"): ("--gpus-per-node=2", "--cpus-per-task=2"),
    (TORCHRUN, "small"): ("--gpus-per-node=1", "--cpus-per-task=1"),
    (SRUN, "whole"): ("--ntasks-per-node=2", "--cpus-per-task=1"),
    (SRUN, "small"): ("--ntasks-per-node=1", "--cpus-per-task=1"),
    (SINGLE_NODE, "whole"): ("--gpus-per-node=2", "--cpus-per-task=2"),
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("slurm") / "cluster") as cluster:
        yield cluster


def started(log):
    """All `(rank, world size, local rank, host)` that a job printed."""
    form = r"^Rank: (\d+) \| World size: (\d+) \| Local rank: (\d+) \| Host: (\w+) \|"
    return re.findall(form, log, re.MULTILINE)


def test_two_jobs_share_the_nodes_and_end_where_one_machine_ends(cluster, unbroken):
    """One by torchrun and one by srun, at once: neither meets the other."""
    jobs = {}
    for file in TORCHRUN, SRUN:
        path = f"{file}.pt"
        jobs[file] = cluster.submit(
            file, 50, 10, "--snapshot_path", path, options=SIZES[file, "small"]
        )
    for file, job in jobs.items():
        state, status, log = cluster.finish(job)
        assert (state, status) == ("COMPLETED", 0), log
        assert {line[1:] for line in started(log)} == {("2", "0", "node1"), ("2", "0", "node2")}
        assert_same(cluster.project / f"{file}.pt", unbroken(2, 50))
        assert "already in use" not in log, log


def typed(form):
    """The one command of docs/clusters.md that begins so."""
    text = (launch.ROOT / "docs" / "clusters.md").read_text()
    (command,) = re.findall(rf"^\$ ({form}.*)$", text, re.MULTILINE)
    return command


@pytest.mark.parametrize("file", [TORCHRUN, SRUN, SINGLE_NODE])
def test_processes_and_nodes_are_those_that_slurm_gave(cluster, file, unbroken):
    """Rank 0 is on the first node, and each process has the local rank of a GPU of its node."""
    (cluster.project / "snapshot.pt").unlink(missing_ok=True)
    job = cluster.submit_typed(typed(f"sbatch slurm/{file} "), SIZES[file, "whole"])
    state, status, log = cluster.finish(job)
    assert (state, status) == ("COMPLETED", 0), log
    nodes = 1 if file == SINGLE_NODE else 2
    places = [(str(local), f"node{node}") for node in range(1, nodes + 1) for local in range(2)]
    expected = [(str(rank), str(2 * nodes), *place) for rank, place in enumerate(places)]
    assert sorted(started(log)) == expected
    assert_same(cluster.project / "snapshot.pt", unbroken(2 * nodes, 50))


@pytest.mark.parametrize(
    ("file", "size", "command"),
    [
        (TORCHRUN, "small", "scontrol requeue {job}"),
        # What Slurm sends when the time is nearly up, see --signal.
        (SRUN, "small", "scancel --batch --signal=USR1 {job}"),
        (SINGLE_NODE, "whole", "scancel --batch --signal=USR1 {job}"),
    ],
    ids=[TORCHRUN, SRUN, SINGLE_NODE],
)
def test_a_requeued_job_goes_on_where_it_was(cluster, file, size, command, unbroken):
    """It ends with the bits of an unbroken run, and its log has both parts."""
    path = f"{file}-requeued.pt"
    job = cluster.submit(file, 50, 5, "--snapshot_path", path, options=SIZES[file, size])
    cluster.wait_for_log(job, "Epoch 9 | Training snapshot saved")
    cluster.command(*command.format(job=job).split())
    cluster.wait_for(lambda: cluster.state(job)[0] == "PENDING")
    assert cluster.job_processes() == []
    state, status, log = cluster.finish(job, 90)
    assert (state, status) == ("COMPLETED", 0), log
    (resumed,) = re.findall(r"Resuming training from snapshot at Epoch (\d+)\n", log)
    assert 10 <= int(resumed) < 50 and "] Epoch 0 |" in log
    assert_same(cluster.project / path, unbroken(2, 50))


@pytest.mark.parametrize("file", [TORCHRUN, SRUN])
def test_a_requeued_run_of_train_llm_has_lost_no_step(cluster, local, file):
    """It saves when Slurm takes it away, and goes on from that step."""
    options = ["--model-name", local / "gpt2", "--dataset-name", local / "text.txt"]
    options += ["--experiment-name", file, "--log-freq", 1, "--num-epochs", 12]
    job = cluster.submit(file, *options, options=SIZES[file, "small"], SCRIPT="train_llm.py")
    cluster.wait_for_log(job, "Step 3/")
    cluster.command("scancel", "--batch", "--signal=USR1", str(job))
    cluster.wait_for(lambda: cluster.state(job)[0] == "PENDING")
    assert cluster.job_processes() == []
    state, status, log = cluster.finish(job, 90)
    assert (state, status) == ("COMPLETED", 0), log
    (saved,) = re.findall(r"SIGTERM: saved at step (\d+), leaving\n", log)
    assert f"Resuming training from snapshot at Step {saved}\n" in log
    assert log.count(f"\nStep {int(saved) + 1}/") == 1


@pytest.mark.parametrize("file", [TORCHRUN, SRUN, SINGLE_NODE])
def test_scancel_leaves_no_process(cluster, file):
    options = SIZES[file, "whole"]
    job = cluster.submit(file, 10**6, 10**6, "--snapshot_path", "x.pt", options=options)
    cluster.wait_for_log(job, "] Epoch 0 |")
    assert cluster.job_processes()
    cluster.command("scancel", str(job))
    state, _, log = cluster.finish(job, 30)
    assert state == "CANCELLED", log
    assert cluster.job_processes() == []


@pytest.mark.parametrize("file", [TORCHRUN, SRUN])
def test_a_wrong_argument_fails_the_job_with_our_line(cluster, file):
    job = cluster.submit(file, 0, 10, options=SIZES[file, "small"])
    state, status, log = cluster.finish(job, 40)
    assert state == "FAILED" and status == (2 if file == SRUN else 1), log
    line = "ERROR: total_epochs: give a whole number from 1 to 2147483647, not '0'\n"
    assert log.count(line) == 2, log  # each node says it once
    assert cluster.job_processes() == []


def test_a_node_knows_how_many_processes_it_has(cluster):
    """Three tasks are two on one node and one on the other, whatever was asked for."""
    line = "import os; print(*(os.environ[n] for n in ('SLURM_NODEID', 'LOCAL_WORLD_SIZE')))"
    (cluster.project / "sizes.py").write_text(line)
    options = ("--ntasks=3", "--ntasks-per-node=2", "--cpus-per-task=1")
    job = cluster.submit(SRUN, options=options, SCRIPT="sizes.py")
    state, _, log = cluster.finish(job)
    sizes = sorted(re.findall(r"^\d \d$", log, re.MULTILINE))  # srun may warn besides
    assert state == "COMPLETED" and sizes == ["0 2", "0 2", "1 1"], log


FAILS_ONCE = """
from pathlib import Path
import torch.distributed as dist
dist.init_process_group("gloo")
print("attempt of rank", dist.get_rank())
if dist.get_rank() == 0 and not Path("failed").exists():
    Path("failed").touch()
    raise RuntimeError("the first attempt")
dist.barrier()
dist.destroy_process_group()
"""


def test_torchrun_restarts_the_processes_if_it_may(cluster):
    """The variables are those that docs/clusters.md has one write into the block."""
    text = (launch.ROOT / "docs" / "clusters.md").read_text()
    (export,) = re.findall(r"`export (PET_MAX_RESTARTS=[^`]*)`", text)
    variables = dict(word.split("=") for word in export.split())
    (cluster.project / "fails_once.py").write_text(FAILS_ONCE)
    options = SIZES[TORCHRUN, "small"]
    job = cluster.submit(TORCHRUN, options=options, SCRIPT="fails_once.py", **variables)
    state, status, log = cluster.finish(job, 90)
    assert (state, status) == ("COMPLETED", 0) and "the first attempt" in log, log
    assert all(log.count(f"attempt of rank {rank}") == 2 for rank in (0, 1)), log


@pytest.mark.parametrize("slow", ["node1", "node2"])
def test_the_status_is_the_scripts_though_a_node_is_slow(cluster, slow):
    """All ranks end with 2; srun must not end one before, whose status would then be 143."""
    text = (cluster.project / "multinode.py").read_text()
    old = "    plumbing.all_exit_if_args_bad(args)"
    wait = f"time.sleep(os.environ['SLURMD_NODENAME'] == '{slow}')"
    new = f"    import time, atexit\n    atexit.register(lambda: {wait})\n"
    assert text.count(old) == 1
    (cluster.project / "slow.py").write_text(text.replace(old, new + old))
    job = cluster.submit(SRUN, 0, 1, options=SIZES[SRUN, "small"], SCRIPT="slow.py")
    state, status, log = cluster.finish(job, 40)
    assert (state, status) == ("FAILED", 2), log


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (
            f"salloc -N2 --ntasks-per-node=1 bash slurm/{TORCHRUN} 2 1",
            f"type sbatch slurm/{TORCHRUN}",
        ),
        (f"salloc -N2 --ntasks-per-node=1 bash slurm/{SRUN} 2 1", f"type sbatch slurm/{SRUN}"),
        (f"bash slurm/{SINGLE_NODE} 2 1", f"type sbatch slurm/{SINGLE_NODE}"),
    ],
)
def test_a_file_that_slurm_has_not_started_says_so(cluster, command, line):
    output = cluster.command("bash", "-c", f"timeout -k 1 25 {command}; echo status $?")
    errors = [each for each in output.splitlines() if each.startswith("ERROR: ")]
    assert len(errors) == 1 and errors[0].endswith(line), output
    assert "status 2" in output and "Rank:" not in output, output


@pytest.mark.parametrize("file", [TORCHRUN, SINGLE_NODE])
def test_two_torchruns_on_a_node_are_refused(cluster, file):
    options = ("--ntasks-per-node=2", "--gpus-per-node=2", "--cpus-per-task=1")
    state, status, log = cluster.finish(cluster.submit(file, 2, 1, options=options))
    assert (state, status) == ("FAILED", 2) and log.count("\n") == 1, log
    assert " tasks" in log and "one torchrun is wanted" in log, log


@pytest.mark.parametrize("start", ["srun python", "srun torchrun --standalone"])
def test_the_check_never_says_ok_of_one_node_alone(cluster, start):
    """In an allocation of two nodes, started without the file that joins them."""
    begin = time.monotonic()
    command = f"salloc -N2 --ntasks-per-node=1 {start} check_cluster.py"
    output = cluster.command("bash", "-c", f"source .venv/bin/activate; timeout 25 {command}")
    assert time.monotonic() - begin < 20
    errors = re.findall("^ERROR: SLURM_STEP_NUM_TASKS=2, but (.*)", output, re.MULTILINE)
    assert len(errors) == 2 and "OK" not in output, output  # each node says it once
    cure = "start slurm/multinode_srun.sbatch" if "python" in start else "docs/clusters.md"
    assert all(cure in error for error in errors)


def array(cluster, file, *args):
    options = ("--array=0-1", "--gpus-per-node=1", "--cpus-per-task=1", "--output=array-%a.log")
    logs = [cluster.project / f"array-{number}.log" for number in (0, 1)]
    for log in logs:
        log.unlink(missing_ok=True)  # they are appended to
    cluster.submit(file, *args, options=options)
    return logs


def test_the_tasks_of_an_array_have_a_snapshot_each(cluster):
    """With the line of the file that the page speaks of."""
    for path in cluster.project.glob("snapshot-*"):
        path.unlink()
    text = (cluster.project / "slurm" / SINGLE_NODE).read_text()
    assert text.count("# set -- ") == 1
    (cluster.project / "slurm" / "array.sbatch").write_text(text.replace("# set -- ", "set -- "))
    logs = array(cluster, "array.sbatch", 5, 5)
    cluster.wait_for(lambda: not cluster.command("squeue", "--noheader").strip(), 60)
    for number, log in enumerate(logs):
        assert f"snapshot saved at snapshot-{number}.pt" in log.read_text(), log.read_text()
        assert launch.snapshot(cluster.project / f"snapshot-{number}.pt")["seed"] == number


def test_the_second_task_of_an_array_with_one_snapshot_is_refused(cluster):
    """The first trains on."""
    (cluster.project / "snapshot.pt").unlink(missing_ok=True)
    logs = array(cluster, SINGLE_NODE, 10**6, 10**6)

    def texts():
        return [log.read_text() for log in logs if log.exists()]

    def trained():
        return re.findall(r"\] Epoch (\d+) \|", "".join(texts()))

    cluster.wait_for(lambda: "ERROR: a different job uses " in "".join(texts()), 60, texts)
    epochs_at_refusal = len(trained())
    cluster.wait_for(lambda: len(trained()) > epochs_at_refusal + 1, 60, texts)
    cluster.command("scancel", "--user=root")
    cluster.wait_for(lambda: not cluster.command("squeue", "--noheader").strip(), 60)
    refused, other = sorted(texts(), key=lambda text: "a different job" not in text)
    assert re.search(r"ERROR: a different job uses /.*/snapshot.pt \(process \d+ of node", refused)
    assert "] Epoch 0 |" not in refused and "] Epoch 0 |" in other


IPV6_ONLY = {"ipv4": False}
LOOPBACK = "127.0.1.1 node1\n10.77.0.1 login\n10.77.0.3 node2"
SEVERAL = "10.99.0.2 node1\n10.77.0.2 node1\nfd77::2 node1\n10.77.0.1 login\n10.77.0.3 node2"


@pytest.mark.parametrize(
    ("options", "hosts_of_node1", "env"),
    [
        (IPV6_ONLY, None, {}),
        ({}, LOOPBACK, {"GLOO_SOCKET_IFNAME": "eth0"}),
        ({}, SEVERAL, {"GLOO_SOCKET_IFNAME": "eth0"}),
    ],
    ids=["IPv6 only", "its own name is loopback", "several addresses"],
)
def test_the_head_node_is_found(tmp_path_factory, options, hosts_of_node1, env):
    """Whatever the first node says of its own name."""
    short = tmp_path_factory.mktemp("c")  # Slurm's sockets lie in it: paths of 107 bytes at most
    with Cluster(short / "cluster", **options) as cluster:
        if hosts_of_node1:
            cluster.nodes[0].sh("ip address add 10.99.0.2/24 dev lo")
            cluster.nodes[0].know(hosts_of_node1)
        jobs = [
            cluster.submit(file, 2, 2, "--snapshot_path", file, options=SIZES[file, "small"], **env)
            for file in (TORCHRUN, SRUN)
        ]
        for job in jobs:
            state, status, log = cluster.finish(job)
            assert (state, status) == ("COMPLETED", 0), log
            assert {line[1] for line in started(log)} == {"2"}


def test_check_cluster_before_the_job(cluster):
    """By the job's own file."""
    command = typed("SCRIPT=check_cluster.py sbatch ")
    state, status, log = cluster.finish(cluster.submit_typed(command, SIZES[TORCHRUN, "whole"]))
    assert (state, status) == ("COMPLETED", 0), log
    assert [row["host"] for row in table(log)] == ["node1", "node1", "node2", "node2"]


def test_each_process_is_bound_to_a_core_of_its_own(cluster):
    options = SIZES[SRUN, "whole"]
    job = cluster.submit(SRUN, "--max_mib=1", options=options, SCRIPT="check_cluster.py")
    state, status, log = cluster.finish(job)
    assert (state, status) == ("COMPLETED", 0), log
    assert [row["CPUs"] for row in table(log)] == ["0", "1", "0", "1"]


def test_a_process_sees_all_gpus_of_its_node(cluster):
    """LOCAL_RANK picks one of them. And the environment arrives, whatever the site's default."""
    (cluster.project / "show.py").write_text(
        "import os\nprint(os.environ['LOCAL_RANK'], os.environ['CUDA_VISIBLE_DEVICES'])\n"
    )
    options = (*SIZES[SRUN, "whole"], "--export=SCRIPT=show.py,SLURM_CONF,PATH")
    state, status, log = cluster.finish(cluster.submit(SRUN, options=options))
    assert (state, status) == ("COMPLETED", 0), log
    assert sorted(log.splitlines()) == ["0 0,1", "0 0,1", "1 0,1", "1 0,1"]


@pytest.mark.parametrize("name", ["batch_file", "srun"])
def test_exercises_are_checked_on_the_real_nodes(cluster, name):
    """The solutions of the workshop, with as many cores as these nodes have."""
    exercise = exercises.find(name)
    path = cluster.project / exercises.file_of(exercise).relative_to(launch.ROOT)
    path.parent.mkdir(exist_ok=True)
    cores = re.sub("cpus-per-task=16", "cpus-per-task=2", exercise.solution())
    path.write_text(cores)
    output = cluster.command(sys.executable, "-m", "exercises", name, OMP_NUM_THREADS="1")
    assert "Solved." in output, output
    jobs = cluster.command("scontrol", "--oneliner", "show", "jobs")
    ran = "compare" if name == "batch_file" else "python"
    assert re.search(rf"JobName={ran}.* JobState=(?:COMPLETED|CANCELLED|COMPLETING)", jobs), jobs
