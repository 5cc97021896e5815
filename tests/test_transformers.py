"""attn_implementation="fattn": tiny random models of transformers answer as with their own eager.

They run on the CPU: what is tested is which mask and scores a model asks for, not the kernels.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from flashattn.testing.accuracy import Error

transformers = pytest.importorskip("transformers", reason="the extra integrations is not installed")
# What follows imports transformers.
from transformers import masking_utils  # noqa: E402

from flashattn.integrations import transformers as drop_in  # noqa: E402

LENGTH, PADDING, DOCUMENTS, WINDOW = 24, 7, (5, 12, 7), 8
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
GROUPED = SMALL | {"num_key_value_heads": 2, "head_dim": 16}
WINDOWED = GROUPED | {"sliding_window": WINDOW}
BOTH = WINDOWED | {"layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
DECODERS = {
    "Llama": ("Llama", GROUPED),
    "Qwen3": ("Qwen3", GROUPED),
    "Mistral": ("Mistral", WINDOWED),
    "Phi3": ("Phi3", WINDOWED),
    "Olmo3": ("Olmo3", BOTH),
    "GptOss": ("GptOss", BOTH | EXPERTS),
    "Gemma2": ("Gemma2", BOTH | {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0}),
    "Gemma3": ("Gemma3", BOTH | {"query_pre_attn_scalar": 16}),
    "Llama4": (
        "Llama4",
        GROUPED | EXPERTS | {"attention_chunk_size": WINDOW, "intermediate_size_mlp": 32},
    ),
    "DeepseekV3": (
        "DeepseekV3",
        SMALL
        | {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16}
        | {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
        | {"v_head_dim": 12, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
        | {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
        | {"experts_implementation": "eager"},
    ),
}
TEXT_CONFIGS = ("Gemma3", "Llama4")  # whose other configuration has images, too
ENCODERS = {
    "Bert": ("Bert", SMALL | NO_DROPOUT),
    "ModernBert": (
        "ModernBert",
        SMALL
        | {"local_attention": 2 * WINDOW, "global_attn_every_n_layers": 2}
        | {"cls_token_id": 1, "sep_token_id": 2},
    ),
}
T5 = {
    "T5": (
        "T5",
        {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4}
        | {"dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0}
        | {"eos_token_id": None, "tie_word_embeddings": False},
    )
}
MODELS = DECODERS | ENCODERS | T5
MODES = [(name, mode) for name in MODELS for mode in ("plain", "padded")]
MODES += [(name, "packed") for name in DECODERS]


def exact(module, q, k, v, mask, *, scaling=None, softcap=None, s_aux=None, **options):
    """Compute attention as on paper, called as transformers calls it, with a boolean mask."""
    group, bias = q.shape[1] // k.shape[1], options.get("position_bias")
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    scores = (scores if bias is None else scores + bias).masked_fill(~mask, -torch.inf)
    if s_aux is not None:
        scores = torch.cat([scores, s_aux[:, None, None].expand(*scores.shape[:3], 1)], dim=-1)
    dead = scores.isneginf().all(dim=-1, keepdim=True)
    p = scores.masked_fill(dead, 0).softmax(dim=-1).masked_fill(dead, 0)
    return (p[..., : k.shape[2]] @ v).transpose(1, 2).contiguous(), None


def exact_mask(**asked):
    """Evaluate every mask."""
    skips = ("allow_is_causal_skip", "allow_is_bidirectional_skip")
    return masking_utils.sdpa_mask(**asked | dict.fromkeys(skips, False))


@pytest.fixture(autouse=True, scope="module")
def _registered():
    """Register ours, in PyTorch but by tiles, and what judges it."""
    interfaces = transformers.AttentionInterface, transformers.AttentionMaskInterface
    before = [dict(x._global_mapping) for x in interfaces]
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    drop_in.register(impl="tiled")
    for interface, function in zip(interfaces, (exact, exact_mask), strict=True):
        interface.register("exact", function)
    yield
    transformers.logging.set_verbosity(level)
    for interface, mapping in zip(interfaces, before, strict=True):
        interface._global_mapping = mapping


def model_of(name):
    """Return a tiny model with random weights."""
    family, options = MODELS[name]
    config = getattr(transformers, f"{family}{'Text' * (name in TEXT_CONFIGS)}Config")(**options)
    head = {"T5": "ForConditionalGeneration"} | dict.fromkeys(ENCODERS, "ForMaskedLM")
    torch.manual_seed(0)
    return getattr(transformers, family + head.get(name, "ForCausalLM"))(config)


def inputs_of(mode):
    """Return tokens, labels, and what the mode adds."""
    ids = torch.randint(1, 64, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids, "labels": ids.clone()}
    if mode == "padded":
        inputs["attention_mask"] = torch.ones_like(ids)
        inputs["attention_mask"][0, :PADDING] = 0
        inputs["labels"][0, : PADDING + 1] = -100  # no loss of the last one's next token either
    if mode == "packed":
        positions = torch.cat([torch.arange(n) for n in DOCUMENTS])[None].expand(2, -1)
        inputs |= {"position_ids": positions, "use_cache": False}
    return inputs


def step(model, inputs, attention, run=None):
    """Return the logits of tokens that count, and all gradients."""
    model.set_attn_implementation(attention)
    model.train().zero_grad()
    out = (run or model)(**inputs)
    out.loss.backward()
    grads = [x.grad.double().flatten() for x in model.parameters() if x.grad is not None]
    return out.logits.detach()[inputs["labels"] != -100].double(), torch.cat(grads)


def assert_as_eager(model, inputs, run=None):
    """No error is larger than attention's own budget allows, for eager as its naive."""
    got, naive = step(model, inputs, "fattn", run), step(model, inputs, "eager")
    truth = step(model.double(), inputs, "exact")
    eps = torch.finfo(torch.float32).eps
    for ours, theirs, wanted in zip(got, naive, truth, strict=True):
        budget = 2.0 * Error.of(theirs, wanted).max + eps * wanted.abs().max().item()
        assert Error.of(ours, wanted).max <= budget


@pytest.mark.parametrize(("name", "mode"), MODES)
def test_training_step(name, mode):
    """Logits and gradients are those of eager attention."""
    assert_as_eager(model_of(name), inputs_of(mode))
