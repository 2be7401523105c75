"""Documents to tokens, once for all runs, and tokens to sequences."""

import hashlib
import json
import os
import sys
import time
import zlib
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from tqdm import tqdm

from llm.documents import Documents, choose_files
from llm.model import NO_TARGET
from plumbing import agree, locks
from training.job import all_patiently


def prepare_tokens(args, tokenizer) -> Path:
    """The folder with the tokens of the dataset, made by one process on each machine at most.

    Each machine may have a disk of its own. If several share one, the first makes them.
    """
    name = args.dataset_name
    files, choice = choose_files(name, Path(args.save_dir))
    folder = cache_folder(args, tokenizer, files)
    if dist.get_node_local_rank() != 0:
        return folder
    if choice:
        print(choice)
    folder.mkdir(parents=True, exist_ok=True)
    word, about = "Cached", load_tokens(folder, checked=True)
    if about is None:
        with locked(folder, f"Waiting for another process that tokenises {name} in {folder}"):
            about = load_tokens(folder, checked=True)  # the other job has made them
            if about is None:
                if (folder / "tokens.json").exists():
                    print(f"{folder}/tokens.bin is damaged: it is made again")
                word, about = "Tokenised", tokenise(args, tokenizer, files, folder)
    source = "" if about["source"] == "plain text" else f" ({about['source']})"
    print(f"{word} {name}: {about['tokens']:,} tokens in {folder}{source}")
    return folder


def tokenise(args, tokenizer, files: list[Path], folder: Path) -> dict:
    """Write tokens.bin, all documents with an end-of-text token after each, and tokens.json.

    tokens.json says what tokens.bin holds and is written last. Until then a job that reads
    the files that were there goes on reading them.
    """
    documents = Documents(args.dataset_name, args.dataset_subset, args.text_column, files)
    dtype = np.dtype(np.uint16 if len(tokenizer) <= 2**16 else np.uint32)
    count, digest, checksum = 0, hashlib.sha256(), 0
    hide = None if dist.get_rank() == 0 else True
    new = folder / "tokens.bin.tmp"
    try:
        with open(new, "wb") as file, tqdm(unit=" tokens", disable=hide) as bar:
            for texts, ends in batches(cut_documents(documents)):
                encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
                for ids, end in zip(encoded, ends, strict=True):
                    ids = [*ids, tokenizer.eos_token_id] if end else ids
                    tokens = np.array(ids, dtype).tobytes()
                    file.write(tokens)
                    digest.update(tokens)
                    checksum = zlib.crc32(tokens, checksum)
                    count += len(ids)
                    bar.update(len(ids))
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, folder / "tokens.bin")
    finally:
        new.unlink(missing_ok=True)  # a disk that is full gets its place back
    about = {"tokens": count, "dtype": dtype.name, "sha256": digest.hexdigest()}
    about |= {"crc32": checksum, "source": str(documents)}
    (folder / "tokens.json.tmp").write_text(json.dumps(about))
    os.replace(folder / "tokens.json.tmp", folder / "tokens.json")
    return about


def cut_documents(documents, size=2**18):
    """Cut long documents at ends of lines: yield (piece, whether it ends its document)."""
    for document in documents:
        rest = ""
        for text in document:
            for begin in range(0, len(text), size):
                rest += text[begin : begin + size]
                while len(rest) > size:
                    end = rest.rfind("\n", 0, size) + 1 or size
                    yield rest[:end], False
                    rest = rest[end:]
        yield rest, True


def batches(pieces, count=128, letters=2**22):
    """Yield (pieces, ends): so many pieces at once, or fewer if these have so many letters."""
    batch, size = [], 0
    for piece, end in pieces:
        batch.append((piece, end))
        size += len(piece)
        if len(batch) == count or size >= letters:
            yield zip(*batch, strict=True)
            batch, size = [], 0
    if batch:
        yield zip(*batch, strict=True)


