"""A language model: its configuration and tokenizer, what makes it fast, and its loss."""

import copy
import json
import math
import re
import textwrap

import torch
import torch.distributed as dist
import transformers
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from llm.check import (
    LENGTH,
    LONGER,
    is_causal,
    logits_of,
    some_tokens,
    text_config,
    try_training,
    without_traces,
)

NO_TARGET = -100  # a target that no loss is computed for
DROPOUT = re.compile(r"(pdrop|dropout|dropout_(p|prob|rate))$")  # names in configurations
MASK = re.compile("sliding|(?<!max_)window|chunked|attention_chunk|local_att|sparse_att|index_topk")
OF_THIS_COPY = ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "architectures")


def load_tokenizer(name: str):
    """The tokenizer of that name or, for "bytes", one with a token for each byte."""
    if name != "bytes":
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    vocabulary = {letter: i for i, letter in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")


def load_model(args):
    """The tokenizer and the model that `args` name, on the CPU, in float32, made fast.

    What `args` left open about them is set there: seq_length and dropout. A ValueError says what
    does not fit together, or why the model cannot learn to predict the next token.
    """
    torch.manual_seed(args.seed)  # the same initial weights in every run and process
    tokenizer = load_tokenizer(args.tokenizer_name)
    if tokenizer.eos_token_id is None or not tokenizer.is_fast:
        raise ValueError(f"the tokenizer {args.tokenizer_name} has no end-of-text token or is slow")
    config = load_config(args.model_name)
    vocab_size = text_config(config).vocab_size
    if len(tokenizer) > vocab_size:
        sizes = f"{len(tokenizer)} tokens, the model's vocabulary {vocab_size}"
        raise ValueError(f"the tokenizer {args.tokenizer_name} has {sizes}: they do not fit")
    given = args.seq_length
    fit_seq_length(args, given, longest(config))
    if args.dropout is None and args.init == "fresh":
        args.dropout = 0.0  # who sees a text once cannot learn it by heart
    set_dropout(config, args.dropout)
    if getattr(config, "activation_function", None) == "gelu_new":
        config.activation_function = "gelu_pytorch_tanh"  # the same function in one kernel
    model = build(args, config)
    length = min(LENGTH, max(4, args.seq_length))
    drop_causal_mask(model, length)
    refuse_unless_causal(model, length)
    make_fast(model, args.dtype)
    try_out(model, args, given, length)
    return tokenizer, model


def load_config(name: str):
    """The configuration of that name, or that of a small GPT for "byte-gpt"."""
    if name == "byte-gpt":
        sizes = {"n_layer": 4, "n_embd": 128, "n_head": 4, "n_positions": 256, "vocab_size": 257}
        return GPT2Config(**sizes, bos_token_id=256, eos_token_id=256)
    # False: no code that comes with a model is run.
    config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        version = f"transformers {transformers.__version__}"
        raise ValueError(f"{version} has no causal language model of the type {config.model_type}")
    return config


def build(args, config):
    """The model of that configuration, in float32."""
    try:
        if args.init == "pretrained":
            kinds = {"config": config, "trust_remote_code": False}
            model = AutoModelForCausalLM.from_pretrained(args.model_name, **kinds)
        else:
            model = AutoModelForCausalLM.from_config(config)
    except OSError:
        raise  # a file is missing, which says so
    except Exception as error:  # of configurations there are more than were ever tried
        why = f"{' '.join(str(error).split())} ({type(error).__name__})"
        raise ValueError(f"its configuration makes no model: {why}") from error
    if type(model.config) not in MODEL_FOR_CAUSAL_LM_MAPPING:  # it would be trained, and then?
        raise ValueError(
            f"AutoModelForCausalLM cannot load a {type(model).__name__} that was saved"
        )
    return model.float()


def longest(config) -> int | None:
    """The longest sequence that a configuration speaks of, or None."""
    text = text_config(config)
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "context_length")
    names += ("max_target_positions", "model_max_length")
    lengths = [getattr(text, name, None) for name in names]
    return next((length for length in lengths if isinstance(length, int) and length > 0), None)


