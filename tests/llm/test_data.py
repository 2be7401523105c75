"""Documents to tokens: which ones, where they lie, and how that they are whole is checked."""

import errno
import fcntl
import json
import os
import pickle
import threading
import time
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch

import llm.data
import llm.model
from llm.data import all_load_datasets, batches, cut_documents
from llm.model import load_tokenizer

pytestmark = pytest.mark.usefixtures("alone")


def load(name, **options):
    options = {"dataset_subset": None, "text_column": None, "save_dir": "outputs"} | options
    args = Namespace(dataset_name=str(name), seq_length=8, batch_size=4, timeout=60, **options)
    return all_load_datasets(args, load_tokenizer("bytes"))


def load_and_listen(capsys, name, **options):
    """The lines that are printed about a dataset, with FOLDER for where its tokens lie."""
    capsys.readouterr()
    _, held_out, _ = load(name, **options)
    out, err = capsys.readouterr()
    assert "Traceback" not in err and "ERROR" not in err, err
    return out.replace(str(held_out.path.parent), "FOLDER").splitlines()


def the_tokens():
    (path,) = Path("outputs").glob("tokens-*/tokens.bin")
    return path


def expected(*texts):
    """With one token for each byte, and one for the end of a text."""
    letters = load_tokenizer("bytes")(bytes(range(256)).decode("latin-1")[:128])["input_ids"]
    assert all(text.isascii() for text in texts)
    tokens = [[*(letters[ord(letter)] for letter in text), 256] for text in texts]
    return np.array(sum(tokens, []), np.uint16).tobytes()


def test_tokens_are_those_of_the_documents(local, tmp_path, capsys):
    """From a file, a folder, JSON lines and parquet; documents of any length."""
    long = ["no line " * 40_000, "a line\n" * 90_000, ""]
    Path("folder").mkdir()
    for number, text in enumerate(long):
        Path(f"folder/{number}.txt").write_text(text)
    rows = [json.loads(line)["text"] for line in (local / "imdb.jsonl").read_text().splitlines()]
    told = "(column 'text')"
    for name, texts, source in (
        (local / "text.txt", ["".join(rows)], ""),
        ("folder", long, ""),
        (local / "imdb.jsonl", rows, told),
        (local / "openwebtext.parquet", rows, told),
    ):
        save_dir = f"outputs/{Path(name).name}"
        *lines, line = load_and_listen(capsys, name, save_dir=save_dir)
        (tokens,) = Path(save_dir).glob("*/tokens.bin")
        assert tokens.read_bytes() == expected(*texts)
        count = tokens.stat().st_size // 2
        assert line == f"Tokenised {name}: {count:,} tokens in FOLDER {source}".rstrip()
        assert lines == (
            ["Files of folder: 3 plain text (0.txt, 1.txt, 2.txt)"] if name == "folder" else []
        )
        (cached,) = load_and_listen(capsys, name, save_dir=save_dir)[len(lines) :]
        assert cached == line.replace("Tokenised", "Cached")
        assert [path.name for path in tokens.parent.iterdir() if ".tmp" in path.name] == []


def test_what_decides_the_tokens_decides_where_they_lie(tmp_path, capsys):
    Path("a").mkdir()
    rows = [json.dumps({"a": "A" * 90, "b": "B" * 90})] * 2
    Path("a/rows.jsonl").write_text("\n".join(rows))
    Path("a/test.jsonl").write_text("\n".join(rows * 2))
    lines, digests = [], []
    for column in "ab":
        lines += load_and_listen(capsys, "a", text_column=column)
        digests.append(load("a", text_column=column)[2])
    os.rename("a/test.jsonl", "a/more.jsonl")
    lines += load_and_listen(capsys, "a", text_column="b")
    assert digests[0] != digests[1]
    assert lines == [
        "Files of a: 1 JSON (rows.jsonl), left out: 1 of split test (test.jsonl)",
        "Tokenised a: 182 tokens in FOLDER (column 'a')",
        "Files of a: 1 JSON (rows.jsonl), left out: 1 of split test (test.jsonl)",
        "Tokenised a: 182 tokens in FOLDER (column 'b')",
        "Files of a: 2 JSON (more.jsonl, rows.jsonl)",
        "Tokenised a: 546 tokens in FOLDER (column 'b')",
    ]


def damage_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    times = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # as a bad disk would


FOREIGN = [pickle.dumps(print), b"[1, 2]", b'"text"', b"", b"\xff", b"[" * 10**5, b"1" * 5000]


FOREIGN += [b'{"tokens": true, "dtype": "uint16", "sha256": "", "crc32": 0, "source": ""}']


FOREIGN += [b'{"tokens": 1, "dtype": "O", "sha256": "", "crc32": 0, "source": ""}']


FOREIGN += [b'{"tokens": -1, "dtype": "uint16", "sha256": "", "crc32": 0, "source": ""}']


