"""What a stranger could make of a job: files that come from elsewhere, ports, and what is told."""

import json
import os
import pickle
import re
import shutil
import socket
from pathlib import Path

import launch
import pytest
import torch
from hosts import Network, needs_namespaces
from launch import LLM, MULTI, MULTINODE, SINGLE, TORCHRUN_SCRIPT

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


class RunsCode:
    """Unpickled, it makes a file of the name `ran`."""

    def __reduce__(self):
        return os.mkdir, (f"{os.getcwd()}/ran",)


def test_what_it_unpickles_would_run(tmp_path):
    """The means of the tests below is one that works."""
    pickle.loads(pickle.dumps(RunsCode()))
    assert Path("ran").exists()


def llm(local, *options):
    data = ("--dataset-name", local / "text.txt", "--model-name", local / "gpt2")
    return launch.python(LLM, *data, "--batch-size", 4, "--max-steps", 2, *options)


def test_no_code_in_a_snapshot_of_train_llm_runs(local, tmp_path):
    """A snapshot with code in it is not used, and told in one line. (For the ladder's see
    test_bad_input.py.)"""
    launch.run(llm(local))
    (path,) = Path("outputs/default/snapshots").glob("*.pt")
    for content in ({**torch.load(path, weights_only=True), "name": RunsCode()}, RunsCode()):
        torch.save(content, path)
        output = launch.run(llm(local), status=2)
        assert re.search(f"^ERROR: {path} cannot be used: Weights only", output, re.M), output
    assert not Path("ran").exists()


def test_no_code_in_a_cache_of_tokens_runs(local, tmp_path):
    """What lies in its place is taken for numbers, or made again."""
    launch.run(llm(local))
    (folder,) = Path("outputs").glob("tokens-*")
    shutil.rmtree("outputs/default")
    code = pickle.dumps(RunsCode())
    (folder / "tokens.json").write_bytes(code)
    assert "Tokenised" in launch.run(llm(local)), "it was made again"
    size = (folder / "tokens.bin").stat().st_size
    (folder / "tokens.bin").write_bytes((code * size)[:size])
    shutil.rmtree("outputs/default")
    output = launch.finish(launch.start(llm(local)))[1]
    assert "Tokenised" not in output and "Data: " in output, "it was read as numbers"
    assert not Path("ran").exists()


def test_no_code_in_a_model_runs(local, tmp_path):
    """Neither in pickled weights nor in a file of Python that the configuration names."""
    shutil.copytree(local / "gpt2", "pickled")
    Path("pickled/model.safetensors").unlink()
    torch.save(RunsCode(), "pickled/pytorch_model.bin")
    shutil.copytree(local / "gpt2", "python")
    config = json.loads(Path("python/config.json").read_text())
    config |= {"auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    config["model_type"] = "own"
    Path("python/config.json").write_text(json.dumps(config))
    Path("python/own.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\n")
    for name in "pickled", "python":
        options = ("--model-name", name, "--tokenizer-name", "bytes", "--init", "pretrained")
        output = launch.run(llm(local, *options), status=2, **OFFLINE)
        assert re.search(f"^ERROR: model-name {name}: ", output, re.MULTILINE), output
    assert not Path("ran").exists()


def listening(host, owners):
    """The addresses at which processes in `owners` listen on `host`, without ports."""
    inodes = set()
    for pid in owners:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes.update(re.findall(r"socket:\[(\d+)\]", os.readlink(fd)))
            except OSError:  # closed meanwhile
                continue
    found = set()
    for name in "tcp", "tcp6":
        for line in Path(f"/proc/{host.holder.pid}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.add(fields[1].partition(":")[0])
    return found


LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


@needs_namespaces
@pytest.mark.parametrize(
    "command",
    [
        launch.python(MULTI, 100000),
        launch.torchrun(TORCHRUN_SCRIPT, 100000),
        launch.torchrun(MULTINODE, 100000),
        launch.torchrun(LLM, "--max-steps", 100000, "--log-freq", 1),
        launch.python(LLM, "--max-steps", 100000, "--log-freq", 1),
    ],
    ids=["multi", "torchrun", "multinode", "llm", "llm alone"],
)
def test_on_one_machine_no_other_can_reach_a_process(tmp_path, command):
    """All that a script opens is on the loopback interface, on a machine that has another.

    torchrun's own store listens everywhere: this is PyTorch's, and told in docs/reliability.md.
    """
    with Network(tmp_path / "network", ("alpha",)) as network:
        (host,) = network.hosts
        job = host.start(command)
        launch.wait_for(job, lambda output: re.search("Epoch 1 |Step 1/", output))
        processes = set(host.processes())
        if "torch.distributed.run" in command:
            processes.remove(job.pid)
        found = listening(host, processes)
        assert found and found <= LOOPBACK, found
        if "torch.distributed.run" in command:
            assert not listening(host, {job.pid}) <= LOOPBACK, "then the text can say so"


def test_nothing_is_written_outside_of_the_folder(local, tmp_path):
    """No file stays among the temporary ones. In the user's cache, two libraries keep what they
    know of fonts and of data sets, and no script writes anything."""
    for name in "home", "temporary", "work":
        (tmp_path / name).mkdir()
    env = {"HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "temporary")}
    env |= {name: str(tmp_path / "home" / name) for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME")}
    env |= {"PYTHONDONTWRITEBYTECODE": "1", **OFFLINE}
    rows = ("--dataset-name", local / "imdb.jsonl")
    commands = [
        launch.python(SINGLE, 1, 1),
        launch.python(MULTI, 1, 1),
        launch.torchrun(MULTINODE, 1, 1),
        [*llm(local), "--save-dir", "out"],
        [*map(str, (*llm(local), "--save-dir", "out", "--experiment-name", "rows", *rows))],
    ]
    before = {path for path in tmp_path.rglob("*")} | {tmp_path / "work"}
    for command in commands:
        job = launch.start(command, "work", **env)
        assert launch.finish(job)[0] == 0, job.log.read_text()
    new = {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()}
    new -= {path.relative_to(tmp_path) for path in before}
    outside = {str(path) for path in new if not f"{path}".startswith(("work/out/", "work/output-"))}
    caches = "home/XDG_CACHE_HOME/matplotlib/", "home/XDG_CACHE_HOME/huggingface/"
    outside = {path for path in outside if not path.startswith(caches)}
    assert outside == {"work/checkpoint.pt", "work/snapshot.pt"}


@pytest.mark.parametrize("command", ["ladder", "llm"])
def test_wandb_gets_no_secret_of_the_environment(local, tmp_path, command):
    """Nothing of what wandb has written, and would send, holds the value of a variable."""
    secret = {"AWS_SECRET_ACCESS_KEY": "correct-horse", "HF_TOKEN": "battery-staple"}
    quiet = {"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}
    if command == "ladder":
        launch.run(launch.torchrun(MULTINODE, 1, "--wandb", "offline"), **secret, **quiet)
    else:
        launch.run(llm(local, "--wandb", "offline"), **secret, **quiet, **OFFLINE)
    files = [path for path in tmp_path.rglob("*") if path.is_file() and "wandb" in str(path)]
    sent = [path.read_bytes() for path in files if path.suffix == ".wandb"]
    assert sent and all(socket.gethostname().encode() in text for text in sent), "it can be read"
    for path in files:
        for value in secret.values():
            assert value.encode() not in path.read_bytes(), path
