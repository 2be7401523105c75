"""translation/model.py: what the model sees and what not, its loss, and that decoding is right."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from translation.model import Transformer, beam, greedy, loss_sum, positions

PAD, SOS, EOS, WORDS = 0, 1, 2, 3  # WORDS: the first id of a word


SOURCE_VOCAB, TARGET_VOCAB = 11, 13


SIZES = {"d_model": 32, "layers": 2, "heads": 4, "d_ff": 64}


LENGTHS = [2, 5, 3, 7, 4, 1]


def build(**options):
    torch.manual_seed(0)
    return Transformer(SOURCE_VOCAB, TARGET_VOCAB, PAD, **SIZES | {"dropout": 0.0} | options)


def sentences(lengths, vocab=SOURCE_VOCAB, seed=0):
    """One row of SOS, words, EOS for each length, padded to the longest."""
    generator = torch.Generator().manual_seed(seed)
    rows = [
        torch.tensor([SOS, *torch.randint(WORDS, vocab, (n,), generator=generator).tolist(), EOS])
        for n in lengths
    ]
    return pad_sequence(rows, batch_first=True, padding_value=PAD)


def gradients(model, source, pairs):
    """Of the loss of these pairs, by name of the parameter."""
    model.zero_grad()
    loss = loss_sum(model(source, pairs[:, :-1]), pairs[:, 1:], PAD)
    loss.backward()
    return loss, {name: p.grad.clone() for name, p in model.named_parameters()}


def until_end(row):
    """The tokens of a row up to its first EOS, as a list."""
    tokens = row.tolist()
    return tokens[: tokens.index(EOS)] if EOS in tokens else tokens


@pytest.fixture(scope="module")
def copier():
    """A model that has learnt by heart to copy some sentences, and those."""
    model, source = build(), sentences([1, 2, 3, 4, 5, 6, 7, 8])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(120):
        loss, _ = gradients(model, source, source)
        optimizer.step()
    assert loss / (source[:, 1:] != PAD).sum() < 0.05
    return model.eval(), source


def test_logits_have_a_shape_of_their_own_lengths_in_training_and_in_bfloat16():
    model, source, target = build(dropout=0.1), sentences([3, 7]), sentences([4, 2], TARGET_VOCAB)
    assert model(source, target).shape == (2, 6, TARGET_VOCAB)
    assert model(source, target).dtype == torch.float32
    assert not model(source, target).equal(model(source, target)), "no dropout"
    with torch.autocast("cpu", torch.bfloat16):
        logits = model.eval()(source, target)
        assert logits.dtype == torch.bfloat16
        assert greedy(model, source, SOS, EOS, 5).shape[0] == 2
    assert loss_sum(logits, target, PAD).dtype == torch.float32
    assert logits.float().allclose(model(source, target), atol=0.1)
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_dropout_is_on_embeddings_sublayers_and_attention_weights_in_training_only():
    model, source = build(dropout=0.5), sentences([5, 5])
    count = {"in": 0}
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(lambda *_: count.update({"in": count["in"] + 1}))
    model(source, source)
    assert count["in"] == 2 + 2 * 2 + 2 * 3  # embeddings, encoder, decoder
    x = torch.randn(1, 5, 32)
    attention = model.encoder[0].attention
    assert not attention(x, attention.keys_and_values(x)).equal(
        attention(x, attention.keys_and_values(x))
    )
    model.eval()
    assert model(source, source).equal(model(source, source))


def test_positions_are_those_of_the_paper():
    table = positions(2, 6, 8, "cpu")
    for position, i in itertools.product(range(2, 6), range(4)):
        angle = position / 10000 ** (2 * i / 8)
        expected = torch.tensor([math.sin(angle), math.cos(angle)])
        assert table[position - 2, 2 * i : 2 * i + 2].allclose(expected, atol=1e-6)


def test_no_logit_depends_on_a_later_token_and_each_depends_on_its_own():
    model, source, target = build(), sentences([6]), sentences([8], TARGET_VOCAB)
    logits = model(source, target)
    for i in range(target.shape[1]):
        changed = target.clone()
        changed[0, i] = (changed[0, i] + 1) % TARGET_VOCAB
        same = model(source, changed).isclose(logits, atol=1e-6).all(-1)[0]
        assert same[:i].all() and not same[i:].any()


def test_each_logit_depends_on_each_token_of_the_source_and_on_their_order():
    model, source, target = build(), sentences([6]), sentences([3], TARGET_VOCAB)
    logits = model(source, target)
    for i in range(source.shape[1]):
        changed = source.clone()
        changed[0, i] = (changed[0, i] + 1) % (SOURCE_VOCAB - 1) + 1
        assert not model(source=changed, target=target).isclose(logits, atol=1e-6).all(-1).any()
    assert not model(source.flip(1), target).allclose(logits, atol=1e-3)


def test_padding_of_source_and_target_changes_neither_logits_nor_loss_nor_gradients():
    model, source, target = build(), sentences([3, 5]), sentences([6, 2], TARGET_VOCAB)
    loss, expected = gradients(model, source, target)
    padded_source = nn.functional.pad(source, (0, 4), value=PAD)
    padded_target = nn.functional.pad(target, (0, 3), value=PAD)
    logits = model(padded_source, padded_target)[:, : target.shape[1]]
    real = target != PAD  # where padding stands there is no loss
    assert logits[real].allclose(model(source, target)[real], atol=1e-5)
    padded_loss, padded = gradients(model, padded_source, padded_target)
    assert padded_loss.allclose(loss)
    for name in expected:
        assert padded[name].allclose(expected[name], atol=1e-5), name


def test_a_row_of_nothing_but_padding_changes_no_other():
    model, source, target = build(), sentences([3, 5]), sentences([6, 2], TARGET_VOCAB)
    loss, expected = gradients(model, source, target)
    filled = [torch.cat((each, torch.full_like(each[:1], PAD))) for each in (source, target)]
    assert model.encode(filled[0])[1].any(-1).all()  # True somewhere in each row of the mask
    assert model(*filled).isfinite().all()
    filled_loss, filled_gradients = gradients(model, *filled)
    assert filled_loss.allclose(loss)
    for name in expected:
        assert filled_gradients[name].allclose(expected[name], atol=1e-5), name
    loss, nothing = gradients(model, filled[0][2:], filled[1][2:])
    assert loss == 0 and not any(gradient.any() for gradient in nothing.values())


@pytest.mark.parametrize("tied", (False, True))
def test_a_fresh_model_guesses_and_every_parameter_gets_a_gradient(tied):
    torch.manual_seed(0)
    model = Transformer(300, 500, PAD, **SIZES, dropout=0.0, tied=tied)
    source, target = sentences([20] * 16, 300), sentences([20] * 16, 500, seed=1)
    loss, found = gradients(model, source, target)
    count = (target[:, 1:] != PAD).sum()
    assert abs(loss / count - math.log(500)) < 0.6
    for name, gradient in found.items():
        assert gradient.norm() / count > 1e-5, name


def test_tied_weights_are_one_tensor_and_the_names_of_weights_stay():
    free, tied = build(), build(tied=True)
    assert tied.output.weight is tied.target_embedding.weight
    assert free.output.weight is not free.target_embedding.weight
    count = [sum(p.numel() for p in model.parameters()) for model in (free, tied)]
    assert count[0] - count[1] == TARGET_VOCAB * 32
    attention = ["query.weight", "key.weight", "value.weight", "output.weight"]
    both = [f"{part}.{i}" for part in ("encoder", "decoder") for i in range(2)]
    decoder = both[2:]
    norms = [f"{layer}.feed_forward_norm" for layer in both] + ["encoder_norm", "decoder_norm"]
    norms += [f"{layer}.attention_norm" for layer in both[:2]]
    norms += [f"{layer}.{part}_norm" for layer in decoder for part in ("source", "target")]
    linear = norms + [f"{layer}.feed_forward.{i}" for layer in both for i in (0, 2)]
    names = {f"{name}.{kind}" for name in linear for kind in ("weight", "bias")}
    names |= {f"{layer}.attention.{name}" for layer in both[:2] for name in attention}
    for part in ("source", "target"):
        names |= {f"{layer}.{part}_attention.{name}" for layer in decoder for name in attention}
        names.add(f"{part}_embedding.weight")
    assert set(free.state_dict()) == names | {"output.weight"} == set(tied.state_dict())


def copy_weights(ours, theirs):
    """The weights of one of our attentions or norms, into torch's."""
    if isinstance(ours, nn.LayerNorm | nn.Linear):
        return theirs.load_state_dict(ours.state_dict())
    weights = (ours.query.weight, ours.key.weight, ours.value.weight)
    theirs.in_proj_weight.copy_(torch.cat(weights))
    theirs.out_proj.weight.copy_(ours.output.weight)


