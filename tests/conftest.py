import json
from functools import cache

import launch
import pytest
import torch
import torch.distributed as dist

LEFT_OUT = pytest.StashKey[int]()


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="run the tests marked `long` as well")


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(config, items):
    long = [item for item in items if item.get_closest_marker("long")]
    if long and not config.getoption("--all"):
        config.hook.pytest_deselected(items=long)
        config.stash[LEFT_OUT] = len(long)
        items[:] = [item for item in items if not item.get_closest_marker("long")]


def pytest_report_collectionfinish(config):
    if left_out := config.stash.get(LEFT_OUT, 0):
        return f"long tests left out: {left_out} (--all runs them, too)"


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