DAMAGES = {
    "a bit": damage_a_bit,
    "its end": lambda path: os.truncate(path, path.stat().st_size // 2),
    "a longer file": lambda path: path.write_bytes(path.read_bytes() + b"\0\0"),
    "code": lambda path: path.write_bytes(pickle.dumps(print).ljust(path.stat().st_size, b"\0")),
    "no file": os.unlink,
}


for content in FOREIGN:
    DAMAGES[f"json {content[:40]}"] = lambda path, content=content: path.with_name(
        "tokens.json"
    ).write_bytes(content)


def change_about(**fields):
    def change(path):
        about = json.loads(path.with_name("tokens.json").read_bytes())
        path.with_name("tokens.json").write_text(json.dumps(about | fields))

    return change


for field, value in (("dtype", "int16"), ("sha256", 1), ("source", ["a"]), ("crc32", 0)):
    DAMAGES[f"{field} {value}"] = change_about(**{field: value})


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_tokens_are_noticed_and_made_again(local, tmp_path, capsys, damage):
    whole_digest = load(local / "text.txt")[2]
    whole = the_tokens().read_bytes()
    DAMAGES[damage](the_tokens())
    lines = load_and_listen(capsys, local / "text.txt")
    assert lines[0] == "FOLDER/tokens.bin is damaged: it is made again"
    assert lines[1].startswith("Tokenised") and len(lines) == 2
    assert the_tokens().read_bytes() == whole
    assert load(local / "text.txt")[2] == whole_digest
    assert load_and_listen(capsys, local / "text.txt")[0].startswith("Cached")


def test_tokens_that_are_made_again_do_not_disturb_who_reads_them(local, tmp_path, monkeypatch):
    """Another job, which has checked them before, can read all of them at any time."""
    train, _, _ = load(local / "text.txt")
    before = [tensor.clone() for tensor in train.__getitems__(list(range(len(train))))]
    memory = np.memmap(train.path, np.uint16, mode="r")
    damage_a_bit(train.path)
    looks = []

    def look(pieces):
        for batch in batches(pieces):
            looks.append(memory.sum())  # a cut would be SIGBUS
            yield batch

    monkeypatch.setattr(llm.data, "batches", look)
    load(local / "text.txt")
    assert looks
    after = train.__getitems__(list(range(len(train))))
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


def test_a_problem_while_tokenising_leaves_nothing_and_is_one_line(tmp_path, capsys):
    rows = [json.dumps({"text": "A" * 90})] * 200 + [json.dumps({"text": 1})]
    Path("rows.jsonl").write_text("\n".join(rows))
    with pytest.raises(SystemExit) as stop:
        load("rows.jsonl")
    error = capsys.readouterr().err.splitlines()[-1]
    problem = "rows.jsonl: row 201: column 'text' is of type int, not a text"
    assert stop.value.code == 2 and error == f"ERROR: dataset-name rows.jsonl: {problem}"
    (folder,) = Path("outputs").iterdir()
    assert [path.name for path in folder.iterdir()] == ["lock"]


def test_a_wait_for_another_job_is_told_once(local, tmp_path, capsys):
    load(local / "text.txt")
    the_tokens().with_name("tokens.json").unlink()
    with open(the_tokens().with_name("lock"), "a") as other_job:
        fcntl.flock(other_job, fcntl.LOCK_EX)
        threading.Timer(2.5, fcntl.flock, (other_job, fcntl.LOCK_UN)).start()
        begin = time.monotonic()
        lines = load_and_listen(capsys, local / "text.txt")
        assert time.monotonic() - begin > 2
        name = local / "text.txt"
        assert lines[0] == f"Waiting for another process that tokenises {name} in FOLDER"
        assert lines[1].startswith("Tokenised") and len(lines) == 2
        fcntl.flock(other_job, fcntl.LOCK_EX)
        assert load_and_listen(capsys, local / "text.txt")[0].startswith("Cached"), "no lock needed"


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK])
def test_a_file_system_without_locks_is_told(local, tmp_path, capsys, monkeypatch, number):
    """No such one is at hand, so that answer of the kernel is made here."""

    def flock(file, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(SystemExit) as stop:
        load(local / "text.txt")
    error = capsys.readouterr().err.splitlines()[-1]
    (folder,) = Path("outputs").iterdir()
    problem = f"no locks in {folder} ({os.strerror(number)}): choose another --save-dir (OSError)"
    assert stop.value.code == 2
    assert error == f"ERROR: dataset-name {local / 'text.txt'}: {problem}"


def test_long_documents_are_cut_at_ends_of_lines():
    long = "a line\n" * 9
    once = list(cut_documents([[long]], 16))
    assert once == [("a line\n" * 2, False)] * 4 + [("a line\n", True)]
    assert list(cut_documents([list(long)], 16)) == once, "however it is read"
    assert list(cut_documents([[], ["b"]], 16)) == [("", True), ("b", True)]
    assert [len(piece) for piece, _ in cut_documents([["x" * 40]], 16)] == [16, 16, 8]


def test_a_batch_of_pieces_is_short_enough_for_the_memory_of_its_tokens():
    pieces = [("x" * length, True) for length in [10] * 300 + [2**18] * 40]
    sizes = [[len(text) for text in texts] for texts, _ in batches(pieces)]
    assert sum(sizes, []) == [len(text) for text, _ in pieces]
    assert [len(size) for size in sizes[:2]] == [128, 128]
    assert max(map(sum, sizes)) <= 2**22 + 2**18


def test_no_sequence_has_inputs_and_no_targets():
    """Also a batch of one row, whose inputs and targets overlap in the file."""
    (Path("text.txt")).write_text("abcdefgh" * 40)
    train, _, _ = load("text.txt")
    for indices in [[-1], [-1, 0]]:
        inputs, targets = train.__getitems__(indices)
        assert inputs.min() >= 0 and (targets[0] == llm.model.NO_TARGET).all()
