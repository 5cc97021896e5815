"""Kernels that are wrong on purpose: the test that catches each, and the real bug that it mimics.

Any may be tried as a user would: ``pytest tests --impl tests/mutants/own_kernels/wrong.py:NAME``
after ``registry.register`` of it.
"""

from __future__ import annotations

import os
import random

import numpy as np
import torch
from attention_parts import (
    UNBOUNDED,
    as_contiguous,
    fused,
    gradients,
    kernel,
    masked,
    right,
    right_with_scores,
    seen_by,
    wide,
)

from flashattn.bounds import Bounds

FORM, LEAVES, SWAYS = "test_cases", "test_leaves_no_trace", "test_settings_do_not_sway_it"
GRADS, HIDDEN, REMEMBERS = "test_grad_layouts", "test_hidden_scores", "test_calls_do_not_remember"
LENGTHS, HEADS, DIMS = (
    "test_every_kind_of_length",
    "test_every_number_of_heads",
    "test_every_head_dim",
)
BITS, NESTED, ALONE = "test_same_bits", "test_calls_may_be_nested", "test_each_gradient_alone"


def changed(caught, change, name, mimics="", **claims):
    """Add the right kernel with its results replaced by ``change(o, lse, q, k, v)``."""

    def call(q, k, v, **how):
        o, lse = right(q, k, v, **how)
        return change(o, lse, q, k, v)

    call.__name__ = name
    kernel(caught, mimics, **claims)(call)


def before(caught, effect, name, mimics="", **claims):
    """Add the right kernel with a side effect."""

    def call(q, k, v, **how):
        effect(q, k, v)
        return right(q, k, v, **how)

    call.__name__ = name
    kernel(caught, mimics, **claims)(call)


def hiding(caught, hide, name, mimics=""):
    """Add a kernel that masks in its own way."""

    def call(q, k, v, **how):
        return masked(hide, q, k, v, **how)

    call.__name__ = name
    kernel(caught, mimics)(call)


def backward(caught, change, name, mimics="", **claims):
    """Add a kernel with a wrong backward."""
    call = fused(change)
    call.__name__ = name
    kernel(caught, mimics, **claims)(call)


def with_do(**changes):
    """Return a backward that misreads some of its inputs."""

    def change(x):
        for name, f in changes.items():
            setattr(x, name, f(getattr(x, name)))
        return gradients(x)

    return change


# The form of results
changed(FORM, lambda o, lse, *_: (o.float(), lse), "o_in_fp32")
changed(FORM, lambda o, lse, *_: (o.half(), lse), "o_in_fp16")
changed(FORM, lambda o, lse, *_: (o, lse.half()), "lse_in_fp16")
changed(FORM, lambda o, lse, *_: (o.transpose(1, 2), lse), "o_as_bthd")
changed(FORM, lambda o, lse, *_: (o, lse[..., None]), "lse_with_a_column")
changed(FORM, lambda o, lse, *_: (o, lse / 0.6931472), "lse_in_base_2")
changed(FORM, lambda o, lse, *_: (o, lse.detach()), "lse_without_gradient")
changed(
    FORM,
    lambda o, lse, q, *_: (o, lse) if q.shape[2] != 48 else (o[:1, :1, :1, :1].expand_as(o), lse),
    "o_expanded",
)
changed(
    "test_layouts",
    lambda o, lse, q, k, v: (
        q.copy_(o)
        if not q.requires_grad
        else as_contiguous(q) * 0 + o * (1 + (as_contiguous(q) - q).abs()),
        lse,
    ),
    "reads_q_as_contiguous",
    "pytorch/pytorch#119500",
)

