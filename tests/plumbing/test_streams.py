"""Stdout may be anything: a file, a notebook's, a Tee, a pipe that nobody reads."""

import contextlib
import io
import os
import sys

import launch
import pytest
from launch import in_processes

from plumbing import streams

TEE = """
import sys
class Tee:
    def __init__(self, *files): self.files = files
    def write(self, text):
        for file in self.files: file.write(text)
    def flush(self):
        for file in self.files: file.flush()
sys.stdout = Tee(sys.stdout, open("my.log", "w"))
import single_gpu
single_gpu.main(single_gpu.parse_args())
"""


class Notebook(io.TextIOBase):
    """As that of ipykernel: a text stream without a buffer of bytes."""

    def __init__(self):
        self.lines = []

    def write(self, text):
        self.lines.append(text)
        return len(text)


def test_a_tee_gets_what_is_printed(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(launch.ROOT))
    (tmp_path / "driver.py").write_text(TEE)
    status, output = launch.finish(launch.start(launch.forked("driver.py", 1)))
    assert status == 0 and "[rank 0] Epoch 0 |" in output
    assert (tmp_path / "my.log").read_text() == output


@pytest.mark.parametrize("stream", [io.StringIO, Notebook])
def test_a_stream_that_is_no_file_stays_unchanged(stream):
    with contextlib.redirect_stdout(stream()) as replaced:
        streams.print_whole_lines()
        print("a line")
        assert sys.stdout is replaced
    lines = replaced.getvalue() if stream is io.StringIO else "".join(replaced.lines)
    assert lines == "a line\n"


def printing(rank, init_method, folder):
    """A letter that the encoding lacks, and a pipe that nobody reads any more."""
    with open(folder / "ascii.txt", "w", encoding="ascii") as file:
        with contextlib.redirect_stdout(file):
            streams.print_whole_lines()
            print("più")
    reader, writer = os.pipe()
    os.close(reader)
    sys.stderr = open(writer, "w")
    streams.print_whole_lines()
    print("nobody reads this", file=sys.stderr)
    sys.stderr.flush()


def test_no_print_fails(tmp_path):
    in_processes(1, printing, tmp_path)
    assert (tmp_path / "ascii.txt").read_text() == "pi\\xf9\n"
