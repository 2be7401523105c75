"""What of a file, a folder or a dataset is read, what is left out, and how that is told."""

import bz2
import csv
import gzip
import json
import lzma
import os
import re
import tracemalloc
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from llm.documents import Documents, choose_files


def read(name, column=None, subset=None):
    """The documents of a dataset, what they are made of, and the line about its folder."""
    files, line = choose_files(str(name), Path("outputs"))
    documents = Documents(str(name), subset, column, files)
    return ["".join(document) for document in documents], str(documents), line


def write_rows(name, *rows):
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text("\n".join(map(json.dumps, rows)))


def write_table(name, *rows):
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), name)


COLUMNS = {
    "text is the column": ([{"id": "1", "text": "a"}], None, "text"),
    "the only one that holds text": ([{"id": 1, "content": "a"}], None, "content"),
    "chosen": ([{"text": "b", "content": "a"}], "content", "content"),
    "first rows without": ([{"body": None, "id": 1}] * 50 + [{"body": "a"}], None, "body"),
}


@pytest.mark.parametrize("write", (write_rows, write_table))
@pytest.mark.parametrize("case", COLUMNS)
def test_the_column_that_is_read_is_told(case, write):
    rows, column, expected = COLUMNS[case]
    write("file.jsonl" if write is write_rows else "file.parquet", *rows)
    (name,) = os.listdir()
    texts, source, line = read(name, column)
    skipped = ", 50 rows without a text" if len(rows) > 50 else ""
    assert (texts, source, line) == (["a"], f"column {expected!r}{skipped}", "")