def fit_seq_length(args, given: int | None, limit: int | None):
    """Set args.seq_length to the one given, or to 1024 or less. No limit: any length will do."""
    if given and limit and given > limit:
        raise ValueError(f"the model takes at most {limit} tokens: choose a shorter --seq-length")
    args.seq_length = given or min(1024, limit or 1024)


def set_dropout(config, probability: float | None):
    """Set every dropout of a configuration and of those within it. None: leave all as they are."""
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            set_dropout(value, probability)
        elif name.endswith("layerdrop") and value:
            tell(f"{name}: 0, not {value}: a layer that is left out has no gradients to send")
            setattr(config, name, 0.0)
        elif DROPOUT.search(name) and not isinstance(value, bool):
            if probability in (None, value):
                continue
            try:
                setattr(config, name, probability)
            except Exception:  # a configuration may check what it is given
                tell(f"dropout: {name} cannot be {probability}: it stays {value}")


def width(config) -> int:
    """How many numbers stand for a token within the model."""
    text, names = text_config(config), ("hidden_size", "d_model", "n_embd", "dim")
    return next((getattr(text, name) for name in names if hasattr(text, name)), 768)


def make_fast(model, dtype: str):
    """What costs no precision beyond that of `dtype`, in which matrices are multiplied."""
    # A sum of bfloat16 and float32 is float32, so what the embeddings give decides for all layers
    # in what type their outputs are added up, and how much memory that moves.
    if dtype == "bfloat16":
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding):
                module.register_forward_hook(round_output)
    # Matrix products are fast only if the number of columns can be divided by 64.
    config = text_config(model.config)
    vocab_size = config.vocab_size
    model.resize_token_embeddings(pad_to_multiple_of=64, mean_resizing=False)
    config.vocab_size = vocab_size


def round_output(module, inputs, output):
    return output.bfloat16() if isinstance(output, torch.Tensor) else output


def drop_causal_mask(model, length: int):
    """Let attention know that it is causal, instead of by a mask, where there is no other mask.

    transformers may hand a causal mask to attention, which then computes the masked half as well.
    What has a name of its own gets none, and then scaled_dot_product_attention is told "causal".
    """
    config = text_config(model.config)
    special = any(value and MASK.search(name) for name, value in vars(config).items())
    special |= any(MASK.search(kind) for kind in getattr(config, "layer_types", None) or [])
    if special or model.config._attn_implementation != "sdpa":
        return
    tokens = some_tokens(model, 2, length)
    expected = logits_of(model, tokens)
    AttentionInterface.register("causal", sdpa_attention_forward)
    model.set_attn_implementation("causal")
    if not torch.allclose(logits_of(model, tokens), expected, atol=1e-4):
        model.set_attn_implementation("sdpa")  # it has a mask that only itself knows of


def refuse_unless_causal(model, length: int):
    """Raise a ValueError if the model sees the tokens that it shall predict."""
    if is_causal(model, length):
        return
    cure = "choose another model"
    for name in ("is_decoder", "causal"):
        if getattr(model.config, name, None) is False:
            config = copy.deepcopy(model.config)
            setattr(config, name, True)
            if is_causal(AutoModelForCausalLM.from_config(config).float(), length):
                cure = f'with "{name}": true in its config.json they do not'
    raise ValueError(f"it is not causal: its logits depend on later tokens: {cure}")


def try_out(model, args, given: int | None, length: int):
    """Raise a ValueError if the model cannot be trained; else fit `args`, and tell what is odd."""
    observer, idle = try_training(model, args.dtype, length)
    fit_seq_length(args, given, min([*observer.longest, longest(model.config) or 2**31]))
    if idle and args.seq_length > length:
        _, idle = try_training(model, args.dtype, min(args.seq_length, LONGER))
    for name in idle:  # DDP would wait for their gradients
        model.get_parameter(name).requires_grad = False
    if idle:
        count = sum(model.get_parameter(name).numel() for name in idle)
        layers = sorted({re.sub(r"\.\d+\b", ".*", name.rpartition(".")[0]) for name in idle})
        names = textwrap.shorten(", ".join(layers), 200, placeholder=" …")
        tell(f"{count:,} parameters have no part in the loss and stay as they are: {names}")
    if args.dropout is not None:
        others = sorted(observer.dropouts - {0.0, args.dropout})
        if others:
            tell(f"dropout: {args.dropout} does not reach all of the model: there is {others}, too")
        elif args.dropout and args.dropout not in observer.dropouts:
            tell(f"dropout: {args.dropout} reaches nothing: this model has no dropout")


