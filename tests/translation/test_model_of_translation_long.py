"""The Transformer of translation/model.py, compiled."""

import shutil

import pytest
import torch
from test_model_of_translation import PAD, TARGET_VOCAB, build, gradients, sentences
from torch import nn

from translation.model import loss_sum


@pytest.mark.skipif(shutil.which("g++") is None, reason="on a CPU, it needs a C++ compiler")
def test_it_is_compiled_once_for_all_lengths():
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    model = build()
    compiled = torch.compile(model, dynamic=True, fullgraph=True)
    for lengths in ([3, 5], [8, 6], [4, 2]):
        source, target = sentences(lengths), sentences(lengths[::-1], TARGET_VOCAB)
        target = nn.functional.pad(target, (0, 3), value=PAD)
        _, expected = gradients(model, source, target)
        model.zero_grad()
        logits = compiled(source, target[:, :-1])
        loss_sum(logits, target[:, 1:], PAD).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad.allclose(expected[name], atol=1e-4), name
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
