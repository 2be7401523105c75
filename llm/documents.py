"""A name to documents: files, folders and datasets of the hub, each read as what it is."""

import os
from pathlib import Path


def files_of(path: Path, saved: Path) -> list[Path]:
    """The file `path`, or all files in the folder `path` but hidden ones and those in `saved`."""
    if path.is_file():
        return [path]
    files = [file for file in sorted(path.rglob("*")) if file.is_file()]
    files = [file for file in files if saved.resolve() not in file.resolve().parents]
    return [file for file in files if "/." not in f"/{file.relative_to(path)}"]


def read_documents(name: str, subset: str | None, files: list[Path]):
    """Yield the texts of the dataset `name`, one after the other: a file or a row is a text."""
    if name == "stdlib":
        files = sorted(Path(os.__file__).parent.glob("*.py"))
    formats = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}
    kinds = {formats[file.suffix] for file in files if file.suffix in formats}
    if files and not kinds:
        for file in files:
            text = file.read_text(encoding="utf-8", errors="replace")
            if "\0" in text:
                raise ValueError(f"{file} is not a text")
            yield text
        return
    from datasets import load_dataset  # it takes a second, which a run with a cache need not spend

    if kinds:
        kind = max(kinds)  # beside parquet, JSON is about the data
        names = [str(file) for file in files if formats.get(file.suffix) == kind]
        rows = load_dataset(kind, data_files=names, split="train", streaming=True)
    else:
        rows = load_dataset(name, subset, split="train")
    column = None
    for row in rows:
        texts = [key for key, value in row.items() if isinstance(value, str)]
        if column is None and texts:
            column = "text" if "text" in row else texts[0]
        if column and row[column] is not None:
            yield row[column]
    if column is None:
        raise ValueError("no column is text")


def cut_documents(documents, size=2**18):
    """Cut long documents at ends of lines: yield (piece, whether it ends its document)."""
    for text in documents:
        begin = 0
        while len(text) - begin > size:
            end = text.rfind("\n", begin, begin + size) + 1 or begin + size
            yield text[begin:end], False
            begin = end
        yield text[begin:], True
