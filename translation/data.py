"""Pairs to batches: tokenizers, sequences of tokens, padding, and batches of similar lengths."""

import hashlib
import json
import os
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import Dataset

from training.sampler import StepSampler

SPECIAL = ["[UNK]", "[PAD]", "[SOS]", "[EOS]"]  # the first four tokens of every tokenizer
UNK, PAD, SOS, EOS = range(4)
POOL = 50  # steps whose pairs are sorted by length together


def train_tokenizer(sentences: list[str], kind: str, vocab_size: int) -> Tokenizer:
    """A tokenizer of these sentences: kind is bpe or word. It gives back what it was given."""
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
    for file, content in ((path, tokenizer.to_str(pretty=True)), (trained_on, digest)):
        file.with_suffix(".tmp").write_text(content, encoding="utf-8")
        os.replace(file.with_suffix(".tmp"), file)
    return tokenizer


class PairDataset(Dataset):
    """Pairs of sentences as tokens: the source SOS … EOS, the target without both.

    A pair with more than `seq_len` tokens in one of them is left out; `too_long` counts these.
    """

    def __init__(self, pairs, source: Tokenizer, target: Tokenizer, seq_len: int):
        sources, targets = zip(*pairs, strict=True)
        encoded = [
            [each.ids for each in tokenizer.encode_batch(list(texts), add_special_tokens=False)]
            for tokenizer, texts in ((source, sources), (target, targets))
        ]
        fits = [max(map(len, each)) + 2 <= seq_len for each in zip(*encoded, strict=True)]
        kept = [each for each, fit in enumerate(fits) if fit]
        self.too_long = len(fits) - len(kept)
        self.pairs = [pairs[each] for each in kept]
        self.sources = [[SOS, *encoded[0][each], EOS] for each in kept]
        self.targets = [encoded[1][each] for each in kept]
        # What the loss of a pair is summed over: the target's tokens and its end.
        self.target_tokens = torch.tensor([len(each) + 1 for each in self.targets])

    def __len__(self):
        return len(self.pairs)

    def __getitems__(self, indices):
        """(source, decoder input, labels), each (batch, length) int64, padded to multiples of 8.

        The decoder is given SOS … and has to predict … EOS. Index -1 is an empty pair without a
        label, whose source has two tokens: attention to nothing at all would be 0 / 0.
        """
        sources = [self.sources[i] if i >= 0 else [SOS, EOS] for i in indices]
        inputs = [[SOS, *self.targets[i]] if i >= 0 else [SOS] for i in indices]
        labels = [[*self.targets[i], EOS] if i >= 0 else [] for i in indices]
        length = max(map(len, inputs))
        return padded(sources), padded(inputs, length), padded(labels, length)


def padded(rows: list[list[int]], length: int | None = None, multiple: int = 8) -> torch.Tensor:
    """Rows of tokens as one tensor, with PAD behind each, as long as a multiple of `multiple`."""
    length = -(-(length or max(map(len, rows))) // multiple) * multiple
    return torch.tensor([row + [PAD] * (length - len(row)) for row in rows])


class LengthSampler(StepSampler):
    """A StepSampler whose steps have pairs of similar lengths, so that little of them is padding.

    Which pairs are in which step is a function of seed, step and global batch size as before.
    """

    def __init__(self, lengths: torch.Tensor, batch_size, global_batch_size, seed):
        super().__init__(len(lengths), batch_size, global_batch_size, seed)
        self.lengths = lengths

    def order_of(self, epoch):
        """Shuffle; sort by length within pools of steps; shuffle the steps, the short one last."""
        generator = torch.Generator().manual_seed(self.seed + epoch)
        order = torch.randperm(self.length, generator=generator)
        whole = self.length - self.length % self.global_batch_size
        pools = order[:whole].split(POOL * self.global_batch_size)
        by_length = [pool[self.lengths[pool].argsort(stable=True)] for pool in pools]
        steps = torch.cat([*by_length, order[:0]]).view(-1, self.global_batch_size)
        steps = steps[torch.randperm(len(steps), generator=generator)]
        return torch.cat([steps.flatten(), order[whole:]])