@torch.no_grad()
def test_layers_compute_what_those_of_torch_do():
    model, kind = build(), {"dropout": 0.0, "norm_first": True, "batch_first": True}
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) / 10)  # norms and biases too
    x, memory = torch.randn(3, 7, 32), torch.randn(3, 5, 32)
    padding = torch.arange(7) >= torch.tensor([[7], [4], [1]])
    ours, theirs = model.encoder[0], nn.TransformerEncoderLayer(32, 4, 64, **kind)
    copy_weights(ours.attention, theirs.self_attn)
    copy_weights(ours.attention_norm, theirs.norm1)
    copy_weights(ours.feed_forward_norm, theirs.norm2)
    copy_weights(ours.feed_forward[0], theirs.linear1)
    copy_weights(ours.feed_forward[2], theirs.linear2)
    expected = theirs(x, src_key_padding_mask=padding)
    assert ours(x, ~padding[:, None, None]).allclose(expected, atol=1e-5)

    ours, theirs = model.decoder[0], nn.TransformerDecoderLayer(32, 4, 64, **kind)
    copy_weights(ours.target_attention, theirs.self_attn)
    copy_weights(ours.source_attention, theirs.multihead_attn)
    copy_weights(ours.target_norm, theirs.norm1)
    copy_weights(ours.source_norm, theirs.norm2)
    copy_weights(ours.feed_forward_norm, theirs.norm3)
    copy_weights(ours.feed_forward[0], theirs.linear1)
    copy_weights(ours.feed_forward[2], theirs.linear2)
    causal = nn.Transformer.generate_square_subsequent_mask(7)
    expected = theirs(x, memory, causal, memory_key_padding_mask=padding[:, :5])
    source = ours.source_attention.keys_and_values(memory)
    assert ours(x, source, ~padding[:, None, None, :5])[0].allclose(expected, atol=1e-5)


