"""A language model: its configuration and tokenizer, what makes it fast, and its loss."""

import math

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    PreTrainedTokenizerFast,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NO_TARGET = -100  # a target that no loss is computed for


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
    does not fit together.
    """
    torch.manual_seed(args.seed)  # the same initial weights in every run and process
    tokenizer = load_tokenizer(args.tokenizer_name)
    if tokenizer.eos_token_id is None or not tokenizer.is_fast:
        raise ValueError(f"the tokenizer {args.tokenizer_name} has no end-of-text token or is slow")
    config = load_config(args.model_name)
    if len(tokenizer) > config.vocab_size:
        sizes = f"{len(tokenizer)} tokens, the model's vocabulary {config.vocab_size}"
        raise ValueError(f"the tokenizer {args.tokenizer_name} has {sizes}: they do not fit")
    longest = getattr(config, "max_position_embeddings", 1024)
    args.seq_length = args.seq_length or min(1024, longest)
    if args.seq_length > longest:
        raise ValueError(f"the model takes at most {longest} tokens: choose a shorter --seq-length")
    if args.dropout is None and args.init == "fresh":
        args.dropout = 0.0  # who sees a text once cannot learn it by heart
    set_dropout(config, args.dropout)
    if getattr(config, "activation_function", None) == "gelu_new":
        config.activation_function = "gelu_pytorch_tanh"  # the same function in one kernel
    if args.init == "pretrained":
        kinds = {"config": config, "trust_remote_code": False}
        model = AutoModelForCausalLM.from_pretrained(args.model_name, **kinds)
    else:
        model = AutoModelForCausalLM.from_config(config)
    model.float()
    make_fast(model, args.dtype)
    return tokenizer, model


def load_config(name: str):
    """The configuration of that name, or that of a small GPT for "byte-gpt"."""
    if name == "byte-gpt":
        sizes = {"n_layer": 4, "n_embd": 128, "n_head": 4, "n_positions": 256, "vocab_size": 257}
        return GPT2Config(**sizes, bos_token_id=256, eos_token_id=256)
    return AutoConfig.from_pretrained(name, trust_remote_code=False)  # no code of a model is run


def set_dropout(config, probability: float | None):
    """Set every dropout of that configuration, or none for None."""
    for name in vars(config):
        if name.endswith(("pdrop", "dropout")) and probability is not None:
            setattr(config, name, probability)


def make_fast(model, dtype: str):
    """What costs no precision beyond that of `dtype`, in which matrices are multiplied."""
    config = model.config
    # transformers may hand a causal mask to attention, which then computes the masked half as well.
    # What has a name of its own gets none, and then scaled_dot_product_attention is told "causal".
    special = ("sliding_window", "attention_chunk_size")
    plain = all(getattr(config, name, None) is None for name in special)
    if plain and config._attn_implementation == "sdpa":
        AttentionInterface.register("causal", sdpa_attention_forward)
        model.set_attn_implementation("causal")
    # A sum of bfloat16 and float32 is float32, so what the embeddings give decides for all layers
    # in what type their outputs are added up, and how much memory that moves.
    if dtype == "bfloat16":
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding):
                module.register_forward_hook(lambda module, inputs, output: output.bfloat16())
    # Matrix products are fast only if the number of columns can be divided by 64.
    vocab_size = config.vocab_size
    model.resize_token_embeddings(pad_to_multiple_of=64, mean_resizing=False)
    model.config.vocab_size = vocab_size


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


def flops_per_token(model, seq_length: int) -> float:
    """Floating-point operations of a training step for one token: 6 N + 12 L H Q T.

    N are the parameters that take part in matrix products, so not those that are only looked up;
    L the layers, H the heads of size Q, T the sequence length. From appendix B of PaLM
    (Chowdhery et al. 2022, arXiv:2204.02311). Recomputation and causal masks do not change it.
    """
    output = model.get_output_embeddings().weight
    looked_up = [m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)]
    count = sum(parameter.numel() for parameter in model.parameters())
    count -= sum(weight.numel() for weight in looked_up if weight is not output)
    count -= (len(output) - model.config.vocab_size) * output.shape[1]  # columns added for speed
    config = model.config
    head_size = (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    width = config.num_attention_heads * head_size
    return 6 * count + 12 * config.num_hidden_layers * width * seq_length
