"""The work of one program in the two backward passes: dK and dV of its keys, or dQ of its queries.

``band`` and ``sizes`` are as in ``mask``, ``grid`` and ``split`` as in ``scheduler.own_tile``.
``gqa`` is (heads, group): the query heads in all, and per key head. ``scores`` is the ``Score`` of
all heads, ``score`` that of one; ``lies`` is a ``ScoreLayout``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashattn.kernels.portable.mask import (
    apply_mask,
    apply_mask_transposed,
    keep_rows,
    key_tiles,
    live_queries,
    of_batch,
    query_tiles,
    seen_keys,
    whole_tiles,
)
from flashattn.kernels.portable.memory import load_tile, multiple, store_tile
from flashattn.kernels.portable.mma import ONE_LOOP_FP32, dot, dot_transposed
from flashattn.kernels.portable.preprocess import load_delta, load_lse_log2
from flashattn.kernels.portable.scheduler import own_tile, split_begin
from flashattn.kernels.portable.score import (
    Score,
    bias_of,
    capped,
    in_base_2,
    slope_of,
    store_dbias,
)

# BLOCK_D from which two loops leave too few registers: in both passes if they share a launch, and
# in that of dk and dv if the kernel decomposes fp32.
WIDE = tl.constexpr(128)


class Inputs(NamedTuple):
    """Inputs of both passes: tensors or their descriptors, and the strides of all tensors.

    ``stats`` is as in ``preprocess.load_lse_log2``; ``layout`` is a ``BackwardLayout``.
    """

    q: Any
    k: Any
    v: Any
    grad_o: Any
    stats: Any
    layout: Any


@triton.jit
def dkdv_mainloop(
    acc,
    own,
    inputs,
    at,
    row,
    first,
    end,
    full,
    sizes,
    band,
    score,
    lies,
    MASKED: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """Add the contribution of queries ``first ... end`` of one head to (dk, dv) of a key tile.

    The scores are computed transposed, [BLOCK_KV, BLOCK_Q], so that P and dS come out of one
    product in the layout in which the next one takes them. With bounds of rows, q and dO of queries
    that see no key may be NaN.

    ``acc`` is (dk, dv) and ``own`` is (k, v) of the tile; ``at`` is (batch, query head, first key),
    and ``row`` is that head's row in ``stats``; ``full`` is as in ``apply_mask``.
    """
    dk, dv = acc
    k_tile, v_tile = own
    q, _, _, grad_o, stats, layout = inputs
    batch, head, start_kv = at
    seq_q, scale = sizes[0], score.scale
    BLOCK_Q: tl.constexpr = CONFIG.BLOCK_Q
    for start_q in tl.range(first, end, BLOCK_Q):
        q_at = batch, head, start_q
        q_tile = load_tile(q, layout.q, q_at, seq_q, layout.head_dim, BLOCK_Q, False, CONFIG)
        if band[2] is not None:
            kept = live_queries(start_q, band, sizes, BLOCK_Q)
            q_tile = keep_rows(q_tile, kept, CONFIG.TERMS)
        lse_log2_rows = load_lse_log2(stats, layout.stats, row, start_q, seq_q, BLOCK_Q)
        s = dot_transposed(k_tile, q_tile, CONFIG)
        if scale.cap is not None:
            s = capped(s, scale.cap)
        x = in_base_2(s, score, lies, start_q, start_kv, sizes, True, False, CONFIG)
        p = tl.exp2(x - lse_log2_rows[None, :])
        if MASKED:
            p = apply_mask_transposed(p, start_q, start_kv, band, seq_q, full, 0.0)
        do_tile = load_tile(
            grad_o, layout.grad_o, q_at, seq_q, layout.head_dim, BLOCK_Q, False, CONFIG
        )
        if band[2] is not None:
            do_tile = keep_rows(do_tile, kept, CONFIG.TERMS)
        dv = dot(p, do_tile, dv, CONFIG)
        dp = dot_transposed(v_tile, do_tile, CONFIG)
        delta_rows = load_delta(stats, layout, q_at, do_tile, lse_log2_rows, row, seq_q, CONFIG)
        ds = p * (dp - delta_rows[None, :])
        if scale.cap is not None:
            ds = ds * (1 - s * s)
        dk = dot(ds, q_tile, dk, CONFIG)
    return dk, dv


@triton.jit
def compute_dkdv(
    grid,
    inputs,
    grads,
    gqa,
    sizes,
    band,
    split,
    scores,
    lies,
    BOTH: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """Compute dk and dv of one tile; BOTH says that the launch computes dq as well."""
    _, k, v, _, stats, layout = inputs
    heads, group = gqa
    seq_kv, scale = sizes[1], scores.scale
    BLOCK_KV: tl.constexpr = CONFIG.BLOCK_KV
    MASKED: tl.constexpr = band[0] is not None or band[1] is not None or band[2] is not None
    SECTIONED: tl.constexpr = MASKED and CONFIG.TERMS > 0
    # Tiles that need no mask have no loop of their own where the addresses of two loops would take
    # too many registers.
    CROWDED: tl.constexpr = CONFIG.BLOCK_D >= WIDE and (BOTH or CONFIG.PRECISION == "bf16x6")
    SCORED: tl.constexpr = (
        scale.cap is not None or scores.slope is not None or scores.bias is not None
    )
    BOUNDED: tl.constexpr = band[0] is not None or band[2] is not None
    ONE_LOOP: tl.constexpr = MASKED and (
        CONFIG.TERMS > 0 or CROWDED or SCORED or stats[2] is not None or BOUNDED
    )
    # Under a causal mask the first keys are seen by most queries, so they come first.
    kv_at, out_at = own_tile(grid, seq_kv, heads // group, split, BLOCK_KV, False, SECTIONED)
    batch, kv_head, start_kv = kv_at
    k_tile = load_tile(k, layout.k, kv_at, seq_kv, layout.head_dim, BLOCK_KV, False, CONFIG)
    v_tile = load_tile(v, layout.v, kv_at, seq_kv, layout.head_dim, BLOCK_KV, False, CONFIG)
    own = k_tile, v_tile
    if band[2] is not None:
        keys, queries = of_batch(band[2], band[3], batch, layout.bounds)
        band = None, None, keys, queries
    dk_acc = tl.zeros([BLOCK_KV, CONFIG.BLOCK_D], tl.float32)
    acc = dk_acc, tl.zeros([BLOCK_KV, CONFIG.BLOCK_D], tl.float32)
    begin = split_begin(out_at[0], split)
    first, full_begin, full_end, end = query_tiles(start_kv, band, sizes, begin, split[1], CONFIG)
    full, masked_end = None, full_begin
    if BOUNDED:
        full = full_begin, full_end
    if ONE_LOOP:
        masked_end = end
    for head in tl.range(kv_head * group, kv_head * group + group):
        slope, bias = scores.slope, scores.bias
        if slope is not None:
            slope = slope_of(slope, lies, batch, head)
        if bias is not None:
            bias = bias_of(bias, lies, batch, head, CONFIG.VECTOR)
        score = Score(scale, slope, bias, None)
        at, row = (batch, head, start_kv), batch * heads + head
        if MASKED:
            acc = dkdv_mainloop(
                *(acc, own, inputs, at, row, first, masked_end, full),
                *(sizes, band, score, lies, True, CONFIG),
            )
        if not ONE_LOOP:
            acc = dkdv_mainloop(
                *(acc, own, inputs, at, row, masked_end, end, full),
                *(sizes, band, score, lies, False, CONFIG),
            )
    dk_acc, dv_acc = acc
    if band[2] is not None:  # a key that no query sees may be NaN, but only in its own row
        seen = seen_keys(start_kv, band, sizes, BLOCK_KV)
        dk_acc = tl.where(seen[:, None], dk_acc, 0.0)
    dk_acc = dk_acc * scale.factor
    store_tile(grads[0], layout.dk, out_at, seq_kv, dk_acc, layout.head_dim, CONFIG.PADDED)
    store_tile(grads[1], layout.dv, out_at, seq_kv, dv_acc, layout.head_dim, CONFIG.PADDED)


@triton.jit
def score_gradients(
    own,
    inputs,
    at,
    start_kv,
    full,
    sizes,
    band,
    score,
    lies,
    MASKED: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """Return dS, S and K of a tile of queries and a tile of keys.

    ALiBi and a bias may already be subtracted from lse_log2 instead of being added to scores. With
    a softcap, S is capped, and dS is its gradient. Other arguments are as in ``dq_mainloop``.
    """
    q_tile, do_tile, lse_log2, delta = own
    _, k, v, _, _, layout = inputs
    batch, kv_head, start_q = at
    kv_at = batch, kv_head, start_kv
    seq_kv, scale = sizes[1], score.scale
    BLOCK_KV: tl.constexpr = CONFIG.BLOCK_KV
    k_tile = load_tile(k, layout.k, kv_at, seq_kv, layout.head_dim, BLOCK_KV, not MASKED, CONFIG)
    if MASKED and band[2] is not None:
        kept = seen_keys(start_kv, band, sizes, BLOCK_KV)
        k_tile = keep_rows(k_tile, kept, CONFIG.TERMS)
    s = dot_transposed(q_tile, k_tile, CONFIG)  # [BLOCK_Q, BLOCK_KV]
    if scale.cap is not None:
        s = capped(s, scale.cap)
    x = in_base_2(s, score, lies, start_q, start_kv, sizes, False, not MASKED, CONFIG)
    p = tl.exp2(x - lse_log2)
    if MASKED:  # keys that do not exist, too: their P could be inf, and inf * 0 is NaN
        p = apply_mask(p, start_q, start_kv, band, sizes, full, 0.0)
    v_tile = load_tile(v, layout.v, kv_at, seq_kv, layout.head_dim, BLOCK_KV, not MASKED, CONFIG)
    dp = dot_transposed(do_tile, v_tile, CONFIG)
    ds = p * (dp - delta)
    if MASKED and band[2] is not None:
        ds = tl.where(p > 0.0, ds, 0.0)
    return ds, s, k_tile


@triton.jit
def dq_mainloop(
    dq,
    own,
    inputs,
    at,
    first,
    end,
    full,
    sizes,
    band,
    score,
    lies,
    MASKED: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """Add the contribution of keys ``first ... end`` to dq of a tile of queries.

    ``own`` is (q, dO, lse_log2, delta) of the tile; ``at`` is (batch, key head, first query).
    In masked tiles, by bounds of rows, keys and values that no query sees may be NaN.
    """
    for start_kv in tl.range(first, end, CONFIG.BLOCK_KV):
        ds, s, k_tile = score_gradients(
            own, inputs, at, start_kv, full, sizes, band, score, lies, MASKED, CONFIG
        )
        if score.dbias is not None:
            store_dbias(ds, score.dbias, at[2], start_kv, sizes, CONFIG)
        if score.scale.cap is not None:
            ds = ds * (1 - s * s)
        dq = dot(ds, k_tile, dq, CONFIG)
    return dq


@triton.jit
def compute_dq(
    grid,
    inputs,
    dq,
    gqa,
    sizes,
    band,
    split,
    scores,
    lies,
    BOTH: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """Compute dq of one tile; BOTH says that the launch computes dk and dv as well."""
    q, _, _, grad_o, stats, layout = inputs
    heads, group = gqa
    seq_q = sizes[0]
    BLOCK_Q: tl.constexpr = CONFIG.BLOCK_Q
    MASKED: tl.constexpr = band[0] is not None or band[1] is not None or band[2] is not None
    SECTIONED: tl.constexpr = MASKED and CONFIG.TERMS > 0
    CROWDED: tl.constexpr = MASKED and BOTH and CONFIG.BLOCK_D >= WIDE
    WIDE_FP32: tl.constexpr = CONFIG.PRECISION == "bf16x6" and CONFIG.BLOCK_D >= ONE_LOOP_FP32
    q_at, out_at = own_tile(grid, seq_q, heads, split, BLOCK_Q, MASKED, SECTIONED)
    batch, head, start_q = q_at
    begin, row = split_begin(out_at[0], split), batch * heads + head
    q_tile = load_tile(q, layout.q, q_at, seq_q, layout.head_dim, BLOCK_Q, False, CONFIG)
    do_tile = load_tile(grad_o, layout.grad_o, q_at, seq_q, layout.head_dim, BLOCK_Q, False, CONFIG)
    if band[2] is not None:
        keys, queries = of_batch(band[2], band[3], batch, layout.bounds)
        band = None, None, keys, queries
    lse_log2_rows = load_lse_log2(stats, layout.stats, row, start_q, seq_q, BLOCK_Q)
    delta_rows = load_delta(stats, layout, q_at, do_tile, lse_log2_rows, row, seq_q, CONFIG)
    own = q_tile, do_tile, lse_log2_rows[:, None], delta_rows[:, None]
    acc = tl.zeros([BLOCK_Q, CONFIG.BLOCK_D], tl.float32)
    scale, slope, bias, dbias = scores
    if slope is not None:
        slope = slope_of(slope, lies, batch, head)
    if bias is not None:
        bias = bias_of(bias, lies, batch, head, CONFIG.VECTOR)
    if dbias is not None:
        dbias += tl.cast(row, tl.int64) * seq_q * multiple(sizes[1], CONFIG.VECTOR)
    score = Score(scale, slope, bias, dbias)
    first, full_begin, full_end, end = key_tiles(start_q, band, sizes, begin, split[1], CONFIG)
    BOUNDED: tl.constexpr = band[0] is not None or band[2] is not None
    ONE_LOOP: tl.constexpr = (
        CONFIG.TERMS > 0 or WIDE_FP32 or stats[2] is not None or CROWDED or BOUNDED
    )
    full = (full_begin, full_end) if BOUNDED else None
    begin, stop = first, full_end
    if band[2] is not None:
        begin, stop = whole_tiles(full_begin, full_end, end)
    at = batch, head // group, start_q
    if not ONE_LOOP or band[2] is not None:
        acc = dq_mainloop(
            acc, own, inputs, at, begin, stop, None, sizes, band, score, lies, False, CONFIG
        )
    if band[2] is None:
        if not ONE_LOOP:
            begin = stop
        acc = dq_mainloop(
            acc, own, inputs, at, begin, end, full, sizes, band, score, lies, True, CONFIG
        )
    else:
        for side in range(2):
            lo, hi = first if side == 0 else stop, begin if side == 0 else end
            acc = dq_mainloop(
                acc, own, inputs, at, lo, hi, full, sizes, band, score, lies, True, CONFIG
            )
        # Likewise, a query that sees no key may be NaN.
        live = live_queries(start_q, band, sizes, BLOCK_Q)
        acc = tl.where(live[:, None], acc, 0.0)
    acc = acc * scale.factor
    store_tile(dq, layout.dq, out_at, seq_q, acc, layout.head_dim, CONFIG.PADDED)
