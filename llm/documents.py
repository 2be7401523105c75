"""A name to documents: files, folders and datasets of the hub, each read as what it is.

A document is an iterable of strings, so that of a long one only a part has to be in memory. A plain
file is one document, and so is each row of anything else: the text in one of its columns.
"""

import itertools
import os
import re
from functools import partial
from pathlib import Path

from training.rows import READERS, kind_of, naming, open_file

# Names that the hub's library gives to a split that is not trained on, between such separators.
HELD_OUT = "test|testing|eval|evaluation|valid|validation|val|dev"
HELD_OUT = re.compile(rf"(?:^|[-._ 0-9])({HELD_OUT})(?:$|[-._ 0-9])", re.IGNORECASE)
# JSON that the hub's library keeps beside data.
ABOUT_DATA = ("config.json", "state.json", "dataset_dict.json", "dataset_info.json")
ABOUT_DATA += ("dataset_infos.json",)


class Documents:
    """The documents of a dataset; as a string, what they are made of."""

    def __init__(self, name: str, subset: str | None, column: str | None, files: list[Path]):
        self.files = files  # none: a dataset of the hub
        self.tables = open_tables(name, subset, files)
        self.column = choose_column(self.tables, column)
        self.without_text = 0  # rows that are no document

    def __iter__(self):
        if not self.tables:
            yield from map(read_text, self.files)
        for name, read_rows in self.tables:
            with naming(name):
                yield from self._read_column(read_rows)

    def __str__(self):
        skipped = f", {self.without_text:,} rows without a text" if self.without_text else ""
        split = "" if self.files else "split train, "
        return f"{split}column {self.column!r}{skipped}" if self.tables else "plain text"

    def _read_column(self, read_rows):
        number, columns = 0, set()
        for number, row in enumerate(read_rows(self.column), 1):
            columns.update(row)
            text = row.get(self.column)
            if problem := why_not_text(text):
                raise ValueError(f"row {number}: column {self.column!r} {problem}")
            if text is None:
                self.without_text += 1
            else:
                yield [text]
        if number and self.column not in columns:
            raise ValueError(f"no column {self.column!r}")


def choose_files(name: str, saved: Path) -> tuple[list[Path], str]:
    """The files of the dataset `name` (none: it is one of the hub), and a line about a folder's.

    A file that is named itself is read, whatever it is called. In a folder, splits called test or
    validation are left out, and so is what lies beside the best kind of file, and `saved`.
    """
    path = Path(name)
    if name == "stdlib":
        return sorted(Path(os.__file__).parent.glob("*.py")), ""
    if not path.is_dir():
        return [path] if path.exists() else [], ""
    files, left_out = find_files(path, saved)
    if any(file.name not in ABOUT_DATA for file in files):
        left_out |= {file: "about the data" for file in files if file.name in ABOUT_DATA}
    kinds = {kind_of(file) for file in files if file not in left_out}
    kind = next((kind for kind in READERS if kind in kinds), "plain text")
    for file in files:
        if kind_of(file) != kind:
            left_out.setdefault(file, f"beside {kind}")
        elif kind != "plain text" and file.stat().st_size == 0:
            left_out[file] = "empty"
    files = [file for file in files if file not in left_out]
    reasons = {}
    for file, reason in sorted(left_out.items()):
        reasons.setdefault(reason, []).append(str(file.relative_to(path)))
    parts = [f"{len(names):,} {reason} ({shorten(names)})" for reason, names in reasons.items()]
    others = f", left out: {', '.join(parts)}" if parts else ""
    if not files:
        raise ValueError(f"no file to read in that folder{others}. A file that you name is read")
    names = shorten([str(file.relative_to(path)) for file in files])
    return files, f"Files of {name}: {len(files):,} {kind} ({names}){others}"


def find_files(folder: Path, saved: Path) -> tuple[list[Path], dict[Path, str]]:
    """All files below `folder`, sorted, and why which files and folders there are left out."""

    def fail(error):
        raise error  # a folder that may not be read would be left out without a word

    files, left_out = [], {}
    saved, seen = os.path.realpath(saved), {os.path.realpath(folder)}
    for place, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        real_place = os.path.realpath(place)
        splits = set(folders) - {"train"} if "dataset_dict.json" in names else set()
        for name in sorted(folders) + sorted(names):
            path = Path(place, name)
            real = os.path.realpath(path) if path.is_symlink() else os.path.join(real_place, name)
            if name in splits:
                left_out[path] = f"of split {name}"
            elif real == saved:
                left_out[path] = "of --save-dir"
            elif real in seen:  # or a link to a folder around it would lead in circles
                left_out[path] = "linked twice"
            elif reason := why_left_out(path):
                left_out[path] = reason
            else:
                seen.add(real)
                files += [] if path.is_dir() else [path]
        folders[:] = [name for name in sorted(folders) if Path(place, name) not in left_out]
    return sorted(files), left_out