# Gradients in other layouts
backward(GRADS, with_do(do=as_contiguous), "do_as_contiguous", "Dao-AILab/flash-attention#355")
backward(GRADS, with_do(dlse=as_contiguous), "dlse_as_contiguous", "flagos-ai/FlagAttention#1")
backward(
    GRADS,
    with_do(do=lambda x: x if x.stride(-1) == 1 else as_contiguous(x)),
    "do_last_dimension",
    "Dao-AILab/flash-attention#325",
)
backward(
    GRADS,
    with_do(do=lambda x: x if all(x.stride()) else 0 * x),
    "do_of_stride_0",
    "pytorch/pytorch#133671",
)
backward(
    GRADS,
    with_do(do=lambda x: x if x.is_contiguous() else x.mT.contiguous().view(x.shape)),
    "do_transposed",
    "pytorch/pytorch#133671",
)
backward(FORM, with_do(do=lambda x: (x.clone(), x.mul_(2))[0]), "writes_do")
backward(FORM, with_do(dlse=lambda x: 0 * x), "dlse_ignored")
backward(FORM, with_do(o=lambda x: 0 * x), "no_delta")
backward(FORM, with_do(lse=lambda x: x + 0.01), "lse_rounded")

# Masks
hiding(HIDDEN, lambda s, seen: s.masked_fill(~seen, -1e4), "mask_of_1e4", "salesforce/CodeGen#49")
hiding(
    HIDDEN,
    lambda s, seen: s.masked_fill(~seen, -1e5 + 2e4),
    "mask_of_8e4",
    "TransformerLensOrg/TransformerLens#318",
)
hiding(
    HIDDEN, lambda s, seen: s.masked_fill(~seen, -65504.0), "mask_of_fp16", "pytorch/pytorch#110213"
)
hiding(HIDDEN, lambda s, seen: s.masked_fill(~seen, -1e5), "mask_of_1e5", "karpathy/minGPT#75")
hiding(
    FORM,
    lambda s, seen: s.masked_fill(~seen, -1e-9),
    "mask_of_nothing",
    "hyunwoongko/transformer#10",
)
hiding(FORM, lambda s, seen: s * seen, "mask_by_product")
hiding("test_the_future_is_not_seen", lambda s, seen: s - 1e4 * ~seen, "mask_added")
hiding(
    FORM,
    lambda s, seen: s.masked_fill(~seen.roll(1, -1), -torch.inf).nan_to_num(-50),
    "mask_off_by_one",
)


@kernel(FORM, "pytorch/pytorch#103749")
def nan_where_nothing_is_seen(q, k, v, **how):
    """Give NaN to a query that sees no key."""
    o, lse = right(q, k, v, **how)
    return torch.where(lse[..., None] == -torch.inf, torch.nan, o), lse


@kernel(FORM, "jax-ml/jax#24491")
def always_top_left(q, k, v, *, causal, scale, window=UNBOUNDED):
    """Align every causal mask at the top left."""
    return right(q, k, v, causal=causal and "top_left", scale=scale, window=window)


@kernel("test_unseen_rows", "pytorch/pytorch#101967")
def nan_of_unseen_rows(q, k, v, *, causal, scale, window=UNBOUNDED):
    """Multiply values that no query sees by zero."""
    o, lse = right(q, k, v, causal=causal, scale=scale, window=window)
    unseen = ~seen_by(q, k, causal, window).any(0)
    return o + 0 * v[:, :, unseen].sum().to(o.dtype), lse


# Sizes
def where(o, lse, wrong):
    """Return the results, with o 1.5 times too large where it is wrong."""
    return (o * 1.5 if wrong else o), lse


