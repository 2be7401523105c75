"""Sentence pairs: where they come from, and which are held out."""

import csv
import hashlib
import json
from pathlib import Path

from training.texts import open_file
from translation.grammar import default_pairs


def read_pairs(name: str, source: str, target: str) -> list[tuple[str, str]]:
    """All pairs of the dataset `name` in the two languages, each once, in their order.

    `name` is default, a local file (TSV, JSON lines, parquet) or a dataset of the hub. A ValueError
    names the row of what is no pair of texts.
    """
    if name == "default":
        if {source, target} != {"en", "it"}:
            raise ValueError(f"the default pairs are of en and it, not of {source} and {target}")
        pairs = default_pairs()
        return pairs if source == "en" else [(second, first) for first, second in pairs]
    path = Path(name)
    readers = {".tsv": read_tsv, ".jsonl": read_json, ".json": read_json, ".parquet": read_parquet}
    if path.is_file():
        if path.suffix.lower() not in readers:
            raise ValueError(f"{name} is none of {', '.join(readers)}")
        rows = readers[path.suffix.lower()](path)
    elif path.exists():
        raise ValueError(f"{name} is a folder: name a file")
    else:
        rows = read_hub(name, source, target)
    found = {}
    for number, row in enumerate(rows, 1):
        row = row.get("translation", row)  # as the hub has it: {"translation": {"en": …, "it": …}}
        for language in (source, target):
            if not isinstance(row.get(language), str):
                kind = type(row.get(language)).__name__
                has = f"of type {kind}, not a text" if language in row else "not there"
                names = ", ".join(map(str, row))
                raise ValueError(f"row {number} of {name}: {language!r} is {has} (it has {names})")
        found[row[source].strip(), row[target].strip()] = None
    found.pop(("", ""), None)
    return list(found)


def read_tsv(path: Path):
    """Rows of a file whose first line names its columns by their languages."""
    with open_file(path, "rt", encoding="utf-8-sig", newline="") as file:
        yield from csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)


def read_json(path: Path):
    with open_file(path, "rt", encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}: line {number}: {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}: line {number} is no object")
            yield row


def read_parquet(path: Path):
    import pyarrow.parquet  # only here: it takes time, and most runs need none

    for batch in pyarrow.parquet.ParquetFile(path).iter_batches(1024):
        yield from batch.to_pylist()


def read_hub(name: str, source: str, target: str):
    from datasets import load_dataset  # only here, for the same reason

    try:
        return load_dataset(name, f"{source}-{target}", split="train")
    except ValueError:  # the hub has each pair of languages under one of its two orders
        return load_dataset(name, f"{target}-{source}", split="train")


def is_held_out(sentence: str) -> bool:
    """Whether pairs with this source are held out: one in twenty, the same ones everywhere."""
    return int.from_bytes(hashlib.sha256(sentence.encode()).digest()[:4], "big") % 20 == 0


def split(pairs: list[tuple[str, str]]) -> tuple[list, list]:
    """The pairs to train on and those held out. No sentence of the latter is in the former."""
    held_out = [pair for pair in pairs if is_held_out(pair[0])]
    sources, targets = {source for source, _ in held_out}, {target for _, target in held_out}
    train = [(a, b) for a, b in pairs if a not in sources and b not in targets]
    if not train or not held_out:
        counts = f"{len(train)} to train on and {len(held_out)} held out"
        raise ValueError(f"its {len(pairs)} pairs are too few: {counts}")
    return train, held_out
