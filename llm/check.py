"""Can this model learn to predict the next token? It is tried with a few, before any text is read.

To ask the configuration would be to know each architecture, and tomorrow's are not known.
"""

from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

LENGTH = 16  # tokens of a trial: all kinds of layers have their part in it, and any size is quick
LONGER = 256  # for what sums up blocks of tokens and has no part in so short a sequence


def text_config(config):
    """The part of a configuration that is about text: the whole of it in most models."""
    try:
        return config.get_text_config()
    except ValueError:  # it has an encoder of texts beside the decoder
        return config.get_text_config(decoder=True)


def some_tokens(model, rows: int, length: int) -> torch.Tensor:
    """Tokens (rows, length), the same each time, none with a meaning of its own."""
    config = text_config(model.config)
    fields = {**model.config.to_dict(), **config.to_dict()}
    special = {str(fields[name]) for name in fields if name.endswith(("token_id", "token_index"))}
    plain = [token for token in range(min(config.vocab_size, 1000)) if str(token) not in special]
    picked = torch.randint(len(plain), (rows, length), generator=torch.Generator().manual_seed(0))
    return torch.tensor(plain)[picked].to(model.device)


@contextmanager
def without_traces(model, training: bool, how: str = ""):
    """Within, the model is in training or evaluation. After that nothing has changed in it.

    A ValueError tells in one line what went wrong: whatever a model needs that it is not given.
    """
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with torch.random.fork_rng(devices=[]):  # the trial is on the CPU
        try:
            yield model.train(training)
        except Exception as error:
            why = " ".join(str(error).split())
            raise ValueError(f"it cannot be trained on text alone{how}: {why}") from error
        finally:
            for module, mode in modes:
                module.training = mode
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)


def logits_of(model, tokens) -> torch.Tensor:
    """The model's logits in evaluation."""
    with without_traces(model, training=False), torch.no_grad():
        return model(input_ids=tokens, use_cache=False).logits


def is_causal(model, length: int = LENGTH) -> bool:
    """Whether all logits before a token stay as they are when that token is changed."""
    tokens, at = some_tokens(model, 1, length), length - 3  # 13: not the first of any block
    changed = tokens.clone()
    others = some_tokens(model, 1, 100)
    changed[0, at] = others[others != tokens[0, at]][-1]
    zeros = [p for p in model.parameters() if p.dim() > 1 and not p.any()]
    with torch.no_grad():
        for parameter in zeros:  # a layer that begins as zeros would hide what goes through it
            parameter.normal_(std=0.02, generator=torch.Generator().manual_seed(0))
        moved = (logits_of(model, changed) - logits_of(model, tokens)).abs().amax(dim=(0, 2))
        for parameter in zeros:
            parameter.zero_()
    # Not exactly as they are: experts get other tokens together, and so round otherwise.
    rounding = max(1e-5 * moved[at], 1e-2 * moved[at + 1 :].max())
    return bool(moved[:at].max() <= rounding)


class Observer(TorchFunctionMode):
    """Notes on a forward pass: how long a sequence its tables take, and its dropouts."""

    def __init__(self, length: int):
        super().__init__()
        self.length, self.longest, self.dropouts = length, [], set()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is F.embedding and args[0].shape[-1:] == (self.length,):
            rows = args[0].reshape(-1, self.length)
            first = rows[0, 0].item()  # positions may begin at 2, or at that after the padding's
            if (rows == torch.arange(first, first + self.length)).all():
                self.longest.append(len(args[1]) - first)
        if function is F.dropout and kwargs.get("training", True):
            self.dropouts.add(float(kwargs["p"]))
        if function is F.scaled_dot_product_attention:
            self.dropouts.add(float(kwargs.get("dropout_p", 0.0)))
        return function(*args, **kwargs)


def try_training(model, dtype: str, length: int) -> tuple[Observer, list[str]]:
    """Go forward and backward once. Return what was noted, and which parameters had no part in it.

    A ValueError says why the model cannot be trained. No gradient is kept, so that the trial of a
    large model needs no memory for them.
    """
    arrived = set()

    def note(name, parameter):
        if not parameter.grad.isfinite().all():
            raise ValueError(f"the gradient of {name} is not finite")
        parameter.grad = None
        arrived.add(name)

    learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
    hooks = [
        p.register_post_accumulate_grad_hook(lambda p, name=name: note(name, p))
        for name, p in learning.items()
    ]
    tokens = some_tokens(model, 2, length + 1)
    rounded = dtype == "bfloat16"
    how = " in bfloat16 (try --dtype float32)" if rounded else ""
    try:
        with without_traces(model, training=True, how=how), Observer(length) as observer:
            with torch.autocast("cpu", torch.bfloat16, enabled=rounded):
                logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
            loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
            if not loss.isfinite():
                raise ValueError(f"its loss is {loss.item()}")
            loss.backward()
    finally:
        for hook in hooks:
            hook.remove()
        model.zero_grad()
    return observer, [name for name in learning if name not in arrived]