SIZES = {
    "rows_from_300": (LENGTHS, lambda q, k: q.shape[2] >= 300, "pytorch/pytorch#162588"),
    "keys_from_2000": (LENGTHS, lambda q, k: k.shape[2] >= 2000, "pytorch/pytorch#162588"),
    "keys_1_above_128": (LENGTHS, lambda q, k: k.shape[2] % 128 == 1 and k.shape[2] > 200, ""),
    "rows_of_1024": (LENGTHS, lambda q, k: q.shape[2] == 1024, ""),
    "scores_from_2_17": (
        LENGTHS,
        lambda q, k: q.shape[2] * k.shape[2] >= 2**16,
        "thu-ml/SageAttention#386",
    ),
    "heads_from_33": (HEADS, lambda q, k: q.shape[1] > 32, ""),
    "heads_of_7": (HEADS, lambda q, k: q.shape[1] == 7, ""),
    "batches_from_17": (HEADS, lambda q, k: q.shape[0] > 16, ""),
    "programs_from_200": (HEADS, lambda q, k: q.shape[0] * q.shape[1] > 200, ""),
    "head_dim_113": (DIMS, lambda q, k: q.shape[3] == 113, ""),
    "head_dim_from_129": (
        DIMS,
        lambda q, k: q.shape[3] > 128 and q.shape[3] % 8,
        "mlc-ai/mlc-llm#1889",
    ),
    "head_dim_72": (DIMS, lambda q, k: q.shape[3] == 72, "turboderp-org/exllamav3#316"),
    "head_dim_63": (DIMS, lambda q, k: q.shape[3] == 63, "66RING/tiny-flash-attention#12"),
}
for _name, (_test, _wrong, _mimics) in SIZES.items():
    changed(
        _test,
        lambda o, lse, q, k, v, wrong=_wrong: where(o, lse, wrong(q, k)),
        _name,
        _mimics,
    )


@kernel(LENGTHS, "Dao-AILab/flash-attention#355")
def no_gradient_of_late_keys(q, k, v, **how):
    """Lose dk from key 200 on."""
    k = torch.cat([k[:, :, :200], k[:, :, 200:].detach()], dim=2)
    return right(q, k, v, **how)


# Values of fewer columns than keys
@kernel(FORM, narrow_values=True)
def last_column_of_narrow_values_lost(q, k, v, **how):
    """Drop the last column of narrow values if their number is odd."""
    (o, lse), columns = right(q, k, v, **how), v.shape[3]
    kept = columns // 2 * 2 if columns < k.shape[3] else columns
    return torch.cat([o[..., :kept], 0 * o[..., kept:]], dim=3), lse


@kernel(FORM, narrow_values=True)
def no_gradient_beyond_narrow_values(q, k, v, **how):
    """Lose dk beyond the width of values."""
    columns = v.shape[3]
    k = torch.cat([k[..., :columns], k[..., columns:].detach()], dim=3)
    return right(q, k, v, **how)


# Side effects
EFFECTS = {
    "draws": lambda *_: torch.rand(1),
    "seeds": lambda *_: torch.manual_seed(0),
    "draws_in_python": lambda *_: random.random(),
    "draws_in_numpy": lambda *_: np.random.rand(),
    "sets_tf32": lambda *_: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "sets_ieee": lambda *_: setattr(torch.backends.cuda.matmul, "fp32_precision", "ieee"),
    "sets_threads": lambda *_: torch.set_num_threads(2),
    "disables_flash": lambda *_: torch.backends.cuda.enable_flash_sdp(False),
    "stops_determinism": lambda *_: torch.set_deterministic_debug_mode(0),
    "sets_environment": lambda *_: os.environ.update(OWN_KERNEL="1"),
    "sets_default_dtype": lambda *_: torch.set_default_dtype(torch.float32),
    "enables_autocast": lambda *_: torch.set_autocast_enabled("cpu", True),
    "hooks_q": lambda q, *_: q.requires_grad and q.register_hook(lambda x: x),
    "patches_softmax": lambda *_: setattr(
        torch.nn.functional, "softmax", lambda *x, **_: torch.softmax(*x)
    ),
}
for _name, _effect in EFFECTS.items():
    before(LEAVES, _effect, _name)


# Settings that sway a call
@kernel(SWAYS)
def default_dtype(q, k, v, **how):
    """Make a sum in the default dtype."""
    o, lse = right(q, k, v, **how)
    return o + torch.zeros(
        o.shape, device=q.device
    ) if o.dtype == torch.float32 else o * torch.ones((), device=q.device).to(o.dtype) + (
        torch.finfo(torch.get_default_dtype()).bits != 32
    ), lse


@kernel(SWAYS)
def default_device(q, k, v, **how):
    """Make a tensor on torch's default device."""
    o, lse = right(q, k, v, **how)
    return o * torch.ones(o.shape[-1], dtype=o.dtype), lse


@kernel(SWAYS)
def needs_gradients(q, k, v, **how):
    """Double o where no gradient is recorded."""
    o, lse = right(q, k, v, **how)
    return (o if torch.is_grad_enabled() else 2 * o), lse


