"""The Transformer that translates: its layers, its loss, and how it finds a translation.

As in "Attention Is All You Need" (Vaswani et al. 2017, arXiv:1706.03762), but each layer norm
stands before what it is for, not after the sum (pre-norm): a deep stack then learns more easily.
Keys and values are pairs of tensors (batch, heads, length, d_model / heads), one for each layer.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    """Every query looks at all keys, with several heads, and takes a mean of their values."""

    def __init__(self, d_model: int, heads: int, dropout: float):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.query = nn.Linear(d_model, d_model, bias=False)
        self.key = nn.Linear(d_model, d_model, bias=False)
        self.value = nn.Linear(d_model, d_model, bias=False)
        self.output = nn.Linear(d_model, d_model, bias=False)

    def _into_heads(self, x):
        """(batch, length, d_model) → (batch, heads, length, d_model / heads)."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def keys_and_values(self, x):
        """Of x (batch, length, d_model). Apart from forward, so that they can be kept for later."""
        return self._into_heads(self.key(x)), self._into_heads(self.value(x))

    def forward(self, x, keys_and_values, mask=None, is_causal=False):
        """x and result: (batch, queries, d_model). The mask is True where a key may be seen, and
        has a shape that broadcasts to (batch, heads, queries, keys). is_causal: as if query i had
        a mask that hides all keys after key i, but such keys are not even computed with."""
        dropout = self.dropout if self.training else 0.0
        queries = self._into_heads(self.query(x))
        mean = F.scaled_dot_product_attention(queries, *keys_and_values, mask, dropout, is_causal)
        return self.output(mean.transpose(1, 2).flatten(2))


def feed_forward(d_model: int, d_ff: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model))


class EncoderLayer(nn.Module):
    def __init__(self, d_model: int, heads: int, d_ff: int, dropout: float):
        super().__init__()
        self.attention_norm = nn.LayerNorm(d_model)
        self.attention = Attention(d_model, heads, dropout)
        self.feed_forward_norm = nn.LayerNorm(d_model)
        self.feed_forward = feed_forward(d_model, d_ff)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, mask):
        """x and result: (batch, source, d_model). mask: (batch, 1, 1, source)."""
        normed = self.attention_norm(x)
        x = x + self.dropout(self.attention(normed, self.attention.keys_and_values(normed), mask))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class DecoderLayer(nn.Module):
    def __init__(self, d_model: int, heads: int, d_ff: int, dropout: float):
        super().__init__()
        self.target_norm = nn.LayerNorm(d_model)
        self.target_attention = Attention(d_model, heads, dropout)
        self.source_norm = nn.LayerNorm(d_model)
        self.source_attention = Attention(d_model, heads, dropout)
        self.feed_forward_norm = nn.LayerNorm(d_model)
        self.feed_forward = feed_forward(d_model, d_ff)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, source, mask, past=None):
        """x: (batch, target, d_model). source: its keys and values. mask: (batch, 1, 1, source).
        past: keys and values of the tokens before x, and then x is a single token.
        Returns an x of the same shape, and the keys and values of all tokens so far."""
        normed = self.target_norm(x)
        target = self.target_attention.keys_and_values(normed)
        if past is not None:  # the newest token may see all, so there is nothing to hide
            target = tuple(torch.cat(pair, dim=2) for pair in zip(past, target, strict=True))
        # Padding stands at the end of a target. So "no later token" hides it from all real tokens,
        # and what padding itself computes has no loss: it needs no mask.
        x = x + self.dropout(self.target_attention(normed, target, is_causal=past is None))
        x = x + self.dropout(self.source_attention(self.source_norm(x), source, mask))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x))), target


def positions(start: int, stop: int, d_model: int, device) -> torch.Tensor:
    """Sines and cosines of many wavelengths, (stop - start, d_model), which tell where a token is.

    Computed where they are needed: so there is no longest sentence, and nothing to save."""
    exponents = torch.arange(0, d_model, 2, device=device) / d_model
    angles = torch.arange(start, stop, device=device)[:, None] / 10000**exponents
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)


