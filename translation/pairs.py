"""Sentence pairs: where they come from, and which are held out."""

import hashlib
from pathlib import Path

from training.rows import READERS, kind_of
from translation.grammar import default_pairs


def read_pairs(name: str, source: str, target: str) -> list[tuple[str, str]]:
    """All pairs of the dataset `name` in the two languages, each once, in their order.

    `name` is default, a local file (TSV, CSV, JSON, parquet) or a dataset of the hub. A ValueError
    names the row of what is no pair of texts.
    """
    if name == "default":
        if {source, target} != {"en", "it"}:
            raise ValueError(f"the default pairs are of en and it, not of {source} and {target}")
        pairs = default_pairs()
        return pairs if source == "en" else [(second, first) for first, second in pairs]
    path = Path(name)
    if path.is_file():
        if kind_of(path) not in READERS:
            raise ValueError(f"{name} is none of {', '.join(READERS)}, by the end of its name")
        rows = READERS[kind_of(path)](path, None)
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
                raise ValueError(f"row {number}: {language!r} is {has} (it has {names})")
        found[row[source].strip(), row[target].strip()] = None
    found.pop(("", ""), None)
    return list(found)


def read_hub(name: str, source: str, target: str):
    from datasets import load_dataset  # it takes time, and most runs need none

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