def test_the_loss_is_the_sum_over_labels_that_are_not_padding():
    logits, labels = torch.randn(2, 3, 5), torch.tensor([[4, 1, PAD], [2, PAD, PAD]])
    log_p = logits.log_softmax(-1)
    real = [(0, 0, 4), (0, 1, 1), (1, 0, 2)]
    for smoothing in (0.0, 0.1):
        expected = -sum(
            (1 - smoothing) * log_p[i, j, label] + smoothing * log_p[i, j].mean()
            for i, j, label in real
        )
        assert loss_sum(logits, labels, PAD, smoothing).allclose(expected)
    other_pad = loss_sum(logits, torch.where(labels == PAD, 3, labels), 3)
    assert other_pad.allclose(loss_sum(logits, labels, PAD))


def test_what_is_learnt_by_heart_is_decoded(copier):
    model, source = copier
    for decoded in (
        greedy(model, source, SOS, EOS, 12),
        beam(model, source, SOS, EOS, 12, beams=3),
    ):
        for row, sentence in zip(decoded, source, strict=True):
            assert until_end(row) == until_end(sentence[1:])
            assert (row[len(until_end(row)) :] == EOS).all()
    assert greedy(model, source, SOS, EOS, 12).shape == (8, 9)  # no step after the last EOS
    assert greedy(model, source, SOS, EOS, 3).shape == (8, 3)
    assert beam(model, source, SOS, EOS, 3).shape == (8, 3)


