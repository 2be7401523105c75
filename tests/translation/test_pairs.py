"""Sentence pairs to batches: what is read, held out, and how batches are made."""

import csv
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from translation.data import (
    EOS,
    PAD,
    SOS,
    LengthSampler,
    PairDataset,
    load_tokenizer,
    train_tokenizer,
)
from translation.pairs import is_held_out, read_pairs, split
from translation.scores import scores

PAIRS = [
    (f"I see {n} dogs, and the cat.", f"Vedo {n} cani, e l'altro è il gatto.") for n in range(400)
]


def test_files_of_pairs_are_read_alike():
    """TSV, JSON lines, the hub's form of JSON lines, and parquet; each pair once."""
    import pyarrow
    import pyarrow.parquet

    rows = [{"en": a, "it": b} for a, b in PAIRS]
    Path("p.tsv").write_text("en\tit\n" + "".join(f"{a}\t{b}\n" for a, b in PAIRS))
    Path("excel.tsv").write_bytes(b"\xef\xbb\xbf" + Path("p.tsv").read_bytes())
    with open("p.csv", "w", newline="") as file:
        csv.writer(file).writerows([("en", "it"), *PAIRS])
    Path("p.jsonl").write_text("\n".join(map(json.dumps, rows + rows[:3])))
    Path("hub.json").write_text(
        "\n".join(json.dumps({"id": 1, "translation": row}) for row in rows)
    )
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), "p.parquet")
    for name in "p.tsv", "excel.tsv", "p.csv", "p.jsonl", "hub.json", "p.parquet":
        assert read_pairs(name, "en", "it") == PAIRS
    assert read_pairs("p.tsv", "it", "en") == [(b, a) for a, b in PAIRS]


def test_what_is_no_pair_is_told():
    """By row and language; a kind of file that is not known, by those that are."""
    Path("p.jsonl").write_text('{"en": "a", "it": "b"}\n{"en": "a", "it": 3}')
    with pytest.raises(ValueError, match="row 2: 'it' is of type int, not a text"):
        read_pairs("p.jsonl", "en", "it")
    with pytest.raises(ValueError, match=r"row 1: 'de' is not there \(it has en, it\)"):
        read_pairs("p.jsonl", "en", "de")
    Path("p.jsonl").write_text('{"en": "a"')
    with pytest.raises(ValueError, match="line 1 column 11"):
        read_pairs("p.jsonl", "en", "it")
    Path("p.tsv").write_text("en\tit\na\tb\tc\n")
    with pytest.raises(ValueError, match="row 1 has 3 fields, and the first line 2"):
        read_pairs("p.tsv", "en", "it")
    Path("p.txt").write_text("a")
    with pytest.raises(ValueError, match="p.txt is none of parquet, arrow, JSON"):
        read_pairs("p.txt", "en", "it")
    with pytest.raises(ValueError, match="the default pairs are of en and it"):
        read_pairs("default", "en", "de")


def test_no_sentence_that_is_held_out_is_trained_on():
    """Neither its source nor its target, though another source may have the same target."""
    pairs = [*PAIRS, *((f"Again {n}", b) for n, (_, b) in enumerate(PAIRS))]
    train, held_out = split(pairs)
    assert 0.02 * len(pairs) < len(held_out) < 0.1 * len(pairs)
    assert held_out == [pair for pair in pairs if is_held_out(pair[0])]
    for side in 0, 1:
        assert not {pair[side] for pair in train} & {pair[side] for pair in held_out}
    assert len(train) > 0.8 * len(pairs)


@pytest.mark.parametrize("kind", ["bpe", "word"])
def test_tokenizers_give_back_what_they_were_given(kind):
    """Text that can be compared with raw references, without the special tokens."""
    texts = [b for _, b in PAIRS]
    tokenizer = train_tokenizer(texts, kind, 2000)
    assert [tokenizer.id_to_token(i) for i in range(4)] == ["[UNK]", "[PAD]", "[SOS]", "[EOS]"]
    for text in texts[:50]:
        assert tokenizer.decode([SOS, *tokenizer.encode(text).ids, EOS, EOS, PAD]) == text
    if kind == "bpe":
        assert tokenizer.decode(tokenizer.encode("日本 – né").ids) == "日本 – né", (
            "no letter is unknown"
        )


def test_a_tokenizer_of_other_sentences_is_trained_anew():
    """What is cached goes by its content; a damaged file is made again."""
    path, texts = Path("t/tokenizer_it.json"), [b for _, b in PAIRS]
    first = load_tokenizer(path, texts, "bpe", 300).to_str()
    os.utime(path, (1, 1))
    assert load_tokenizer(path, texts, "bpe", 300).to_str() == first and path.stat().st_mtime == 1
    assert load_tokenizer(path, texts[:50], "bpe", 300).to_str() != first
    path.write_text("{")
    again = load_tokenizer(path, texts[:50], "bpe", 300)
    assert json.loads(path.read_text()) == json.loads(again.to_str())


