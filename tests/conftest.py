import fcntl
import json
import os
import zlib
from datetime import date
from functools import cache
from pathlib import Path

import launch
import pytest
import torch
import torch.distributed as dist

TIERS = "long", "nightly"  # the ends of the names of files; all other tests are quick
HERE = Path(__file__).parent

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the threads of several processes would wait for one another's cores


def pytest_addoption(parser):
    every = "run the quick and the long tests and a tenth of the nightly ones"
    parser.addoption("--all", action="store_true", help=every)
    parser.addoption("--nightly", action="store_true", help="run all tests of all tiers")
    seed = "any text: it decides which tenth of the nightly tests --all runs (the date)"
    parser.addoption("--seed", default=str(date.today()), help=seed)


def pytest_xdist_auto_num_workers(config):
    """As many as there are cores: a test waits half of its time, and else has two processes."""
    return max(2, min(len(os.sched_getaffinity(0)), 8))


def pytest_itemcollected(item):
    """Mark each test with its tier, for -m."""
    tier = item.path.stem.rpartition("_")[2]
    if tier in TIERS:
        item.add_marker(tier)


def wanted(item):
    """Return whether the options ask for a test of this tier."""
    option = item.config.getoption
    if item.get_closest_marker("nightly"):
        drawn = zlib.crc32(f"{option('seed')} {item.nodeid}".encode()) % 10 == 0
        return option("nightly") or (option("all") and drawn)
    return option("nightly") or option("all") or not item.get_closest_marker("long")


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(config, items):
    left_out = [item for item in items if not wanted(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = filter(wanted, items)


def pytest_report_header(config):
    if config.option.nightly:
        return "tiers: quick, long and nightly"
    if config.option.all:
        return f"tiers: quick, long and a tenth of nightly (--seed {config.option.seed})"
    return "tiers: quick (--all adds long and a tenth of nightly, --nightly everything)"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """A test marked `exclusive` measures time: while it runs, no other does, in any process.

    The two files serve as locks, which all processes of this checkout know."""
    exclusive = item.get_closest_marker("exclusive")
    with open(HERE / "launch.py") as turnstile, open(__file__) as running:
        fcntl.flock(turnstile, fcntl.LOCK_EX)  # so that one that waits to be exclusive is next
        fcntl.flock(running, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        fcntl.flock(turnstile, fcntl.LOCK_UN)
        return (yield)


@pytest.fixture(autouse=True)
def on_the_cpu_in_an_empty_folder(request, monkeypatch, tmp_path):
    """Every test starts in a folder of its own and, unless it is marked `gpu`, sees no GPU."""
    marker = request.node.get_closest_marker("gpu")
    if marker is None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    elif torch.cuda.device_count() < marker.args[0]:
        pytest.skip(f"needs {marker.args[0]} GPUs, this machine has {torch.cuda.device_count()}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")  # a script that runs in this process may set it
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory):
    """`unbroken(nproc, epochs)` is the snapshot that multinode.py leaves on one machine."""

    @cache
    def unbroken(nproc, epochs):
        folder = tmp_path_factory.mktemp(f"unbroken-{nproc}-{epochs}")
        command = launch.torchrun(launch.MULTINODE, epochs, epochs, nproc=nproc)
        launch.run(command, cwd=folder, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
        return folder / "snapshot.pt"

    return unbroken


@pytest.fixture
def alone(monkeypatch):
    """A job of this process alone."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def local(tmp_path_factory):
    """A folder with two tiny models and three data sets, as the hub's in kind."""
    import pyarrow
    import pyarrow.parquet
    from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoConfig

    from llm.model import load_tokenizer

    folder = tmp_path_factory.mktemp("local")
    tokenizer = load_tokenizer("bytes")
    sizes = {"vocab_size": 257, "bos_token_id": 256, "eos_token_id": 256}
    gpt2 = GPT2Config(n_layer=2, n_embd=32, n_head=2, n_positions=32, **sizes)
    types = [[["global", "local"], 1]]
    neo = {"num_layers": 2, "hidden_size": 32, "num_heads": 2, "window_size": 8}
    neo = GPTNeoConfig(**neo, max_position_embeddings=32, attention_types=types, **sizes)
    for name, config in (("gpt2", gpt2), ("gpt-neo", neo)):
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    texts = [
        f"the quick brown fox jumps over the lazy dog, and {number} more of them follow it. " * 3
        for number in range(40)
    ]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), folder / "openwebtext.parquet")
    rows = [json.dumps({"text": text, "label": number % 2}) for number, text in enumerate(texts)]
    (folder / "imdb.jsonl").write_text("\n".join(rows))
    (folder / "text.txt").write_text("".join(texts))
    return folder