def test_a_row_of_nothing_but_padding_keeps_nobody_waiting(copier):
    model, source = copier
    filled = torch.cat((source[:3], torch.full_like(source[:1], PAD)))
    decoded = greedy(model, filled, SOS, EOS, 12)
    assert decoded[:3].equal(greedy(model, source[:3], SOS, EOS, 12))
    assert decoded.shape[1] == 4 and (decoded[3] == EOS).all()
    assert beam(model, filled, SOS, EOS, 12)[:3, :4].equal(decoded[:3])


def plain_beam(model, source, longest, beams, alpha):
    """The translation of one source, as plainly as can be: no cache, no batch, no padding."""
    kept = [([], 0.0)]  # tokens, and the logarithm of their probability
    for _ in range(longest):
        extended = [(tokens, log_p) for tokens, log_p in kept if EOS in tokens]
        for tokens, log_p in kept:
            if EOS not in tokens:
                logits = model(source[source != PAD][None], torch.tensor([[SOS, *tokens]]))
                after = logits[0, -1].log_softmax(-1).tolist()
                extended += [([*tokens, i], log_p + more) for i, more in enumerate(after)]
        extended.sort(key=lambda each: each[1] / ((5 + len(each[0])) / 6) ** alpha, reverse=True)
        kept = extended[:beams]
    return kept[0][0]


@torch.no_grad()
def test_the_cache_changes_no_logit():
    model, source, target = build().eval(), sentences([3, 6]), sentences([7, 7], TARGET_VOCAB)
    encoded, past, steps = model.encode(source), None, []
    for token in target.split(1, dim=1):
        logits, past = model.decode(token, *encoded, past)
        steps.append(logits)
    assert torch.cat(steps, dim=1).allclose(model(source, target), atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("seed", (1, 2, 4, 5))
def test_decoding_is_that_of_one_by_one_without_a_cache(seed):
    # What a fresh model says is long or short by chance, and EOS is in some of it.
    torch.manual_seed(seed)
    model, source = Transformer(SOURCE_VOCAB, 5, PAD, **SIZES).eval(), sentences(LENGTHS)
    decoded = greedy(model, source, SOS, EOS, 8)
    assert beam(model, source, SOS, EOS, 8, beams=1).equal(decoded)
    # alpha is large, so that what is longer may yet overtake what has ended.
    decoded = {1: decoded, 2: beam(model, source, SOS, EOS, 8, beams=2, alpha=2.0)}
    for beams, rows in decoded.items():
        for row, sentence in zip(rows, source, strict=True):
            expected = plain_beam(model, sentence, 8, beams, alpha=2.0)
            assert row[: len(expected)].tolist() == expected
            assert (row[len(expected) :] == EOS).all()


@torch.no_grad()
@pytest.mark.parametrize("beams", (3, 4**4))  # 256: all that there is
def test_beams_prefer_long_translations_the_more_the_larger_alpha_is(beams):
    torch.manual_seed(4)
    model, source = Transformer(SOURCE_VOCAB, 4, PAD, **SIZES).eval(), sentences(LENGTHS)
    found = []
    for alpha in (0.0, 0.6, 2.0):
        rows = beam(model, source, SOS, EOS, 4, beams=beams, alpha=alpha)
        found.append([until_end(row) for row in rows])
        expected = [plain_beam(model, sentence, 4, beams, alpha) for sentence in source]
        assert [(row + [EOS])[:4] for row in found[-1]] == expected
    lengths = [sum(map(len, rows)) for rows in found]
    assert lengths[0] < lengths[1] < lengths[2]


def test_sizes_that_do_not_fit_are_refused():
    for d_model, heads in ((33, 3), (30, 4)):
        with pytest.raises(ValueError, match=f"2 and of heads .{heads}., not {d_model}"):
            build(d_model=d_model, heads=heads)