def test_batches_of_pairs():
    """SOS … EOS as source, the target once without its end and once without its beginning."""
    source, target = (
        train_tokenizer([pair[side] for pair in PAIRS], "word", 999) for side in (0, 1)
    )
    dataset = PairDataset(PAIRS[:30], source, target, 350)
    sources, inputs, labels = dataset.__getitems__([3, -1])
    row = [SOS, *source.encode(PAIRS[3][0]).ids, EOS]
    assert sources[0].tolist() == row + [PAD] * (sources.shape[1] - len(row))
    count = int(dataset.target_tokens[3])
    assert (
        inputs[0, 1:count].tolist()
        == labels[0, : count - 1].tolist()
        == target.encode(PAIRS[3][1]).ids
    )
    assert inputs[0, 0] == SOS and labels[0, count - 1] == EOS
    assert (labels[0, count:] == PAD).all() and (inputs[0, count:] == PAD).all()
    assert (labels[1] == PAD).all() and sources[1, :2].tolist() == [SOS, EOS]
    assert inputs.shape == labels.shape and sources.shape[1] % 8 == 0
    assert (labels != PAD).sum() == count
    assert dataset.longer.tolist() == [
        max(len(source.encode(a).ids) + 2, len(target.encode(b).ids) + 1) for a, b in PAIRS[:30]
    ]
    short = PairDataset([*PAIRS[:30], ("a " * 400, "b")], source, target, 60)
    assert short.too_long == 1 and len(short) == 30


def test_no_batch_takes_more_memory_than_the_largest():
    """Nor is the model compiled for pairs of equal length."""
    from train_translation import TranslationTrainer

    pairs = [*PAIRS[:30], ("a " * 40, "b"), ("b", "a " * 47)]  # the longest of each are of two
    tokenizers = [train_tokenizer([p[side] for p in PAIRS], "word", 999) for side in (0, 1)]
    dataset = PairDataset(pairs, *tokenizers, 350)
    trainer = SimpleNamespace(train_data=SimpleNamespace(dataset=dataset))
    largest = TranslationTrainer._largest_batch(trainer, 32)
    for batch in dataset.__getitems__(list(range(32))), dataset.__getitems__([31] * 32):
        assert all(a.shape <= b.shape for a, b in zip(batch, largest, strict=True))
    assert largest[0].shape[1] > largest[1].shape[1] == largest[2].shape[1]


def test_steps_have_pairs_of_similar_lengths_and_all_of_them(monkeypatch):
    """Each pair once in an epoch, on any number of ranks, and little padding."""
    lengths = torch.randint(3, 60, (1003,), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    sampler = LengthSampler(lengths, 8, 32, seed=0)
    steps = [sampler.samples(step) for step in range(2 * sampler.steps_per_epoch)]
    first, second = steps[: len(steps) // 2], steps[len(steps) // 2 :]
    for epoch in first, second:
        assert torch.cat(epoch).sort().values.tolist() == list(range(1003))
        assert [len(step) for step in epoch] == [32] * 31 + [11]
        padding = [1 - lengths[step].float().mean() / lengths[step].max() for step in epoch]
        assert sum(padding) / len(padding) < 0.05
    assert [step.tolist() for step in first] != [step.tolist() for step in second]
    means = torch.tensor([lengths[step].float().mean() for step in first[:-1]])
    assert (means.diff() > 0).float().mean() < 0.8, "the short ones do not come first"
    for world_size in 2, 3:
        monkeypatch.setattr(dist, "get_world_size", lambda n=world_size: n)
        other = LengthSampler(lengths, 2, 32, seed=0)
        assert [other.samples(step).tolist() for step in range(5)] == [
            s.tolist() for s in steps[:5]
        ]


@pytest.mark.parametrize("global_batch_size", [8, 32])
def test_the_last_step_is_like_the_others(monkeypatch, global_batch_size):
    """What is left over, for a smaller step, is as similar as in others, and of any length."""
    lengths = torch.randint(3, 60, (1003,), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    sampler = LengthSampler(lengths, 8, global_batch_size, seed=0)
    means = []
    for epoch in range(30):
        steps = lengths[sampler.order_of(epoch)].split(global_batch_size)
        assert max(step.max() - step.min() for step in steps) <= 6
        means.append(steps[-1].float().mean())
    assert min(means) < 15 and max(means) > 45


def test_scores_of_all_sentences_together():
    """A perfect translation has 100, 100, 0 and 0, and one wrong word of many counts as such."""
    texts = [b for _, b in PAIRS[:20]]
    found, signature = scores(texts, texts)
    assert found == pytest.approx({"bleu": 100, "chrf": 100, "cer": 0, "wer": 0})
    assert "tok:13a" in signature
    found, _ = scores([*texts[:-1], texts[-1].replace("gatto", "cane")], texts)
    assert 90 < found["bleu"] < 100 and found["wer"] == pytest.approx(1 / (20 * 8))


def test_the_digest_of_data_is_that_of_older_snapshots():
    """Else a run would be told, after an update, that its data is other data."""
    from train_translation import digest_of

    pairs = [("a dog", "un cane"), ("a cat", "un gatto")]
    tokenizers = (train_tokenizer(list(texts), "word", 99) for texts in zip(*pairs, strict=True))
    older = "40025946ae249e2145ef7ada7f33ac8a7531bddf5d14c93ff3127c4fd2f169bc"
    assert digest_of(PairDataset(pairs, *tokenizers, 350)) == older
