"""flashattn_fwd: algorithm 1 of FlashAttention-2 (Dao, 2023), one tile of queries per program.

Where that makes fewer programs than the GPU has room for, the keys are split as well, as in
Flash-Decoding (Dao, Haziza, Massa, Sizov, 2023): each program takes one split of the keys, and
flashattn_combine weighs the splits by their largest scores, always in the same order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flashattn.kernels.constants import HALF_BIT, SIZES
from flashattn.kernels.portable.mask import (
    apply_mask,
    clean_keys,
    keep_rows,
    key_tiles,
    of_batch,
    seen_keys,
)
from flashattn.kernels.portable.memory import load_tile, store_rows, store_tile
from flashattn.kernels.portable.mma import ONE_LOOP_FP32, dot, dot_transposed
from flashattn.kernels.portable.scheduler import own_tile, split_begin
from flashattn.kernels.portable.score import bias_of, capped, first_state, in_base_2, slope_of
from flashattn.kernels.portable.softmax import add_compensated, finite_max, normalized

SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # below it, -inf * scale is NaN on the GPU


@triton.jit
def mainloop(
    state,
    q_tile,
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
    """Update the online softmax (acc, m, l, l_error) by keys ``first ... end``; m is in base 2.

    Unless CLEAN, values that no query sees may be NaN. In fp32 l_error is what rounding has added
    to l, a sum of as many terms as there are tiles.
    """
    acc, m, l, l_error = state
    scale = score[0]
    BLOCK_KV: tl.constexpr = CONFIG.BLOCK_KV
    COMPENSATED: tl.constexpr = CONFIG.TERMS > 0 or q_tile.dtype == tl.float32
    for start_kv in tl.range(first, end, BLOCK_KV):
        at = batch, kv_head, start_kv
        k_tile = load_tile(k, layout.k, at, seq_kv, layout.head_dim, BLOCK_KV, not MASKED, CONFIG)
        s = dot_transposed(q_tile, k_tile, CONFIG)  # [BLOCK_Q, BLOCK_KV]
        if scale.sign is not None:
            s = s * scale.sign
        if scale.cap is not None:
            s = capped(s, scale.cap)
        log2 = scale.log2
        if score[1] is not None or score[2] is not None:
            s = in_base_2(
                s, score, lies, start_q, start_kv, seq_q, seq_kv, False, not MASKED, CONFIG
            )
            log2 = 1.0
        if MASKED:
            s = apply_mask(
                s, start_q, start_kv, band, seq_q, seq_kv, float("-inf"), CONFIG.BLOCK_Q, BLOCK_KV
            )
        m_new = tl.maximum(m, tl.max(s, 1) * log2)
        finite = finite_max(m_new)
        p = tl.exp2(s * log2 - finite[:, None])
        alpha = tl.exp2(m - finite)
        if COMPENSATED:
            l, l_error = add_compensated(l * alpha, l_error * alpha, tl.sum(p, 1))
        else:
            l = l * alpha + tl.sum(p, 1)
        v_tile = load_tile(v, layout.v, at, seq_kv, layout.head_dim, BLOCK_KV, not MASKED, CONFIG)
        if not CLEAN:
            kept = seen_keys(start_kv, band, seq_q, seq_kv, BLOCK_KV)
            v_tile = keep_rows(v_tile, kept, CONFIG.TERMS)
        acc = dot(p, v_tile, acc * alpha[:, None], CONFIG, HALF_BIT)
        m = m_new
    return acc, m, l, l_error


@triton.jit(do_not_specialize=SIZES)
def flashattn_fwd(
    q,
    k,
    v,
    o,
    lse,
    bounds,
    scored,
    lies,
    layout,
    heads,
    group,
    seq_q,
    seq_kv,
    left,
    right,
    batches,
    split_len,
    scale,
    CONFIG: tl.constexpr,
):
    """Compute o and lse; a program owns one tile of queries of one head.

    With split_len it sees only the keys of its split; o has a batch for each split, not divided by
    l, and lse holds m of each split, and then l of each.
    """
    BLOCK_Q: tl.constexpr = CONFIG.BLOCK_Q
    band = left, right, bounds[0], bounds[1]
    MASKED: tl.constexpr = left is not None or right is not None or bounds[0] is not None
    start_q, out_batch, batch, head = own_tile(
        tl.program_id(0), tl.num_programs(0), seq_q, heads, batches, split_len,
        BLOCK_Q, MASKED, MASKED and CONFIG.TERMS > 0,
    )  # fmt: skip
    if bounds[0] is not None:
        of_keys, of_queries = layout.bounds
        band = (
            None,
            None,
            of_batch(bounds[0], batch, of_keys),
            of_batch(bounds[1], batch, of_queries),
        )
    slope, bias = scored[0], scored[1]
    if slope is not None:
        slope = slope_of(slope, lies, batch, head)
    if bias is not None:
        bias = bias_of(bias, lies, batch, head, CONFIG.VECTOR)
    score = scale, slope, bias, None
    begin = split_begin(out_batch, batches, split_len)
    q_tile = load_tile(
        q, layout.q, (batch, head, start_q), seq_q, layout.head_dim, BLOCK_Q, False, CONFIG
    )
    acc = tl.zeros([BLOCK_Q, CONFIG.BLOCK_D], tl.float32)
    m, l = first_state(scored[2], lies, batch, head, begin == 0, BLOCK_Q)
    l_error = tl.zeros([BLOCK_Q], tl.float32)
    _, full_begin, full_end, end = key_tiles(
        start_q, band, seq_q, seq_kv, begin, split_len, BLOCK_Q, CONFIG.BLOCK_KV
    )
    WIDE_FP32: tl.constexpr = CONFIG.PRECISION == "bf16x6" and CONFIG.BLOCK_D >= ONE_LOOP_FP32
    if CONFIG.TERMS > 0 or WIDE_FP32 or bounds[0] is not None:
        full_end = full_begin
    else:
        acc, m, l, l_error = mainloop(
            (acc, m, l, l_error), q_tile, k, v, layout, batch, head // group, start_q,
            full_begin, full_end, seq_q, seq_kv, band, score, lies, False, True, CONFIG,
        )  # fmt: skip
    begin, stop = full_end, end
    if bounds[0] is not None:
        begin, stop = clean_keys(full_end, end, band, seq_q, CONFIG.BLOCK_KV)
    acc, m, l, l_error = mainloop(
        (acc, m, l, l_error), q_tile, k, v, layout, batch, head // group, start_q,
        begin, stop, seq_q, seq_kv, band, score, lies, True, True, CONFIG,
    )  # fmt: skip
    if bounds[0] is not None:
        for side in range(2):
            acc, m, l, l_error = mainloop(
                (acc, m, l, l_error), q_tile, k, v, layout, batch, head // group, start_q,
                full_end if side == 0 else stop, begin if side == 0 else end, seq_q, seq_kv, band,
                score, lies, True, False, CONFIG,
            )  # fmt: skip
    row = out_batch * heads + head
    if split_len is None:
        acc, m = normalized(acc, m, l)
        store_rows(lse, row, seq_q, start_q, seq_q, m, BLOCK_Q)
    else:  # m and l apart: a logsumexp in fp32 would round the weight of a split
        rows = tl.num_programs(0) // tl.cdiv(seq_q, BLOCK_Q)
        store_rows(lse, row, seq_q, start_q, seq_q, m, BLOCK_Q)
        store_rows(lse, row + rows, seq_q, start_q, seq_q, l, BLOCK_Q)
    store_tile(o, layout.o, (out_batch, head, start_q), seq_q, acc, layout.head_dim, CONFIG.PADDED,
               BLOCK_Q, CONFIG.BLOCK_D)  # fmt: skip