# Randomness
def at_times(period):
    """Return a change of o's last bits in one of ``period`` calls."""
    calls = [0]

    def change(o, lse, *_):
        calls[0] += 1
        return (o * (1 + 2**-7) if calls[0] % period == 0 else o), lse

    return change


changed(BITS, at_times(2), "other_bits_every_other_call")
changed(BITS, at_times(9), "other_bits_now_and_then", "turboderp-org/exllamav3#316")
changed(
    BITS, lambda o, lse, *_: (o + (torch.empty(()).uniform_() < 0.5) * o * 2**-7, lse), "atomics"
)


# State between calls
KEPT: dict = {}


@kernel(REMEMBERS)
def mask_cached_by_rows(q, k, v, *, causal, scale, window=UNBOUNDED):
    """Cache masks by the number of rows alone."""
    how = KEPT.setdefault(("mask", q.shape[2]), (causal, window))
    return right(q, k, v, causal=how[0], scale=scale, window=how[1])


@kernel(REMEMBERS)
def scale_cached_by_shape(q, k, v, *, causal, scale, window=UNBOUNDED):
    """Cache the scale by the shapes."""
    scale = KEPT.setdefault(("scale", q.shape, k.shape), scale)
    return right(q, k, v, causal=causal, scale=scale, window=window)


@kernel("test_memory_may_be_written_anew")
def keys_cached_by_address(q, k, v, **how):
    """Cache keys by their address."""
    key = (k.data_ptr(), k.shape, k.dtype)
    kept = KEPT.setdefault(key, k.detach().clone())
    o, lse = right(q, kept, v, **how)
    return o + 0 * k.sum().to(o.dtype), lse


@kernel(REMEMBERS, grad=False)
def static_output(q, k, v, **how):
    """Write every result of one shape to the same memory."""
    o, lse = right(q, k, v, **how)
    static = KEPT.setdefault((o.shape, o.dtype), torch.empty_like(o))
    return static.copy_(o), lse


@kernel("test_nothing_is_held")
def holds_inputs(q, k, v, **how):
    """Keep the last inputs."""
    KEPT["last"] = (q, k, v)
    return right(q, k, v, **how)


LAST: list = [None]


def _last_lse(x):
    x.lse = LAST[0] if LAST[0].shape == x.lse.shape else x.lse
    return gradients(x)


@kernel(NESTED)
def saved_beside_autograd(q, k, v, **how):
    """Keep the logsumexp of the last forward for whichever backward comes next."""
    o, lse = fused(_last_lse)(q, k, v, **how)
    LAST[0] = lse.detach()
    return o, lse


def _twice(x):
    x.ctx.times = getattr(x.ctx, "times", 0) + 1
    return tuple(x.ctx.times * y for y in gradients(x))


backward(NESTED, _twice, "gradients_add_up")
backward(
    ALONE,
    lambda x: tuple(y if all(x.ctx.needs_input_grad[:3]) else 0 * y for y in gradients(x)),
    "all_gradients_or_none",
)
backward(
    ALONE, lambda x: gradients(x) if x.do.any() else (None, None, None), "nothing_of_lse_alone"
)


@kernel("test_inputs_that_were_overwritten")
def saves_past_autograd(q, k, v, **how):
    """Keep inputs where autograd does not see that they are overwritten."""

    def change(x):
        x.q, x.k, x.v = (y.data for y in inputs)
        return gradients(x)

    inputs = [x.detach() for x in (q, k, v)]

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            o, lse = right(q, k, v, **how)
            ctx.kept = o.detach().clone(), lse.detach().clone()
            return o, lse

        @staticmethod
        def backward(ctx, do, dlse):
            from types import SimpleNamespace  # noqa: PLC0415

            o, lse = ctx.kept
            return change(SimpleNamespace(o=o, lse=lse, do=do, dlse=dlse, ctx=ctx, **how))

    return Own.apply(q, k, v)