def load_tokens(folder: Path, checked=False) -> dict | None:
    """What tokens.json says of the tokens in `folder`, or None if they are not whole.

    Only if they are `checked`, a single bit in them that has changed is noticed.
    """
    try:
        about = json.loads((folder / "tokens.json").read_bytes())
        kinds = {"tokens": int, "dtype": str, "sha256": str, "crc32": int, "source": str}
        if any(type(about[key]) is not kind for key, kind in kinds.items()):
            return None
        size = about["tokens"] * {"uint16": 2, "uint32": 4}[about["dtype"]]
        whole = (folder / "tokens.bin").stat().st_size == size
        whole = whole and (not checked or crc32(folder / "tokens.bin") == about["crc32"])
        return about if whole else None
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None


def crc32(path: Path) -> int:
    """A checksum of a file that takes no longer than most disks take to read it."""
    checksum = 0
    with open(path, "rb") as file:
        while piece := file.read(2**20):
            checksum = zlib.crc32(piece, checksum)
    return checksum


@contextmanager
def locked(folder: Path, waiting: str):
    """Be the only job in `folder`. Print the line `waiting` if there is another one."""
    path, owner = str(folder / "lock"), locks.name_of_owner()
    try:
        if locks.try_to_lock(path, owner):
            print(waiting)
            while locks.try_to_lock(path, owner):
                time.sleep(0.2)
    except OSError as error:
        problem = f"no locks in {folder} ({error.strerror}): choose another --save-dir"
        raise OSError(problem) from error
    try:
        yield
    finally:
        locks.unlock(path)


class TokenDataset(Dataset):
    """Some of the sequences of `seq_length` tokens in a file of tokens, as inputs and targets.

    The target of a token is the next one, so a sequence needs one token more than it has inputs.
    """

    def __init__(self, path: Path, dtype: str, seq_length: int, sequences: torch.Tensor):
        self.path, self.dtype = path, dtype
        self.seq_length = seq_length
        self.sequences = sequences

    def __len__(self):
        return len(self.sequences)

    def __getitems__(self, indices):
        """Inputs and targets, each (batch, seq_length) int64. Index -1 has nothing to predict."""
        tokens = np.memmap(self.path, self.dtype, mode="r")  # reads only what is asked for
        starts = self.sequences[indices].mul(self.seq_length).tolist()
        rows = np.stack([tokens[start : start + self.seq_length + 1] for start in starts])
        rows = torch.from_numpy(rows.astype(np.int64))
        inputs, targets = rows[:, :-1].clone(), rows[:, 1:].clone()  # they share no memory
        targets[torch.tensor(indices) < 0] = NO_TARGET
        return inputs, targets


def cache_folder(args, tokenizer, files: list[Path]) -> Path:
    """Where the tokens of this dataset lie, under a name that changes when they would."""
    key = [args.dataset_name, args.dataset_subset, args.text_column]
    key += [tokenizer.backend_tokenizer.to_str(), tokenizer.eos_token_id]
    if args.dataset_name == "stdlib":
        key, files = [*key, sys.version], []
    for file in files:
        key += [str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns]
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()
    return Path(args.save_dir) / f"tokens-{digest[:16]}"


def all_load_datasets(args, tokenizer) -> tuple[TokenDataset, TokenDataset, str]:
    """The sequences to train on, those held out, and the sha256 of all tokens."""
    folder = all_patiently("dataset-name", args.dataset_name, prepare_tokens, args, tokenizer)
    about = load_tokens(folder) or {"tokens": 0, "sha256": None}
    problem, count = None, (about["tokens"] - 1) // args.seq_length
    if len(set(agree.all_gather(about["sha256"]))) > 1:
        problem = f"dataset-name: {args.dataset_name} is not the same on all machines"
    elif count < 2:
        tokens = f"{args.dataset_name} has {about['tokens']} tokens"
        problem = f"seq-length: {tokens}, too few for two sequences of {args.seq_length}"
    agree.all_exit_if(problem)
    # One sequence in twenty is held out, at most 1024: the same ones in all runs, for any seed.
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    size = min(max(count // 20, 1), 1024)
    held_out, train = (
        TokenDataset(folder / "tokens.bin", about["dtype"], args.seq_length, part.sort().values)
        for part in (order[:size], order[size:])
    )
    return train, held_out, about["sha256"]
