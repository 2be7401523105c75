"""Pairs to batches: tokenizers, sequences of tokens, padding, and batches of similar lengths."""

import hashlib
import json
import os
import uuid
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import Dataset

from training.sampler import StepSampler

SPECIAL = ["[UNK]", "[PAD]", "[SOS]", "[EOS]"]  # the first four tokens of every tokenizer
UNK, PAD, SOS, EOS = range(4)
POOL = 50  # steps whose pairs are sorted by length together


def train_tokenizer(sentences: list[str], kind: str, vocab_size: int) -> Tokenizer:
    """A tokenizer of these sentences: kind is bpe or word.

    Decoding gives back the text that was encoded, but for words that `word` has not seen."""
    special = {"special_tokens": SPECIAL, "vocab_size": vocab_size, "show_progress": False}
    if kind == "word":
        tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
        words = Regex(r" ?\w+| ?[^\w\s]+|\s+")  # a word has the space before it
        tokenizer.pre_tokenizer = pre_tokenizers.Split(words, "isolated")
        tokenizer.decoder = decoders.Fuse()
        trainer = trainers.WordLevelTrainer(**special)
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()  # so no sentence has an unknown letter
        trainer = trainers.BpeTrainer(**special, initial_alphabet=sorted(alphabet))
    tokenizer.train_from_iterator(sentences, trainer)
    return tokenizer


def load_tokenizer(path: Path, sentences: list[str], kind: str, vocab_size: int) -> Tokenizer:
    """The tokenizer in `path`, if it was trained on these sentences; else train and save it.

    What it was trained on is kept beside it: a tokenizer of other pairs would fit only in part.
    """
    digest = hashlib.sha256(json.dumps([sentences, kind, vocab_size]).encode()).hexdigest()
    trained_on = path.with_suffix(".sha256")
    try:
        if trained_on.read_text() == digest:
            return Tokenizer.from_file(str(path))
    except Exception:  # it is not there, or damaged: the library raises plain Exceptions
        pass
    tokenizer = train_tokenizer(sentences, kind, vocab_size)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(f".{uuid.uuid4().hex}.tmp")  # two machines may share the folder
    for file, content in ((path, tokenizer.to_str(pretty=True)), (trained_on, digest)):
        beside.write_text(content, encoding="utf-8")
        os.replace(beside, file)
    return tokenizer


class PairDataset(Dataset):
    """Pairs of sentences as tokens, both SOS … EOS.

    A pair with more than `seq_len` tokens in one of them is left out; `too_long` counts these.
    """

    def __init__(self, pairs, source: Tokenizer, target: Tokenizer, seq_len: int):
        encoded = [
            [np.array([SOS, *each.ids, EOS]) for each in tokenizer.encode_batch(list(texts))]
            for tokenizer, texts in zip((source, target), zip(*pairs, strict=True), strict=True)
        ]
        fits = [max(map(len, each)) <= seq_len for each in zip(*encoded, strict=True)]
        kept = [each for each, fit in enumerate(fits) if fit]
        self.too_long = len(fits) - len(kept)
        if not kept:
            raise ValueError(f"all {len(fits):,} pairs have more than {seq_len} tokens (--seq-len)")
        self.pairs = [pairs[each] for each in kept]
        # Index -1, which stands for no pair, finds the last: one without a label. Its source has
        # two tokens, since attention to nothing at all would be 0 / 0.
        nothing = [np.array([SOS, EOS])], [np.array([SOS, PAD])]
        self.sources, self.targets = (
            Sequences([texts[each] for each in kept] + last)
            for texts, last in zip(encoded, nothing, strict=True)
        )
        # What the loss of a pair is summed over: all tokens of the target but SOS.
        self.target_tokens = torch.from_numpy(self.targets.lengths[:-1] - 1)
        # By this pairs are sorted: those of a batch then have similar sources *and* targets.
        self.longer = self.target_tokens.maximum(torch.from_numpy(self.sources.lengths[:-1]))

    def __len__(self):
        return len(self.pairs)

    def __getitems__(self, indices):
        """(source, decoder input, labels), each (batch, length) int64, padded to multiples of 8.

        The decoder is given SOS … and has to predict … EOS.
        """
        sources, targets = self.sources.padded, self.targets.padded
        return sources(indices), targets(indices, last=-1), targets(indices, first=1)


class Sequences:
    """Sequences of tokens, one behind the other in one array: a batch is cut out by few calls."""

    def __init__(self, sequences: list[np.ndarray]):
        self.lengths = np.array([len(sequence) for sequence in sequences])
        self.tokens = np.concatenate(sequences)
        self.ends = self.lengths.cumsum()

    def __getitem__(self, i):
        return self.tokens[self.ends[i] - self.lengths[i] : self.ends[i]]

    def padded(self, indices, first=0, last=0) -> torch.Tensor:
        """(sequences, length), where length is a multiple of 8: each without its first `first`
        tokens and its last -`last`, with PAD behind it."""
        begins = self.ends[indices] - self.lengths[indices] + first
        ends = self.ends[indices] + last
        length = -(-(ends - begins).max() // 8) * 8
        where = begins[:, None] + np.arange(length)
        inside = where < ends[:, None]
        return torch.from_numpy(np.where(inside, self.tokens.take(where, mode="clip"), PAD))


class LengthSampler(StepSampler):
    """A StepSampler whose steps have pairs of similar lengths, so that little of them is padding.

    Which pairs are in which step is a function of seed, step and global batch size as before.
    """

    def __init__(self, lengths: torch.Tensor, batch_size, global_batch_size, seed):
        super().__init__(len(lengths), batch_size, global_batch_size, seed)
        self.lengths = lengths

    def order_of(self, epoch):
        """Shuffle; sort by length within pools of steps; shuffle the steps. What is left over, for
        a step of fewer pairs, comes last."""
        generator = torch.Generator().manual_seed(self.seed + epoch)
        order, size = torch.randperm(self.length, generator=generator), self.global_batch_size
        pools = [pool[self.lengths[pool].argsort(stable=True)] for pool in order.split(POOL * size)]
        # What is left over comes from a random place of the last pool: a run whose epochs ended
        # with the shortest pairs was behind at each evaluation (docs/translation.md).
        sizes = [size] * (self.length // size)
        first_of_last_pool = POOL * (len(pools) - 1)
        place = torch.randint(first_of_last_pool, len(sizes) + 1, (), generator=generator)
        sizes.insert(place, self.length % size)
        steps = list(torch.cat(pools).split(sizes))
        left_over = steps.pop(place)
        shuffled = torch.randperm(len(steps), generator=generator)
        return torch.cat([*(steps[step] for step in shuffled), left_over])