def why_left_out(path: Path) -> str | None:
    """Why nobody who names a folder around `path` means it, or None."""
    if path.name.startswith(".") or path.name == "__pycache__":
        return "hidden"
    if split := HELD_OUT.search(path.name):
        return f"of split {split[1].lower()}"
    if re.fullmatch(r"cache-.*\.arrow", path.name):  # what the hub's library computed from the data
        return "of a cache"
    return None if path.is_dir() or path.is_file() else "neither file nor folder"


def shorten(names: list[str]) -> str:
    names = [repr(name)[1:-1] for name in names]  # one line, and what any terminal can show
    return ", ".join(names) if len(names) <= 3 else f"{names[0]}, {names[1]} … {names[-1]}"


def open_tables(name: str, subset: str | None, files: list[Path]) -> list:
    """The tables of a dataset, each (its name, a function), or none if its files are plain text.

    The function yields all rows as dicts: of a column only what is in that, of None all.
    """
    if files and subset is not None:
        raise ValueError("what is local has no subset: leave --dataset-subset out")
    if files:
        readers = [(file, READERS.get(kind_of(file))) for file in files]
        return [(file, partial(reader, file)) for file, reader in readers if reader]
    from datasets import load_dataset  # it takes a second, which a run with a cache need not spend

    return [("split train", partial(read_dataset, load_dataset(name, subset, split="train")))]


def choose_column(tables: list, chosen: str | None) -> str | None:
    """The column to read: the chosen one, or "text", or else the only one that holds text."""
    if not tables:
        if chosen is not None:
            raise ValueError(f"plain text has no column {chosen!r}: leave --text-column out")
        return None
    head = next(filter(None, (first_rows(*table) for table in tables)), None)
    if head is None:
        raise ValueError("there are no rows")
    columns = {name: "" for row in head for name in row}
    wanted = "text" if chosen is None else chosen
    if wanted in columns:
        return wanted
    if chosen is not None:
        raise ValueError(f"no column {chosen!r}: there are {', '.join(columns)}")
    for row in head:
        columns |= {name: type(value).__name__ for name, value in row.items() if has_text(value)}
    holding = {name: kind for name, kind in columns.items() if kind}
    if list(holding.values()) == ["str"]:
        return next(iter(holding))
    if "str" not in holding.values():
        raise ValueError(f"no column is text: there are {', '.join(columns)}")
    names = [name if kind == "str" else f"{name} (a {kind})" for name, kind in holding.items()]
    raise ValueError(f"several columns hold text ({', '.join(names)}): choose by --text-column")


def first_rows(name, read_rows) -> list[dict]:
    with naming(name):
        return list(itertools.islice(read_rows(None), 100))


def why_not_text(value) -> str | None:
    if not isinstance(value, str | None):
        return f"is of type {type(value).__name__}, not a text"
    try:
        (value or "").encode()
    except UnicodeEncodeError as error:  # in JSON, \ud83d alone
        return f"has half a character, {error.object[error.start]!r}"


def has_text(value) -> bool:
    """Whether there is a text in a value, which may be a list or have names for its parts."""
    parts = value.values() if isinstance(value, dict) else value
    return isinstance(value, str) or isinstance(value, dict | list) and any(map(has_text, parts))


def read_text(file: Path):
    """Yield a plain file piece by piece."""
    with naming(file), open_file(file, "rt", encoding="utf-8") as stream:
        while piece := stream.read(2**18):
            if "\0" in piece:
                raise ValueError("not a text, it has a byte 0")
            yield piece


def read_dataset(dataset, column: str | None):
    """Yield the rows of a dataset of the hub, its pictures and sounds as they are stored."""
    dataset = dataset if column is None else dataset.select_columns([column])
    for batch in dataset.with_format("arrow").iter(100):
        yield from batch.to_pylist()
