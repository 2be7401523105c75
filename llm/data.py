"""Documents to tokens to sequences."""

import hashlib
import itertools
import json
import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from filelock import FileLock
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

import plumbing
from llm.documents import cut_documents, files_of, read_documents
from llm.model import NO_TARGET
from training.job import all_patiently


def prepare_tokens(args, tokenizer, folder: Path):
    """Tokenise the dataset into `folder`, unless that was done: once for all runs and processes.

    tokens.bin holds all documents, each with an end-of-text token after it. tokens.json says what
    it should hold, and is written last: a tokens.bin that was cut off is made again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):  # two jobs may start at the same time
        if load_tokens(folder):
            return
        (folder / "tokens.json").unlink(missing_ok=True)
        files = files_of(Path(args.dataset_name), Path(args.save_dir))
        documents = read_documents(args.dataset_name, args.dataset_subset, files)
        pieces = cut_documents(documents)
        dtype = np.dtype(np.uint16 if len(tokenizer) <= 2**16 else np.uint32)
        count, digest = 0, hashlib.sha256()
        hide = None if dist.get_rank() == 0 else True
        with open(folder / "tokens.bin", "wb") as file, tqdm(unit=" tokens", disable=hide) as bar:
            while batch := list(itertools.islice(pieces, 128)):
                texts, ends = zip(*batch, strict=True)
                encoded = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
                for ids, end in zip(encoded, ends, strict=True):
                    tokens = np.array([*ids, tokenizer.eos_token_id] if end else ids, dtype)
                    file.write(tokens.tobytes())
                    digest.update(tokens.tobytes())
                    count += len(tokens)
                    bar.update(len(tokens))
            file.flush()
            os.fsync(file.fileno())
        about = {"tokens": count, "dtype": dtype.name, "sha256": digest.hexdigest()}
        (folder / "tokens.json.tmp").write_text(json.dumps(about))
        os.replace(folder / "tokens.json.tmp", folder / "tokens.json")
        print(f"Tokenised {args.dataset_name}: {count:,} tokens in {folder}")


def load_tokens(folder: Path) -> dict | None:
    """What tokens.json says of the tokens in `folder`, or None if these are not whole."""
    try:
        about = json.loads((folder / "tokens.json").read_text())
        size = about["tokens"] * np.dtype(about["dtype"]).itemsize
        return about if (folder / "tokens.bin").stat().st_size == size else None
    except (OSError, ValueError, KeyError):
        return None


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
        inputs, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        targets[torch.tensor(indices) < 0] = NO_TARGET
        return inputs, targets


def cache_folder(args, tokenizer) -> Path:
    """Where the tokens of this dataset lie, under a name that changes when they would."""
    key = [args.dataset_name, args.dataset_subset]
    key += [tokenizer.backend_tokenizer.to_str(), tokenizer.eos_token_id]
    key += [sys.version] if args.dataset_name == "stdlib" else []
    for file in files_of(Path(args.dataset_name), Path(args.save_dir)):
        key += [str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns]
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()
    return Path(args.save_dir) / f"tokens-{digest[:16]}"


def all_load_datasets(args, tokenizer) -> tuple[TokenDataset, TokenDataset, str]:
    """The sequences to train on, those held out, and the sha256 of all tokens."""
    folder = cache_folder(args, tokenizer)
    # One process on each machine, since each machine may have a disk of its own.
    work = prepare_tokens if dist.get_node_local_rank() == 0 else lambda *_: None
    all_patiently("dataset-name", args.dataset_name, work, args, tokenizer, folder)
    about = load_tokens(folder) or {"tokens": 0, "sha256": None}
    problem, count = None, (about["tokens"] - 1) // args.seq_length
    digests = [None] * dist.get_world_size()
    dist.all_gather_object(digests, about["sha256"])
    if len(set(digests)) > 1:
        problem = f"dataset-name: {args.dataset_name} is not the same on all machines"
    elif count < 2:
        tokens = f"{args.dataset_name} has {about['tokens']} tokens"
        problem = f"seq-length: {tokens}, too few for two sequences of {args.seq_length}"
    plumbing.all_exit_if(problem)
    # One sequence in twenty is held out, at most 1024: the same ones in all runs, for any seed.
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    size = min(max(count // 20, 1), 1024)
    held_out, train = (
        TokenDataset(folder / "tokens.bin", about["dtype"], args.seq_length, part.sort().values)
        for part in (order[:size], order[size:])
    )
    return train, held_out, about["sha256"]


def prepare_evaluation(dataset: Dataset, args, device: torch.device):
    """This rank's share of the held-out sequences, in batches of one shape (-1: no sequence)."""
    mine = torch.arange(len(dataset))[dist.get_rank() :: dist.get_world_size()]
    mine = F.pad(mine, (0, -len(mine) % args.batch_size), value=-1)
    batches = mine.view(-1, args.batch_size).tolist()
    pin_memory = device.type not in ("cpu", "mps")
    return DataLoader(dataset, collate_fn=tuple, pin_memory=pin_memory, batch_sampler=batches)