SEVERAL = "several columns hold text"
REFUSED = {
    "two readings": (
        [{"instruction": "a", "input": "", "output": "b"}],
        None,
        f"{SEVERAL} (instruction, input, output): choose by --text-column",
    ),
    "a chat": (
        [{"id": "a", "messages": [{"role": "user", "content": "b"}]}],
        None,
        f"{SEVERAL} (id, messages (a list)): choose by --text-column",
    ),
    "another text in a later row": (
        [{"a": "a", "b": None}, {"a": "a", "b": "b"}],
        None,
        f"{SEVERAL} (a, b): choose by --text-column",
    ),
    "a column that is not there": (
        [{"id": 1, "content": "a"}],
        "body",
        "no column 'body': there are id, content",
    ),
    "no text": ([{"id": 1, "score": [2]}], None, "no column is text: there are id, score"),
    "only a list of texts": ([{"texts": ["a"]}], None, "no column is text: there are texts"),
    "a list": (
        [{"text": "a"}, {"text": ["a", "b"]}],
        None,
        "file.jsonl: row 2: column 'text' is of type list, not a text",
    ),
    "a number": (
        [{"text": 1}],
        None,
        "file.jsonl: row 1: column 'text' is of type int, not a text",
    ),
    "half a character": (
        [{"text": "a\ud83d"}],
        None,
        "file.jsonl: row 1: column 'text' has half a character, '\\ud83d'",
    ),
    "no object": ([{"text": "a"}, ["b"]], None, "file.jsonl: row 2 is of type list, not an object"),
    "no rows": ([], None, "there are no rows"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_two_readings_or_none_is_refused(case):
    rows, column, message = REFUSED[case]
    write_rows("file.jsonl", *rows)
    with pytest.raises(ValueError) as error:
        read("file.jsonl", column)
    assert str(error.value) == message


def test_a_list_in_parquet_and_a_column_that_one_file_lacks(tmp_path):
    write_table("list.parquet", {"text": ["a", "b"]})
    with pytest.raises(ValueError, match="list.parquet: row 1: column 'text' is of type list, not"):
        read("list.parquet")
    for write, suffix in ((write_rows, "jsonl"), (write_table, "parquet")):
        write(f"{suffix}/1.{suffix}", {"text": "a"})
        write(f"{suffix}/2.{suffix}", {"content": "a"})
        with pytest.raises(ValueError, match=f"^{suffix}/2.{suffix}: no column 'text'$"):
            read(suffix)


def test_an_option_that_has_no_meaning_is_refused(tmp_path):
    Path("text.txt").write_text("a")
    with pytest.raises(ValueError, match="plain text has no column 'body'"):
        read("text.txt", "body")
    with pytest.raises(ValueError, match="what is local has no subset"):
        read("text.txt", subset="en")


def test_held_out_splits_are_read_only_if_they_are_named(tmp_path):
    names = ["a/Test.jsonl", "a/my-dev_2.json", "a/valid/x.jsonl", "a/TEST-00000-of-00001.jsonl"]
    names += ["a/x.validation.jsonl", "a/evaluation/train.jsonl"]
    for name in names:
        write_rows(name, {"text": "held out"})
    with pytest.raises(ValueError, match=r"no file to read in that folder, left out: .* of split"):
        read("a")
    write_rows("a/train.jsonl", {"text": "b"})
    write_rows("a/latest_devices_values.jsonl", {"text": "a"})
    texts, _, line = read("a")
    assert texts == ["a", "b"]
    assert line.startswith(
        "Files of a: 2 JSON (latest_devices_values.jsonl, train.jsonl), left out"
    )
    for part in (
        "2 of split test (TEST-00000-of-00001.jsonl, Test.jsonl)",
        "of split valid (valid",
    ):
        assert part in line, line
    for name in [*names, "a/valid"]:
        assert read(name)[0] == ["held out"]


def test_kinds_side_by_side_are_told(tmp_path):
    write_rows("a/b.jsonl", {"text": "JSON"})
    Path("a/notes.txt").write_text("plain")
    Path("a/c.jsonl").touch()
    line = "Files of a: 1 JSON (b.jsonl), left out: 1 empty (c.jsonl), 1 beside JSON (notes.txt)"
    assert read("a") == (["JSON"], "column 'text'", line)
    write_table("a/c.parquet", {"text": "parquet"})
    texts, _, line = read("a")
    assert texts == ["parquet"]
    assert line.endswith("left out: 3 beside parquet (b.jsonl, c.jsonl, notes.txt)")


def test_a_line_about_many_files_is_short(tmp_path):
    Path("many/test").mkdir(parents=True)
    for number in range(2000):
        Path(f"many/{number:04}.txt").write_text(str(number))
        Path(f"many/test_{number:04}.txt").touch()
    texts, source, line = read("many")
    assert texts == [str(number) for number in range(2000)] and source == "plain text"
    files = "2,000 plain text (0000.txt, 0001.txt … 1999.txt)"
    others = "2,001 of split test (test, test_0000.txt … test_1999.txt)"
    assert line == f"Files of many: {files}, left out: {others}"


def test_names_of_any_letters_stay_in_their_line(tmp_path):
    Path("a").mkdir()
    for number, name in enumerate((b"a\nb.txt", b"it's.txt", b"\xff.txt", "ü.txt".encode())):
        (Path("a") / os.fsdecode(name)).write_text(str(number))
    texts, _, line = read("a")
    assert sorted(texts) == ["0", "1", "2", "3"]
    assert line.encode() and r"a\nb.txt, it's.txt … \udcff.txt" in line


def test_folder_as_a_clone_of_the_hub_has_it(tmp_path):
    """Of a folder with a card, hidden files and parquet, the rows with a text are read."""
    write_table(
        "data/train.parquet", {"url": "http://a", "text": None}, {"url": "b", "text": "the text"}
    )
    for name in (".git/config", "README.md", "__pycache__/a.pyc", "outputs/b/metrics.jsonl"):
        Path("data", name).parent.mkdir(parents=True, exist_ok=True)
        Path("data", name).write_text("a card")
    write_rows("data/dataset_infos.json", {"text": "about the data"})

    def read_data():
        files, line = choose_files("data", Path("data/outputs"))
        return ["".join(document) for document in Documents("data", None, None, files)], line

    texts, line = read_data()
    assert texts == ["the text"]
    hidden = "2 hidden (.git, __pycache__)"
    rest = "1 beside parquet (README.md), 1 about the data (dataset_infos.json)"
    others = f"{hidden}, {rest}, 1 of --save-dir (outputs)"
    assert line == f"Files of data: 1 parquet (train.parquet), left out: {others}"
    Path("data/train.parquet").unlink()
    assert read_data()[0] == ["a card"]
    Path("data/README.md").unlink()
    assert read_data()[0] == ["about the data"], "there is nothing else"


def test_links_are_followed_once(tmp_path):
    Path("away").mkdir()
    Path("away/far.txt").write_text("far")
    Path("a/b").mkdir(parents=True)
    Path("a/b/near.txt").write_text("near")
    Path("a/far").symlink_to(tmp_path / "away")
    Path("a/.blobs").mkdir()
    Path("a/.blobs/0").write_text("blob")
    Path("a/c.txt").symlink_to(".blobs/0")  # so the hub's cache does it
    Path("a/loop").symlink_to(tmp_path / "a")
    Path("a/b/twice.txt").symlink_to("near.txt")
    Path("a/to itself").symlink_to("to itself")
    Path("a/to nothing").symlink_to("nowhere")
    texts, _, line = read("a")
    assert texts == ["near", "blob", "far"]
    assert "2 linked twice (b/twice.txt, loop)" in line and "1 hidden (.blobs)" in line
    assert "2 neither file nor folder (to itself, to nothing)" in line


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read all")
def test_a_folder_that_may_not_be_read_is_told(tmp_path):
    Path("a/b").mkdir(parents=True)
    Path("a/c.txt").write_text("c")
    Path("a/b").chmod(0)
    with pytest.raises(PermissionError):
        read("a")


def test_suffixes_of_any_spelling_and_packed_files(tmp_path):
    row = json.dumps({"text": "a", "id": "b"})
    for number, suffix in enumerate(("json", "JSONL", "ndjson", "JsonLines")):
        Path(f"{number}.{suffix}").write_text(row)
    for suffix, opener in (("jsonl.gz", gzip.open), ("JSON.bz2", bz2.open), ("json.XZ", lzma.open)):
        opener(f"4.{suffix}", "wt").write(row)
    write_table("upper.Parquet", {"text": "a", "id": "b"})
    names = os.listdir()
    assert len(names) == 8
    for name in names:
        assert read(name)[:2] == (["a"], "column 'text'"), name
    gzip.open("plain.txt.gz", "wt").write("plain\n" * 9)
    assert read("plain.txt.gz")[:2] == (["plain\n" * 9], "plain text")


def test_json_that_is_no_lines(tmp_path):
    rows = [{"text": "a\n"}, {"text": "b"}]
    forms = [json.dumps(rows), json.dumps(rows, indent=1), "\n\n" + json.dumps(rows)]
    forms += ["\ufeff" + json.dumps(rows), json.dumps(["a\n", "b"]), '"a\\n"\n\n"b"\n']
    forms += ["\ufeff" + "\r\n".join(map(json.dumps, rows)) + "\r\n"]
    for form in forms:
        Path("file.json").write_bytes(form.encode())
        assert read("file.json")[:2] == (["a\n", "b"], "column 'text'"), form
    Path("file.json").write_text(json.dumps(rows[0], indent=1))
    assert read("file.json")[0] == ["a\n"]


def test_csv(tmp_path):
    texts = ['a "quoted", text', "two\nlines", "x" * 200_000, ""]
    with open("a.csv", "w", newline="") as file:
        csv.writer(file).writerows([["id", "text"], *enumerate(texts)])
    assert read("a.csv")[:2] == (texts, "column 'text'")
    Path("bad.csv").write_text("id,text\n1,a,b\n")
    with pytest.raises(ValueError, match="bad.csv: row 1 has 3 fields, and the first line 2"):
        read("bad.csv")


def test_in_tsv_a_line_is_a_row_and_a_quote_is_a_letter():
    """But for what spreadsheets and pandas quote, because it contains quotes."""
    texts = ['"begins', 'ends"', '"all of it"', 'a "b" c', "007", 'a "quoted" one', '"', '""', ""]
    quoted = {'a "quoted" one': '"a ""quoted"" one"'}
    lines = ["id\ttext", *(f"{i}\t{quoted.get(text, text)}" for i, text in enumerate(texts))]
    for name, end in (("a.TSV", "\n"), ("b.tsv", "\r\n")):
        Path(name).write_bytes(end.join([*lines, ""]).encode())
        assert read(name)[:2] == (texts, "column 'text'")
    Path("bad.tsv").write_text('id\ttext\n1\t"two\nlines"\n')
    with pytest.raises(ValueError, match="bad.tsv: row 2 has 1 fields, and the first line 2"):
        read("bad.tsv")


@pytest.mark.parametrize("name", ["v [1]", "*.jsonl", "a?b", "{x}", "ü::1"])
def test_a_name_is_no_pattern(name):
    write_rows(f"{name}/{name}.jsonl", {"text": "a"})
    write_rows("v 1/b.jsonl", {"text": "b"})
    assert read(name)[0] == read(f"{name}/{name}.jsonl")[0] == ["a"]


def test_a_dataset_that_was_saved_to_disk(tmp_path):
    datasets.disable_progress_bars()
    rows = [{"text": f"{number}", "number": number} for number in range(250)]
    table = datasets.Dataset.from_list(rows)
    table.shuffle(seed=1).sort("number").save_to_disk("one", num_shards=3)
    expected = [row["text"] for row in rows]
    texts, source, line = read("one")
    assert (texts, source) == (expected, "column 'text'")
    assert "3 arrow (" in line and "left out: 2 about the data" in line
    datasets.load_from_disk("one").map(lambda row: {"text": "computed"})
    assert any(name.startswith("cache-") for name in os.listdir("one"))
    assert read("one")[0] == expected
    others = datasets.Dataset.from_list([{"text": "other"}])
    splits = {"train": table, "test": others, "unsupervised": others}
    datasets.DatasetDict(splits).save_to_disk("several")
    texts, _, line = read("several")
    assert texts == expected
    assert "1 of split test (test), 1 of split unsupervised (unsupervised)" in line
    assert read("several/unsupervised")[0] == ["other"]
    with (
        pyarrow.OSFile("feather.arrow", "wb") as file,
        pyarrow.ipc.new_file(file, table.data.schema) as writer,
    ):
        writer.write_table(table.data.table, max_chunksize=90)
    assert read("feather.arrow")[0] == expected


BAD_FILES = {
    "latin.txt": ("Grüße\nan Zoë".encode("latin-1"), "line 1, byte 3 .0xfc. is not UTF-8"),
    "late.txt": (b"fine\n" * 10**5 + b"\xff", "line 100001, byte 1 .0xff. is not UTF-8"),
    "utf-16.txt": ("text".encode("utf-16"), "line 1, byte 1 .0xff. is not UTF-8"),
    "zeros.txt": (b"text\0" * 9, "not a text, it has a byte 0"),
    "latin.jsonl": (b'{"text": "a"}\n{"text": "\xfc"}', "line 2, byte 11 .0xfc. is not UTF-8"),
    "latin.json": (b'[\n"\xfc"]', "line 2, byte 2 .0xfc. is not UTF-8"),
    "latin.csv": (b"text\n\xfc\n", "line 2, byte 1 .0xfc. is not UTF-8"),
    "packed.txt.gz": (gzip.compress(b"\xfc"), "line 1, byte 1 .0xfc. is not UTF-8"),
    "cut.jsonl": (b'{"text": "a"}\n{"text": "b', "line 2, letter 10: Unterminated string"),
    "cut.json": (b'[{"text": "a"},\n{"text"', "Expecting ':' delimiter: line 2 column 8"),
    "cut.jsonl.gz": (gzip.compress(b'{"text": "a"}' * 99)[:-9], "Compressed file ended before"),
    "no.gz": (b"text", "Not a gzipped file"),
    "zeros.jsonl": (b"\0" * 99, "Expecting value: line 1 column 1"),
    "no.parquet": (b"PAR1 is not all", "not a parquet file"),
    "no.arrow": (b"ARROW1 is not all", "Not an Arrow file"),
    "deep.json": (b"[" * 10**5, "maximum recursion depth"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_named(name):
    content, message = BAD_FILES[name]
    Path("a").mkdir()
    Path("a", name).write_bytes(content)
    for folder_or_file in ("a", f"a/{name}"):
        with pytest.raises(ValueError, match=f"^a/{re.escape(name)}[:,].*{message}"):
            read(folder_or_file)


def test_memory_is_that_of_what_is_read(tmp_path):
    """Of files of 22 MB at most 3 MB are in memory, and of 40 MB in one row group at most 10."""
    line = "a line of a text that is read piece by piece " * 100 + "\n"
    Path("text.txt").write_text(line * 5000)
    write_rows("rows.jsonl", *[{"text": line}] * 5000)
    with open("rows.csv", "w", newline="") as file:
        csv.writer(file).writerows([["text"], *[[line]] * 5000])
    for name in ("text.txt", "rows.jsonl", "rows.csv"):
        tracemalloc.start()
        files, _ = choose_files(name, Path("outputs"))
        size = sum(
            len(text) for document in Documents(name, None, None, files) for text in document
        )
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert size == 5000 * len(line) > 22e6 and peak < 3e6, (name, peak)
    texts = [os.urandom(1000).hex() for _ in range(20_000)]
    write_table("rows.parquet", *[{"text": text} for text in texts])
    pool, peak = pyarrow.default_memory_pool(), 0
    before = pool.bytes_allocated()
    files, _ = choose_files("rows.parquet", Path("outputs"))
    for document, text in zip(Documents("", None, None, files), texts, strict=True):
        assert document == [text]
        peak = max(peak, pool.bytes_allocated() - before)
    assert peak < 10e6


def test_a_dataset_of_the_hub(tmp_path, monkeypatch):
    """One lies in the hub's cache, as after a download; its split train is read, and no picture."""
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    features = {"caption": datasets.Value("string"), "picture": datasets.Image()}
    rows = [{"caption": f"{number}", "picture": None} for number in range(250)]
    rows[7]["caption"] = None
    rows[8]["picture"] = {"bytes": b"no picture", "path": None}
    table = datasets.Dataset.from_list(rows, features=datasets.Features(features))
    folder = tmp_path / "cache" / "someone___something" / "default" / "0.0.0" / "hash"
    folder.mkdir(parents=True)
    table.info.config_name, table.info.dataset_name = "default", "something"
    table.info.splits = datasets.SplitDict()
    for split in ("train", "test"):
        table.info.splits.add(datasets.SplitInfo(split, num_examples=250))
        with datasets.arrow_writer.ArrowWriter(
            features=table.features, path=str(folder / f"something-{split}.arrow")
        ) as writer:
            writer.write_table(table.data.table)
            writer.finalize()
    table.info.write_to_directory(str(folder))
    texts, source, line = read("someone/something")
    assert texts == [row["caption"] for row in rows if row["caption"]]
    assert (source, line) == ("split train, column 'caption', 1 rows without a text", "")
    with pytest.raises(ValueError, match="no column 'text': there are caption, picture"):
        read("someone/something", "text")
    with pytest.raises(Exception, match="BuilderConfig|Couldn't find|no/such"):
        read("no/such")