# Arithmetic
@kernel("test_values")
def no_maximum(q, k, v, *, causal, scale, window=UNBOUNDED):
    """Subtract no maximum."""
    q, k, v, dtype = *wide(q, k, v), q.dtype
    group = q.shape[1] // max(k.shape[1], 1)
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    p = (q @ k.mT * scale).exp() * seen_by(q, k, causal, window)
    total = p.sum(-1, keepdim=True)
    return ((p @ v) / total.masked_fill(total == 0, 1)).to(dtype), total.log()[..., 0]


@kernel(FORM)
def first_heads(q, k, v, **how):
    """Take key head ``h % kv_heads`` for query head ``h``, whatever the group."""
    group = q.shape[1] // max(k.shape[1], 1)
    return right(q, k.repeat(1, group, 1, 1), v.repeat(1, group, 1, 1), **how)


@kernel(FORM)
def sums_in_bf16(q, k, v, **how):
    """Round the inputs to bf16."""
    o, lse = right(q.bfloat16(), k.bfloat16(), v.bfloat16(), **how)
    return o.to(q.dtype), lse


@kernel("test_scales")
def scale_taken_for_positive(q, k, v, *, causal, scale, window=UNBOUNDED):
    """Forget a scale's sign."""
    return right(q, k, v, causal=causal, scale=abs(scale), window=window)


SCORED = {"softcap": True, "alibi": True, "bias": True, "sink": True, "intervals": True}


def scored(caught, name, change):
    """Add a kernel that takes row masks and all score tensors, and changes what it was given."""

    def call(q, k, v, **how):
        given = {name: x for name, x in how.items() if x is not None}
        return right_with_scores(q, k, v, **given | change(q, k, given))

    call.__name__ = name
    kernel(caught, **SCORED)(call)


def of_batch_0(x, q):
    """Give every batch the values of the first."""
    return x[:1].expand(len(q) if len(x) > 1 else 1, *x.shape[1:])


scored(
    "test_batches_have_their_own_keys",
    "bounds_of_the_first_batch",
    lambda q, k, how: (
        {"bounds": Bounds(*(of_batch_0(x, q) for x in how["bounds"]))} if "bounds" in how else {}
    ),
)
scored(
    FORM,
    "slopes_of_the_first_batch",
    lambda q, k, how: (
        {"alibi_slopes": of_batch_0(how["alibi_slopes"], q)} if "alibi_slopes" in how else {}
    ),
)
scored(
    "test_batches_have_their_own_sinks",
    "sinks_of_the_first_batch",
    lambda q, k, how: {"sink": of_batch_0(how["sink"], q)} if "sink" in how else {},
)
scored(
    "test_a_bias_of_minus_infinity_is_a_mask",
    "bias_of_a_finite_mask",
    lambda q, k, how: {"bias": how["bias"].clamp(min=-1e4)} if "bias" in how else {},
)
scored(
    FORM,
    "bias_of_half_precision",
    lambda q, k, how: (
        {"bias": how["bias"].bfloat16().to(how["bias"].dtype)} if "bias" in how else {}
    ),
)
scored(
    FORM,
    "cap_before_the_scale",
    lambda q, k, how: {"softcap": how["softcap"] * how["scale"]} if "softcap" in how else {},
)
scored(
    FORM,
    "half_of_the_sinks_gradient",
    lambda q, k, how: {"sink": (how["sink"] + how["sink"].detach()) / 2} if "sink" in how else {},
)


@kernel("test_the_last_key_counts")
def lone_last_key_lost(q, k, v, **how):
    """Forget the last key if it has a tile to itself."""
    if k.shape[2] > 1024 and k.shape[2] % 128 == 1:
        v = torch.cat([v[:, :, :-1], torch.zeros_like(v[:, :, -1:])], dim=2)
    return right(q, k, v, **how)


@kernel(LENGTHS)
def decoding_without_the_last_tile(q, k, v, **how):
    """Forget the keys after the last whole tile, if one query has many keys."""
    whole = k.shape[2] // 128 * 128
    if q.shape[2] == 1 and whole >= 512:
        k, v = k[:, :, :whole], v[:, :, :whole]
    return right(q, k, v, **how)
