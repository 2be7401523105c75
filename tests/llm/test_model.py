"""llm/model.py and llm/check.py: which models are trained, how, and what is said of the others."""

import math
import re
import types

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, GPT2Config

from llm import model as llm_model
from llm.check import Observer, is_causal, some_tokens, without_traces
from llm.model import cross_entropy, describe, flops_per_token, load_model, text_config, width

SIZES = [  # the first pattern that is in the name of a field says how large it may be (0: as it is)
    ("_index$|offset|inference|pretraining_tp|_start$|_end$", 0),
    ("head.?_?(dim|size)|headdim|d_head|dim_head|kv_channels|rotary_dim", 16),
    ("pattern|interval|period|every|step$", 0),
    ("type_vocab|n_langs|n_groups$", 2),
    ("vocab", 320),
    ("(kv|key_value).*(heads|groups)|kv_n_heads|num_query_groups", 2),
    ("n_group$|topk_group|num_expert_group", 1),
    ("per_tok|top_?k|moe_k$", 2),
    ("first_k_dense|num_dense", 1),
    ("shared_experts|nextn|kv_shared", 0),
    ("experts?$|experts?_num", 4),
    ("mamba_n_heads|mamba_num_heads", 8),
    ("(^|_)(n_)?heads?$", 4),
    ("layers?$|num_blocks$|^depth$", 2),
    ("position|n_ctx|seq_len|context_length|model_max_length", 64),
    ("sliding|window|chunk|local_attention$", 8),
    ("conv|kernel", 0),
    ("state|rank", 8),
    ("size|dim|d_model|n_embd|d_ff|dff|ffn|width|inner|d_kv", 64),
]


ALSO = {  # what has to fit to those sizes
    "bamba": {"mamba_n_heads": 8},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "dory": {"num_hidden_layers": 6},
    "dots1": {"n_shared_experts": 1},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "xmod": {"default_language": "en_XX"},
}


def shrink(fields: dict) -> dict:
    """The sizes in a configuration and in those within it, made small."""
    tiny, latent = {}, "kv_lora_rank" in fields
    for name, value in fields.items():
        size = next((size for pattern, size in SIZES if re.search(pattern, name)), 0)
        if isinstance(value, dict) and "model_type" in value:
            tiny[name] = shrink(value)
        elif name.endswith("token_id") and isinstance(value, int):
            tiny[name] = 0
        elif type(value) is int and 0 < size < value:
            tiny[name] = size
        elif value is None and re.search("^head_dim|key_value_heads|routed_experts|per_tok", name):
            tiny[name] = size
        if latent and name.endswith("key_value_heads"):
            tiny[name] = 4
        if latent and name == "qk_head_dim":
            tiny[name] = 32
    return tiny


def tiny(kind: str, **fields):
    """A small configuration of that model type."""
    make = CONFIG_MAPPING[kind]
    return make(**{**shrink(make().to_dict()), **ALSO.get(kind, {}), **fields})


def load(config, folder, **options):
    """`load_model`, and the options that it has filled in."""
    config.save_pretrained(folder)
    args = {"model_name": str(folder / "config.json"), "tokenizer_name": "bytes", "init": "fresh"}
    args |= {"seq_length": None, "dropout": None, "dtype": "float32", "seed": 0}
    args = types.SimpleNamespace(**{**args, **options})
    return load_model(args)[1], args


def train(model):
    """A step, as a run makes it. The loss before it, in nats per token."""
    tokens = some_tokens(model, 4, 17)
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=1e-3)
    logits = model.train()(input_ids=tokens[:, :-1], use_cache=False).logits
    vocab_size = text_config(model.config).vocab_size
    scale = torch.tensor(1 / 64)
    loss, gradient = cross_entropy(logits.detach(), tokens[:, 1:], vocab_size, scale)
    logits.backward(gradient)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in learning)
    optimizer.step()
    return loss.item() / 64


def sees_the_future(model) -> bool:
    """Whether early logits have a gradient at later tokens: not how load_model asks."""
    embedded = []
    layer = model.get_input_embeddings()
    hook = layer.register_forward_hook(lambda module, inputs, output: embedded.append(output))
    logits = model.eval()(input_ids=some_tokens(model, 1, 16), use_cache=False).logits
    hook.remove()
    (gradient,) = torch.autograd.grad(logits[:, :9].square().sum(), embedded[0])
    assert gradient[:, :9].any()
    return bool(gradient[:, 9:].any())


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_a_model_that_sees_its_targets_is_refused(kind, tmp_path):
    """An encoder is told what would make it a decoder, and that does."""
    with pytest.raises(
        ValueError, match='not causal.*"is_decoder": true in its config.json they do not'
    ):
        load(tiny(kind), tmp_path)
    assert sees_the_future(AutoModelForCausalLM.from_config(tiny(kind)))
    model, _ = load(tiny(kind, is_decoder=True), tmp_path)
    assert not sees_the_future(model)


