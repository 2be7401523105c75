"""Text files, packed or not, in UTF-8."""

import bz2
import gzip
import lzma
from contextlib import contextmanager
from pathlib import Path

PACKED = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}


@contextmanager
def open_file(file: Path, mode: str, **options):
    """Open a file, packed or not. What is not UTF-8 in it is an error that says where."""
    opener = PACKED.get(file.suffix.lower(), open)
    try:
        with opener(file, mode, **options) as stream:
            yield stream
    except UnicodeDecodeError:
        with opener(file, "rb") as lines:
            raise ValueError(find_undecodable(lines)) from None


def find_undecodable(lines) -> str:
    """Where the first byte is that is not UTF-8."""
    for number, line in enumerate(lines, 1):
        try:
            line.decode()
        except UnicodeDecodeError as error:
            byte = f"byte {error.start + 1} ({line[error.start]:#x})"
            return f"line {number}, {byte} is not UTF-8: convert the file, or it is not a text"
