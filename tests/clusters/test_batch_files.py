"""The batch files with a stand-in for the programs of Slurm: which addresses they refuse."""

import os
import subprocess

import pytest
from launch import ROOT

FILES = ("multinode_torchrun.sbatch", "multinode_srun.sbatch")
SCONTROL = """#!/bin/bash
case "$1 $2" in
"show hostnames") echo node1; echo node2 ;;
"show node") echo "   NodeAddr=$ADDRESS NodeHostName=$3 Version=22.05" ;;
esac
"""


@pytest.fixture
def submitted(tmp_path):
    """`submitted(file, address, nodes)` is the finished process of that batch file."""
    programs = {"bin/scontrol": SCONTROL, "bin/srun": "#!/bin/bash\necho started\n"}
    for name, text in (programs | {".venv/bin/activate": ""}).items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def submitted(file, address, nodes=2):
        slurm = {"SLURMD_NODENAME": "node1", "SLURM_JOB_NODELIST": "node[1-2]", "ADDRESS": address}
        slurm |= {"SLURM_JOB_NUM_NODES": str(nodes), "SLURM_JOB_ID": "7", "SLURM_NNODES": "2"}
        env = os.environ | slurm | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
        env.pop("SLURM_NTASKS", None)
        command = ["bash", str(ROOT / "slurm" / file), "2", "1"]
        return subprocess.run(
            command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=30
        )

    return submitted


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("address", ["node1", "10.0.0.11", "fd00::1", "node1.site.example"])
def test_an_address_that_others_reach_is_taken(submitted, file, address):
    done = submitted(file, address)
    assert (done.returncode, done.stdout, done.stderr) == (0, "started\n", "")


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize(
    "address", ["127.0.1.1", "127.0.0.1", "::1", "localhost", "10.0.0.11,fd00::1", "10.0.0.11;x"]
)
def test_an_address_that_others_do_not_reach_is_refused(submitted, file, address):
    done = submitted(file, address)
    assert (done.returncode, done.stdout) == (2, "")
    begin = f"ERROR: Slurm has '{address}' as the address of node1, and other nodes cannot connect"
    assert done.stderr.startswith(begin) and done.stderr.count("\n") == 1


@pytest.mark.parametrize("file", FILES)
def test_one_node_needs_no_address_for_others(submitted, file):
    assert submitted(file, "127.0.1.1", nodes=1).stdout == "started\n"