def test_zeros_do_not_hide_what_a_model_sees():
    """Attention that begins as zeros moves no logit, and will once it is trained."""
    for is_decoder in (False, True):
        model = AutoModelForCausalLM.from_config(tiny("bert", is_decoder=is_decoder))
        for name, parameter in model.named_parameters():
            if "attention.output.dense" in name or "decoder" in name:
                torch.nn.init.zeros_(parameter)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        assert is_causal(model) == is_decoder
        assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("kind, first", [("opt", 0), ("roberta", 2), ("camembert", 2)])
def test_positions_that_begin_later(kind, first, tmp_path):
    """A sequence has as many tokens as the table has rows that are used for positions."""
    config = tiny(kind, max_position_embeddings=64, is_decoder=True, pad_token_id=1)
    model, args = load(config, tmp_path)
    assert args.seq_length == 64 - first
    model(input_ids=some_tokens(model, 1, args.seq_length))
    with pytest.raises(ValueError, match=f"at most {64 - first} tokens: choose a shorter"):
        load(config, tmp_path, seq_length=64 - first + 1)


def test_a_state_space_model(tmp_path, capsys):
    """No limit to its length, no number of operations, no dropout: and it is trained."""
    model, args = load(tiny("mamba"), tmp_path, seq_length=5000, dropout=0.1)
    assert args.seq_length == 5000 and flops_per_token(model, 5000) is None
    assert "dropout: 0.1 reaches nothing: this model has no dropout" in capsys.readouterr().out
    assert train(model) == pytest.approx(math.log(320), abs=1)
    assert load(tiny("mamba"), tmp_path)[1].seq_length == 1024


def test_text_inside_a_larger_model(tmp_path, capsys):
    """Its vocabulary and length are those of the text, and what is for images is left alone."""
    config = tiny("gemma3")
    config.text_config.vocab_size = 300
    model, args = load(config, tmp_path, dropout=0.1)
    assert args.seq_length == 64 and width(model.config) == 64
    assert text_config(model.config).vocab_size == 300
    assert len(model.get_output_embeddings().weight) == 320
    assert re.search("parameters have no part.*vision_tower", capsys.readouterr().out)
    assert not any(p.requires_grad for n, p in model.named_parameters() if "vision" in n)
    train(model)
    config.text_config.vocab_size = 256
    with pytest.raises(ValueError, match="has 257 tokens, the model's vocabulary 256"):
        load(config, tmp_path)


@pytest.mark.parametrize("kind", ["gpt2", "bert", "opt", "bart", "xglm", "seed_oss", "gemma3"])
def test_dropout_reaches_all(kind, tmp_path, capsys):
    """All that is dropped out is dropped out with the probability that was typed, or not at all."""
    for typed, expected in ((0.3, {0.3}), (0.0, {0.0}), (None, {0.0})):
        model, _ = load(tiny(kind, is_decoder=True), tmp_path, dropout=typed)
        with Observer(16) as observer:
            model.train()(input_ids=some_tokens(model, 1, 16))
        assert observer.dropouts == expected
    assert "dropout" not in capsys.readouterr().out


def test_dropout_that_a_configuration_does_not_take_is_told(tmp_path, capsys):
    """MPT's attention takes whole numbers only, so 0 or 1."""
    model, _ = load(tiny("mpt"), tmp_path, dropout=0.1)
    assert model.config.emb_pdrop == 0.1
    assert "dropout: attn_pdrop cannot be 0.1: it stays 0" in capsys.readouterr().out


def test_dropout_of_pretrained_weights_is_their_own(tmp_path):
    AutoModelForCausalLM.from_config(tiny("gpt2")).save_pretrained(tmp_path)
    pretrained = {"init": "pretrained", "model_name": str(tmp_path)}
    for typed, expected in ((None, 0.1), (0.0, 0.0)):
        model, args = load(tiny("gpt2"), tmp_path, **pretrained, dropout=typed)
        assert args.dropout == typed and model.transformer.drop.p == expected
        assert not model.training  # as it was loaded