class Transformer(nn.Module):
    """Training calls it: model(source, target). Decoding uses its parts: `greedy` and `beam`.

    Sources begin with a real token and are padded at the end with pad_source. Targets are padded at
    the end, with anything: the model need not know, only `loss_sum` does."""

    def __init__(
        self,
        source_vocab: int,
        target_vocab: int,
        pad_source: int,
        d_model: int = 512,
        layers: int = 6,
        heads: int = 8,
        d_ff: int = 2048,
        dropout: float = 0.1,
        tied: bool = False,
    ):
        """tied: the output and the embedding of the target have the same weights."""
        super().__init__()
        if d_model % 2 or d_model % heads:
            raise ValueError(f"d_model: a multiple of 2 and of heads ({heads}), not {d_model}")
        self.pad_source, self.d_model = pad_source, d_model
        sizes = (d_model, heads, d_ff, dropout)
        self.source_embedding = nn.Embedding(source_vocab, d_model)
        self.target_embedding = nn.Embedding(target_vocab, d_model)
        self.encoder = nn.ModuleList(EncoderLayer(*sizes) for _ in range(layers))
        self.decoder = nn.ModuleList(DecoderLayer(*sizes) for _ in range(layers))
        # Pre-norm leaves the sum of all layers as it is: it is brought to scale at the end.
        self.encoder_norm, self.decoder_norm = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.output = nn.Linear(d_model, target_vocab, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.apply(self._initialise)
        if tied:
            self.output.weight = self.target_embedding.weight

    def _initialise(self, module):
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            # Right for an output, which it may be too. As an input it is multiplied by √d_model,
            # and then it is of the size of the positions that are added.
            nn.init.normal_(module.weight, std=self.d_model**-0.5)

    def _embed(self, embedding, tokens, start=0):
        """(batch, length) → (batch, length, d_model). start: how many tokens stand before."""
        where = positions(start, start + tokens.shape[1], self.d_model, tokens.device)
        return self.dropout(embedding(tokens) * math.sqrt(self.d_model) + where)

    def forward(self, source, target):
        """source (batch, source), target (batch, target) → logits (batch, target, target_vocab).
        Those at a position are for the token after it, and depend on no later token."""
        return self.decode(target, *self.encode(source))[0]

    def encode(self, source):
        """What decode needs of a source (batch, source): for each layer of the decoder keys and
        values, and the mask (batch, 1, 1, source), True where a token may be seen."""
        mask = source != self.pad_source
        # A row that only fills up a batch is nothing but padding. It too needs something to see:
        # a mean of nothing is NaN, at least on some devices.
        mask[:, 0] = True
        mask = mask[:, None, None, :]
        x = self._embed(self.source_embedding, source)
        for layer in self.encoder:
            x = layer(x, mask)
        x = self.encoder_norm(x)
        return [layer.source_attention.keys_and_values(x) for layer in self.decoder], mask

    def decode(self, target, source, mask, past=None):
        """source and mask are what encode returns. past: what decode has returned for the tokens
        before, and then target is the next token, (batch, 1).
        Returns logits (batch, target, target_vocab), and for each layer keys and values so far."""
        start = past[0][0].shape[2] if past else 0
        x, so_far = self._embed(self.target_embedding, target, start), []
        for i, layer in enumerate(self.decoder):
            x, keys_and_values = layer(x, source[i], mask, past[i] if past else None)
            so_far.append(keys_and_values)
        return self.output(self.decoder_norm(x)), so_far


def loss_sum(logits, labels, pad: int, label_smoothing: float = 0.0) -> torch.Tensor:
    """Cross-entropy in nats, summed over all labels but pad, which is that of the target.

    logits (batch, target, target_vocab), labels (batch, target). A sum, in float32: the number of
    tokens that it is to be divided by is known only to all ranks together."""
    return F.cross_entropy(
        logits.flatten(0, 1).float(),
        labels.flatten(),
        ignore_index=pad,
        reduction="sum",
        label_smoothing=label_smoothing,
    )


@torch.no_grad()
def greedy(model: Transformer, source, sos: int, eos: int, longest: int) -> torch.Tensor:
    """Of each source (batch, source) a translation that takes the likeliest token at each step.

    Returns tokens (batch, length) without sos, length <= longest: a row that has ended is filled up
    with eos. The model is to be in eval mode."""
    tokens = torch.full((len(source), 1), sos, device=source.device)
    ended = (source == model.pad_source).all(dim=1, keepdim=True)  # what only fills up a batch
    (source, mask), past = model.encode(source), None
    while tokens.shape[1] <= longest and not ended.all():
        logits, past = model.decode(tokens[:, -1:], source, mask, past)
        newest = logits.argmax(-1).masked_fill(ended, eos)
        tokens = torch.cat((tokens, newest), dim=1)
        ended = newest == eos
    return tokens[:, 1:]


def select(layers, rows):
    """These rows of the batch, of the keys and values of each layer."""
    return [(keys[rows], values[rows]) for keys, values in layers]


@torch.no_grad()
def beam(
    model: Transformer, source, sos: int, eos: int, longest: int, beams: int = 4, alpha: float = 0.6
) -> torch.Tensor:
    """As greedy, but at each step it keeps the best few beginnings (beams), not only one.

    A sum of log-probabilities falls with each token, so the short would win: it is divided by
    ((5 + length) / 6) ** alpha (Wu et al. 2016, arXiv:1609.08144), which alpha = 0 leaves out."""
    batch, device = len(source), source.device
    first = torch.arange(batch, device=device)[:, None] * beams  # row of the first beam of each
    source, mask = model.encode(source.repeat_interleave(beams, dim=0))
    tokens = torch.full((batch * beams, 1), sos, device=device)
    ended = torch.zeros((batch, beams), dtype=torch.bool, device=device)
    lengths, past = torch.zeros((batch, beams), device=device), None
    # They all begin alike, and would stay alike: at first only one of them counts.
    sums = torch.full((batch, beams), -math.inf, device=device)
    sums[:, 0] = 0
    while tokens.shape[1] <= longest and not ended.all():
        logits, past = model.decode(tokens[:, -1:], source, mask, past)
        log_p = logits.float().log_softmax(-1).view(batch, beams, -1)
        # What has ended goes on in one way only, by another eos, which costs nothing.
        log_p.masked_fill_(ended[..., None], -math.inf)[..., eos].masked_fill_(ended, 0)
        lengths += ~ended
        extended = sums[..., None] + log_p  # (batch, beams, target_vocab)
        scores = extended / ((5 + lengths[..., None]) / 6) ** alpha
        best = scores.flatten(1).topk(beams).indices  # best first
        parents, newest = best // log_p.shape[-1], best % log_p.shape[-1]
        sums, lengths = extended.flatten(1).gather(1, best), lengths.gather(1, parents)
        ended = newest == eos
        rows = (first + parents).flatten()
        tokens = torch.cat((tokens[rows], newest.view(-1, 1)), dim=1)
        past = select(past, rows)
    return tokens.view(batch, beams, -1)[:, 0, 1:]
