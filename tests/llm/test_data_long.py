"""llm/data.py: memory, with a large file."""

import sys

import launch
import pytest

pytestmark = pytest.mark.usefixtures("alone")


TOKENISE = """
import resource, sys
import torch.distributed as dist
from argparse import Namespace
from llm.data import all_load_datasets
from llm.model import load_tokenizer

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
options = {"dataset_subset": None, "text_column": None, "save_dir": "outputs", "timeout": 600}
args = Namespace(dataset_name=sys.argv[1], seq_length=8, batch_size=4, **options)
all_load_datasets(args, load_tokenizer("bytes"))
print("MiB:", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


def test_memory_does_not_grow_with_the_file(tmp_path, monkeypatch):
    """A file that is four times as long needs no more memory, but for what the allocator keeps."""
    monkeypatch.setenv("PYTHONPATH", str(launch.ROOT))
    used = []
    for count in (12, 48):
        with open("text.txt", "w") as file:
            file.writelines(["a line of a text\n" * (10**6 // 17)] * count)
        output = launch.run([sys.executable, "-c", TOKENISE, "text.txt"])
        used.append(int(output.split("MiB:")[1]))
    assert used[1] < 1.3 * used[0], used
