"""One reader for the rows of a file: JSON, CSV, TSV, parquet or arrow, packed or not.

`READERS` has a function for each kind, of a file and a column. It yields rows as dicts, all columns
if the column is None, and holds only a part of the file in memory (of one JSON array, all). An
error names the row or the line.
"""

import bz2
import csv
import gzip
import json
import lzma
import re
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


def kind_of(file: Path) -> str:
    """A kind that READERS has, or "plain text"."""
    name = Path(file.name.lower())
    suffix = Path(name.stem).suffix if name.suffix in PACKED else name.suffix
    return KINDS.get(suffix, "plain text")


@contextmanager
def naming(source):
    """Begin the message of every error with the file, or whatever it comes from."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{source}: {error or type(error).__name__}") from error


def read_json(file: Path, column: str | None):
    """Yield the rows of JSON lines, one by one, or those of one JSON array, all in memory.

    A row that is only a string is the text itself.
    """
    for number, row in enumerate(parse_json(file), 1):
        if not isinstance(row, dict | str):
            raise ValueError(f"row {number} is of type {type(row).__name__}, not an object")
        yield {"text": row} if isinstance(row, str) else row


def parse_json(file: Path):
    """Yield the value in each line, or all there are in the one value of the file."""
    is_lines = False
    with open_file(file, "rt", encoding="utf-8-sig", newline="\n") as lines:
        for number, line in enumerate(lines, 1):
            if line.isspace():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                if is_lines:
                    raise ValueError(f"line {number}, letter {error.colno}: {error.msg}") from None
                break
            is_lines = is_lines or not isinstance(row, list)
            if not is_lines:
                break
            yield row
        else:
            return
    with open_file(file, "rt", encoding="utf-8-sig") as stream:
        rows = json.load(stream)
    yield from rows if isinstance(rows, list) else [rows]


def read_csv(file: Path, column: str | None):
    """Yield the rows of a table whose first line names the columns."""
    csv.field_size_limit(2**31 - 1)  # a text may be long
    with open_file(file, "rt", encoding="utf-8-sig", newline="") as lines:
        yield from named(csv.reader(lines, strict=True))


def read_tsv(file: Path, column: str | None):
    """Yield the rows of a table with tabs. Each line is a row, and a quote is a letter.

    One kind of field is different: spreadsheets and pandas put a field that contains quotes into
    quotes and double the inner ones. It is read as they mean it.
    """
    with open_file(file, "rt", encoding="utf-8-sig", newline="\n") as lines:
        rows = (line.rstrip("\r\n").split("\t") for line in lines if line.strip("\r\n"))
        yield from named([unquoted(field) for field in row] for row in rows)


def unquoted(field: str) -> str:
    if re.fullmatch(r'"(?:[^"]|"")*""(?:[^"]|"")*"', field):
        return field[1:-1].replace('""', '"')
    return field


def named(rows):
    """Yield dicts: the first of `rows` names the columns, and the others are as long."""
    names = next(rows, [])
    for number, row in enumerate(filter(None, rows), 1):  # csv reads an empty line as an empty list
        if len(row) != len(names):
            raise ValueError(f"row {number} has {len(row)} fields, and the first line {len(names)}")
        yield dict(zip(names, row, strict=True))


def read_parquet(file: Path, column: str | None):
    import pyarrow.parquet

    options = {"pre_buffer": False, "buffer_size": 2**20}  # or a whole column is in memory
    with pyarrow.parquet.ParquetFile(file, **options) as table:
        for batch in table.iter_batches(100, columns=None if column is None else [column]):
            yield from batch.to_pylist()


def read_arrow(file: Path, column: str | None):
    """Yield the rows of a file that the hub's library, or pyarrow, saved."""
    import pyarrow

    with pyarrow.memory_map(str(file)) as source:
        if source.read(6) == b"ARROW1":  # a file with an index, or else a stream
            table = pyarrow.ipc.open_file(source)
            batches = map(table.get_batch, range(table.num_record_batches))
        else:
            source.seek(0)
            batches = pyarrow.ipc.open_stream(source)
        for batch in batches:
            batch = batch.select([column]) if column in batch.schema.names else batch
            for start in range(0, len(batch), 100):
                yield from batch.slice(start, 100).to_pylist()


# In a folder the first kind that is there is read.
READERS = {"parquet": read_parquet, "arrow": read_arrow, "JSON": read_json}
READERS |= {"CSV": read_csv, "TSV": read_tsv}
KINDS = {".parquet": "parquet", ".arrow": "arrow", ".csv": "CSV", ".tsv": "TSV"}
KINDS |= dict.fromkeys((".json", ".jsonl", ".ndjson", ".jsonlines"), "JSON")
