"""Printing that cannot fail, and that keeps the lines of several processes apart."""

import io
import os
import sys
from contextlib import suppress


def open_closed_streams():
    """Give a process that was started with >&- or 2>&- a stdout and stderr that drop everything.

    Otherwise the next file that it opens, a snapshot perhaps, would be its stdout.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) < 3:  # it takes the lowest that is free
        os.set_inheritable(number, True)
    os.close(number)
    if sys.stdout is None:
        sys.stdout = open(1, "w")
    if sys.stderr is None:
        sys.stderr = open(2, "w")


def print_whole_lines():
    """Make each line that is printed one write, and drop the lines that nobody can take.

    Several processes share one terminal or file, and a line in two writes would be torn. And no
    training should end because the reader of a pipe has gone, the disk of a log is full, or an
    encoding lacks a letter. A stream that is no file, as in a notebook, stays unchanged.
    """
    for stream in sys.stdout, sys.stderr:
        if isinstance(stream, io.TextIOWrapper) and not hasattr(stream, "drops"):
            stream.drops = True  # not once more, if this is called twice
            stream.reconfigure(errors="backslashreplace", line_buffering=True, write_through=False)
            stream.write, stream.flush = or_drop(stream.write), or_drop(stream.flush)


def or_drop(call):
    def call_or_drop(*args):
        with suppress(OSError):
            return call(*args)

    return call_or_drop
