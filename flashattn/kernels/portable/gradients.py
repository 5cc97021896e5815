"""One program's share of the backward's two passes: dK and dV of its keys, or dQ of its queries.

``stats`` are as ``preprocess.load_lse_log2`` says; ``band`` as ``mask`` says, and of it ``bounds``,
the last two; ``split_len`` are the rows of what a program loops over, None if it loops over all:
then an output has a batch for each split.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashattn.kernels.portable.mask import (
    apply_mask,
    apply_mask_transposed,
    clean_keys,
    keep_rows,
    key_tiles,
    live_queries,
    of_batch,
    query_tiles,
    seen_keys,
)
from flashattn.kernels.portable.memory import load_tile, multiple, store_tile
from flashattn.kernels.portable.mma import ONE_LOOP_FP32, dot, dot_transposed
from flashattn.kernels.portable.preprocess import load_delta, load_lse_log2
from flashattn.kernels.portable.scheduler import own_tile, split_begin
from flashattn.kernels.portable.score import (
    bias_of,
    capped,
    in_base_2,
    slope_of,
    store_dbias,
)

# BLOCK_D from which two loops leave too few registers: in each pass where both are one launch, and
# in dk and dv of fp32 that the kernel decomposes.
ONE_LOOP = tl.constexpr(128)


@triton.jit
def dkdv_mainloop(
    state,
    k_tile,
    v_tile,
    q,
    grad_o,
    stats,
    layout,
    batch,
    head,
    heads,
    start_kv,
    first,
    end,
    seq_q,
    seq_kv,
    band,
    score,
    lies,
    MASKED: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """Add what queries ``first ... end`` of one head give to (dk, dv) of a tile of keys.

    The scores are computed transposed, [BLOCK_KV, BLOCK_Q], so that P and dS come out of one
    product in the layout in which the next one takes them. By bounds of rows, q and dO of queries
    that see no key may be NaN.
    """
    dk, dv = state
    scale = score[0]
    row = batch * heads + head
    BLOCK_Q: tl.constexpr = CONFIG.BLOCK_Q
    for start_q in tl.range(first, end, BLOCK_Q):
        at = batch, head, start_q
        q_tile = load_tile(q, layout.q, at, seq_q, layout.head_dim, BLOCK_Q, False, CONFIG)
        if band[2] is not None:
            kept = live_queries(start_q, band, seq_q, seq_kv, BLOCK_Q)
            q_tile = keep_rows(q_tile, kept, CONFIG.TERMS)
        lse_log2_rows = load_lse_log2(stats, layout.stats, row, start_q, seq_q, BLOCK_Q)
        s = dot_transposed(k_tile, q_tile, CONFIG)
        if scale.cap is not None:
            s = capped(s, scale.cap)
        x = in_base_2(s, score, lies, start_q, start_kv, seq_q, seq_kv, True, False, CONFIG)
        p = tl.exp2(x - lse_log2_rows[None, :])
        if MASKED:
            p = apply_mask_transposed(
                p, start_q, start_kv, band, seq_q, 0.0, BLOCK_Q, CONFIG.BLOCK_KV
            )
        do_tile = load_tile(
            grad_o, layout.grad_o, at, seq_q, layout.head_dim, BLOCK_Q, False, CONFIG
        )
        if band[2] is not None:
            do_tile = keep_rows(do_tile, kept, CONFIG.TERMS)
        dv = dot(p, do_tile, dv, CONFIG)
        dp = dot_transposed(v_tile, do_tile, CONFIG)
        delta_rows = load_delta(
            stats, layout, at, do_tile, lse_log2_rows, row, seq_q, BLOCK_Q, CONFIG
        )
        ds = p * (dp - delta_rows[None, :])
        if scale.cap is not None:
            ds = ds * (1 - s * s)
        dk = dot(ds, q_tile, dk, CONFIG)
    return dk, dv


@triton.jit
def compute_dkdv(
    program,
    programs,
    q,
    k,
    v,
    grad_o,
    stats,
    dk,
    dv,
    scored,
    lies,
    layout,
    heads,
    group,
    seq_q,
    seq_kv,
    band,
    batches,
    split_len,
    scale,
    BOTH: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """Compute dk and dv of one tile; BOTH says that the launch computes dq as well."""
    BLOCK_KV: tl.constexpr = CONFIG.BLOCK_KV
    MASKED: tl.constexpr = band[0] is not None or band[1] is not None or band[2] is not None
    # Tiles that need no mask are masked, too, where a loop of their own would keep too many
    # addresses beside those of the other.
    CROWDED: tl.constexpr = CONFIG.BLOCK_D >= ONE_LOOP and (BOTH or CONFIG.PRECISION == "bf16x6")
    ALL_MASKED: tl.constexpr = MASKED and (
        CONFIG.TERMS > 0 or CROWDED or stats[2] is not None or scale.cap is not None
        or scored[0] is not None or scored[1] is not None or band[2] is not None
    )  # fmt: skip
    # Under a causal mask the first keys are seen by most queries, so they come first.
    start_kv, out_batch, batch, kv_head = own_tile(
        program, programs, seq_kv, heads // group, batches, split_len,
        BLOCK_KV, False, MASKED and CONFIG.TERMS > 0,
    )  # fmt: skip
    at, out_at = (batch, kv_head, start_kv), (out_batch, kv_head, start_kv)
    k_tile = load_tile(k, layout.k, at, seq_kv, layout.head_dim, BLOCK_KV, False, CONFIG)
    v_tile = load_tile(v, layout.v, at, seq_kv, layout.head_dim, BLOCK_KV, False, CONFIG)
    if band[2] is not None:
        of_keys, of_queries = layout.bounds
        band = None, None, of_batch(band[2], batch, of_keys), of_batch(band[3], batch, of_queries)
    dk_acc = tl.zeros([BLOCK_KV, CONFIG.BLOCK_D], tl.float32)
    dv_acc = tl.zeros([BLOCK_KV, CONFIG.BLOCK_D], tl.float32)
    begin = split_begin(out_batch, batches, split_len)
    first, full_begin, _, end = query_tiles(
        start_kv, band, seq_q, seq_kv, begin, split_len, CONFIG.BLOCK_Q, BLOCK_KV
    )
    if ALL_MASKED:
        full_begin = end
    for head in tl.range(kv_head * group, kv_head * group + group):
        slope, bias = scored[0], scored[1]
        if slope is not None:
            slope = slope_of(slope, lies, batch, head)
        if bias is not None:
            bias = bias_of(bias, lies, batch, head, CONFIG.VECTOR)
        score = scale, slope, bias, None
        if MASKED:
            dk_acc, dv_acc = dkdv_mainloop(
                (dk_acc, dv_acc), k_tile, v_tile, q, grad_o, stats, layout, batch, head, heads,
                start_kv, first, full_begin, seq_q, seq_kv, band, score, lies, True, CONFIG,
            )  # fmt: skip
        if not ALL_MASKED:
            dk_acc, dv_acc = dkdv_mainloop(
                (dk_acc, dv_acc), k_tile, v_tile, q, grad_o, stats, layout, batch, head, heads,
                start_kv, full_begin, end, seq_q, seq_kv, band, score, lies, False, CONFIG,
            )  # fmt: skip
    if band[2] is not None:  # a key that no query sees may be NaN, in its own row alone
        seen = seen_keys(start_kv, band, seq_q, seq_kv, BLOCK_KV)
        dk_acc = tl.where(seen[:, None], dk_acc, 0.0)
    store_tile(dk, layout.dk, out_at, seq_kv, dk_acc * scale.factor, layout.head_dim, CONFIG.PADDED,
               BLOCK_KV, CONFIG.BLOCK_D)  # fmt: skip
    store_tile(dv, layout.dv, out_at, seq_kv, dv_acc, layout.head_dim, CONFIG.PADDED, BLOCK_KV,
               CONFIG.BLOCK_D)  # fmt: skip


@triton.jit
def score_gradients(
    q_tile,
    do_tile,
    lse_log2_rows,
    delta_rows,
    k,
    v,
    layout,
    at,
    start_q,
    seq_q,
    seq_kv,
    band,
    score,
    lies,
    MASKED: tl.constexpr,
    CLEAN: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """Return dS of a tile of queries and of the keys at ``at``: batch, head, row; S, and K.

    With a softcap S is capped, and dS its gradient. Unless CLEAN, keys and values that no query
    sees may be NaN.
    """
    scale, start_kv = score[0], at[2]
    BLOCK_Q: tl.constexpr = CONFIG.BLOCK_Q
    BLOCK_KV: tl.constexpr = CONFIG.BLOCK_KV
    k_tile = load_tile(k, layout.k, at, seq_kv, layout.head_dim, BLOCK_KV, not MASKED, CONFIG)
    if not CLEAN:
        kept = seen_keys(start_kv, band, seq_q, seq_kv, BLOCK_KV)
        k_tile = keep_rows(k_tile, kept, CONFIG.TERMS)
    s = dot_transposed(q_tile, k_tile, CONFIG)  # [BLOCK_Q, BLOCK_KV]
    if scale.cap is not None:
        s = capped(s, scale.cap)
    x = in_base_2(s, score, lies, start_q, start_kv, seq_q, seq_kv, False, not MASKED, CONFIG)
    p = tl.exp2(x - lse_log2_rows[:, None])
    if MASKED:  # keys that do not exist, too: their P could be inf, and inf * 0 is NaN
        p = apply_mask(p, start_q, start_kv, band, seq_q, seq_kv, 0.0, BLOCK_Q, BLOCK_KV)
    v_tile = load_tile(v, layout.v, at, seq_kv, layout.head_dim, BLOCK_KV, not MASKED, CONFIG)
    dp = dot_transposed(do_tile, v_tile, CONFIG)
    ds = p * (dp - delta_rows[:, None])
    if band[2] is not None:
        ds = tl.where(p > 0.0, ds, 0.0)
    return ds, s, k_tile


@triton.jit
def dq_mainloop(
    dq,
    q_tile,
    do_tile,
    lse_log2_rows,
    delta_rows,
    k,
    v,
    layout,
    batch,
    kv_head,
    start_q,
    first,
    end,
    seq_q,
    seq_kv,
    band,
    score,
    lies,
    MASKED: tl.constexpr,
    CLEAN: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """Add what keys ``first ... end`` give to dq of a tile of queries.

    Unless CLEAN, keys and values that no query sees may be NaN.
    """
    scale = score[0]
    BLOCK_KV: tl.constexpr = CONFIG.BLOCK_KV
    for start_kv in tl.range(first, end, BLOCK_KV):
        at = batch, kv_head, start_kv
        ds, s, k_tile = score_gradients(
            q_tile, do_tile, lse_log2_rows, delta_rows, k, v, layout, at, start_q, seq_q, seq_kv,
            band, score, lies, MASKED, CLEAN, CONFIG,
        )  # fmt: skip
        if score[3] is not None:
            store_dbias(ds, score[3], start_q, start_kv, seq_q, seq_kv, CONFIG)
        if scale.cap is not None:
            ds = ds * (1 - s * s)
        dq = dot(ds, k_tile, dq, CONFIG)
    return dq


@triton.jit
def compute_dq(
    program,
    programs,
    q,
    k,
    v,
    grad_o,
    stats,
    dq,
    scored,
    lies,
    layout,
    heads,
    group,
    seq_q,
    seq_kv,
    band,
    batches,
    split_len,
    scale,
    BOTH: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """Compute dq of one tile; BOTH says that the launch computes dk and dv as well."""
    BLOCK_Q: tl.constexpr = CONFIG.BLOCK_Q
    MASKED: tl.constexpr = band[0] is not None or band[1] is not None or band[2] is not None
    CROWDED: tl.constexpr = MASKED and BOTH and CONFIG.BLOCK_D >= ONE_LOOP
    WIDE_FP32: tl.constexpr = CONFIG.PRECISION == "bf16x6" and CONFIG.BLOCK_D >= ONE_LOOP_FP32
    start_q, out_batch, batch, head = own_tile(
        program, programs, seq_q, heads, batches, split_len,
        BLOCK_Q, MASKED, MASKED and CONFIG.TERMS > 0,
    )  # fmt: skip
    begin, row = split_begin(out_batch, batches, split_len), batch * heads + head
    at, out_at = (batch, head, start_q), (out_batch, head, start_q)
    q_tile = load_tile(q, layout.q, at, seq_q, layout.head_dim, BLOCK_Q, False, CONFIG)
    do_tile = load_tile(grad_o, layout.grad_o, at, seq_q, layout.head_dim, BLOCK_Q, False, CONFIG)
    if band[2] is not None:
        of_keys, of_queries = layout.bounds
        band = None, None, of_batch(band[2], batch, of_keys), of_batch(band[3], batch, of_queries)
    lse_log2_rows = load_lse_log2(stats, layout.stats, row, start_q, seq_q, BLOCK_Q)
    delta_rows = load_delta(stats, layout, at, do_tile, lse_log2_rows, row, seq_q, BLOCK_Q, CONFIG)
    acc = tl.zeros([BLOCK_Q, CONFIG.BLOCK_D], tl.float32)
    slope, bias, dbias = scored
    if slope is not None:
        slope = slope_of(slope, lies, batch, head)
    if bias is not None:
        bias = bias_of(bias, lies, batch, head, CONFIG.VECTOR)
    if dbias is not None:
        dbias += tl.cast(row, tl.int64) * seq_q * multiple(seq_kv, CONFIG.VECTOR)
    score = scale, slope, bias, dbias
    _, full_begin, full_end, end = key_tiles(
        start_q, band, seq_q, seq_kv, begin, split_len, BLOCK_Q, CONFIG.BLOCK_KV
    )
    if CONFIG.TERMS > 0 or WIDE_FP32 or stats[2] is not None or CROWDED or band[2] is not None:
        full_end = full_begin
    else:
        acc = dq_mainloop(
            acc, q_tile, do_tile, lse_log2_rows, delta_rows, k, v, layout, batch, head // group,
            start_q, full_begin, full_end, seq_q, seq_kv, band, score, lies, False, True, CONFIG,
        )  # fmt: skip
    begin, stop = full_end, end
    if band[2] is not None:
        begin, stop = clean_keys(full_end, end, band, seq_q, CONFIG.BLOCK_KV)
    acc = dq_mainloop(
        acc, q_tile, do_tile, lse_log2_rows, delta_rows, k, v, layout, batch, head // group,
        start_q, begin, stop, seq_q, seq_kv, band, score, lies, True, True, CONFIG,
    )  # fmt: skip
    if band[2] is not None:
        for side in range(2):
            acc = dq_mainloop(
                acc, q_tile, do_tile, lse_log2_rows, delta_rows, k, v, layout, batch, head // group,
                start_q, full_end if side == 0 else stop, begin if side == 0 else end, seq_q,
                seq_kv, band, score, lies, True, False, CONFIG,
            )  # fmt: skip
    if band[2] is not None:  # likewise a query that sees no key
        live = live_queries(start_q, band, seq_q, seq_kv, BLOCK_Q)
        acc = tl.where(live[:, None], acc, 0.0)
    store_tile(dq, layout.dq, out_at, seq_q, acc * scale.factor, layout.head_dim, CONFIG.PADDED,
               BLOCK_Q, CONFIG.BLOCK_D)  # fmt: skip