def test_dropout_that_is_not_reached_is_told(tmp_path, capsys):
    config = tiny("gpt2")
    config.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_config(config)
    model.transformer.drop.p = 0.2  # as if it were written into the code
    args = types.SimpleNamespace(dropout=0.1, dtype="float32", seq_length=32)
    llm_model.try_out(model, args, 32, 16)
    assert "dropout: 0.1 does not reach all of the model: there is [0.2], too" in (
        capsys.readouterr().out
    )


def test_weights_are_as_ever_and_the_trial_leaves_no_trace(tmp_path):
    """The weights are those that the seed gives, and nothing of the trial is left in the model."""
    for config in (tiny("gpt2", vocab_size=257), tiny("gpt_neo", vocab_size=257)):
        model, _ = load(config, tmp_path, seed=7)
        after = torch.get_rng_state()
        torch.manual_seed(7)
        expected = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
        expected.resize_token_embeddings(pad_to_multiple_of=64, mean_resizing=False)
        assert after.equal(torch.get_rng_state())
        weights = model.state_dict()
        assert all(weights[name].equal(tensor) for name, tensor in expected.state_dict().items())
        assert dict(model.named_buffers()).keys() == dict(expected.named_buffers()).keys()
        assert all(a.equal(b) for a, b in zip(model.buffers(), expected.buffers(), strict=True))
        assert all(p.grad is None and p.requires_grad for p in model.parameters())
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
        assert all(m.training for m in model.modules()) and model.config.vocab_size == 257


def test_what_is_done_within_leaves_no_trace():
    """Neither running means nor random numbers go on, even when it fails."""
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Dropout()).eval()
    means, state = model[0].running_mean.clone(), torch.get_rng_state()
    with pytest.raises(ValueError, match="on text alone: two lines$"):
        with without_traces(model, training=True):
            model(torch.ones(2, 3))
            assert not model[0].running_mean.equal(means)
            raise RuntimeError("two\nlines")
    assert model[0].running_mean.equal(means) and state.equal(torch.get_rng_state())
    assert not model.training and not model[1].training


@pytest.mark.parametrize(
    "kind, fields, attention",
    [
        ("llama", {}, "causal"),
        ("mistral", {"sliding_window": 32}, "sdpa"),
        ("gemma3_text", {"sliding_window": 32}, "sdpa"),
        ("falcon", {"alibi": True}, "sdpa"),
    ],
)
def test_only_a_mask_that_is_merely_causal_is_dropped(kind, fields, attention, tmp_path):
    """Attention computes what it did, beyond the length of a trial, too."""
    config = tiny(kind, **fields)
    model, _ = load(config, tmp_path)
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    tokens = some_tokens(model, 1, 64)
    torch.testing.assert_close(model.eval()(tokens).logits, plain.eval()(tokens).logits)
    assert model.config._attn_implementation == attention


def test_a_mask_of_an_unknown_name_is_kept(tmp_path, monkeypatch):
    """Whatever a configuration calls it: who computes something else has its mask again."""
    monkeypatch.setattr(llm_model, "MASK", re.compile("no such name"))
    for window, attention in ((8, "sdpa"), (64, "causal")):
        model, _ = load(tiny("mistral", sliding_window=window), tmp_path)
        assert model.config._attn_implementation == attention


def test_flops_are_palms():
    """6 N + 12 L H Q T of GPT-2, by hand; none where experts or a window make it another number."""
    model = AutoModelForCausalLM.from_config(GPT2Config())
    assert flops_per_token(model, 1024) == 855_166_464
    model = AutoModelForCausalLM.from_config(tiny("mistral", sliding_window=32))
    assert flops_per_token(model, 32) and flops_per_token(model, 33) is None
    assert flops_per_token(AutoModelForCausalLM.from_config(tiny("mixtral")), 32) is None


def test_configurations_are_compared_field_by_field(tmp_path):
    mine = describe(tiny("gemma3"))
    config = tiny("gemma3")
    config.text_config.num_hidden_layers = 1
    config.dtype, config.transformers_version = "bfloat16", "4.0"
    theirs = describe(config)
    assert {name for name in mine if mine[name] != theirs[name]} == {
        "text_config.num_hidden_layers"
    }
    assert all(isinstance(value, (str, int, float, type(None))) for value in mine.values())


def test_what_is_no_causal_language_model_is_told(tmp_path):
    for kind, why in (("t5", "no causal language model of the type t5"), ("vit", "type vit")):
        with pytest.raises(ValueError, match=why):
            load(CONFIG_MAPPING[kind](), tmp_path)