def tell(line: str):
    """Print it once for the job."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(line)


def describe(config) -> dict[str, str | int | float | bool | None]:
    """A configuration as one flat dict, to be compared: what is within it has dotted names."""
    flat = {}

    def add(name, value):
        if isinstance(value, dict):
            for key, inner in value.items():
                if key not in OF_THIS_COPY and not str(key).startswith("_"):
                    add(f"{name}.{key}" if name else str(key), inner)
        elif isinstance(value, (str, int, float, bool, type(None))):
            flat[name] = value
        else:
            flat[name] = json.dumps(value, default=str)

    add("", config.to_dict())
    return flat


def cross_entropy(logits, targets, vocab_size: int, scale: torch.Tensor):
    """The sum of the cross-entropy over all targets, in nats, and the gradient of scale * that sum.

    logits is (batch, seq_length, columns): those from vocab_size on count as if they were not
    there. targets is (batch, seq_length), where NO_TARGET has no loss. The gradient is as logits.

    The gradient is softmax(logits) - one_hot(targets). It is written out, and not left to
    autograd, because the logits are the largest tensor of a step by far: torch.compile makes one
    kernel of this function, which reads them once and writes the gradient once.
    """
    column = torch.arange(logits.shape[-1], device=logits.device)
    is_target = column == targets.unsqueeze(-1)
    log_p = logits.float().masked_fill(column >= vocab_size, -math.inf).log_softmax(dim=-1)
    loss = -torch.where(is_target, log_p, 0.0).sum()
    gradient = (log_p.exp() - is_target.float()) * (targets != NO_TARGET).unsqueeze(-1) * scale
    return loss, gradient.to(logits.dtype)


def flops_per_token(model, seq_length: int) -> float | None:
    """Floating-point operations of a training step for one token: 6 N + 12 L H Q T.

    N are the parameters that take part in matrix products, so not those that are only looked up;
    L the layers, H the heads of size Q, T the sequence length. From appendix B of PaLM
    (Chowdhery et al. 2022, arXiv:2204.02311). Recomputation and causal masks do not change it.
    None: this model is not made so. It has experts, say, or states instead of attention.
    """
    config = text_config(model.config)
    window = getattr(config, "sliding_window", None) or seq_length
    try:
        output = model.get_output_embeddings().weight
        heads, layers = config.num_attention_heads, config.num_hidden_layers
        head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
        half = max(1, min(LENGTH, seq_length) // 2)
        measured = [count_flops(model, length) / length for length in (half, 2 * half)]
    except Exception:  # each architecture has other reasons, and no run shall end for a number
        return None
    learning = {id(p): p for p in model.parameters() if p.requires_grad}
    count = sum(p.numel() for p in learning.values())
    looked_up = {
        id(m.weight): m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)
    }
    for weight in looked_up.values():
        count -= weight.numel() if id(weight) in learning and weight is not output else 0
    padding = (len(output) - config.vocab_size) * output.shape[1]  # columns added for speed
    attention = 4 * layers * heads * head_size  # operations of a forward pass, for each position
    slope = (measured[1] - measured[0]) / half
    constant = measured[0] - slope * half
    as_thought = math.isclose(constant, 2 * count, rel_tol=0.05)
    as_thought &= math.isclose(slope, attention, rel_tol=0.05) and window >= seq_length
    return 6 * (count - padding) + 3 * attention * seq_length if as_thought else None


def count_flops(model, length: int) -> int:
    """Floating-point operations of the products of matrices when `length` tokens go forward."""
    tokens, counter = some_tokens(model, 1, length), FlopCounterMode(display=False)
    # MATH: attention as plain products, which are counted. bfloat16: the embeddings may be.
    autocast = torch.autocast(model.device.type, torch.bfloat16)
    with without_traces(model, training=False), torch.no_grad(), counter:
        with sdpa_kernel(SDPBackend.MATH), autocast:
            model(input_ids=tokens, use_cache=False)
    return counter.get_total_flops()
