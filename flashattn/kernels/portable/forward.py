"""flashattn_fwd: algorithm 1 of FlashAttention-2 (Dao, 2023), one tile of queries per program.

If that gives fewer programs than the GPU has room for, the keys are split as well, as in
Flash-Decoding (Dao, Haziza, Massa, Sizov, 2023): each program takes one split of the keys, and the
last one to finish weights the splits by their largest scores, always in the same order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flashattn.kernels.constants import HALF_BIT, SIZES
from flashattn.kernels.portable.combine import combined, is_last, store_output, store_split
from flashattn.kernels.portable.mask import (
    apply_mask,
    keep_rows,
    key_tiles,
    of_batch,
    seen_keys,
    whole_tiles,
)
from flashattn.kernels.portable.memory import load_tile
from flashattn.kernels.portable.mma import ONE_LOOP_FP32, dot, dot_transposed
from flashattn.kernels.portable.scheduler import own_tile, split_begin
from flashattn.kernels.portable.score import (
    Score,
    bias_of,
    capped,
    first_state,
    in_base_2,
    slope_of,
)
from flashattn.kernels.portable.softmax import add_compensated, finite_max

SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # below it, -inf * scale is NaN on the GPU


@triton.jit
def mainloop(
    state,
    q_tile,
    kv,
    layout,
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
    """Update the online softmax (acc, m, l, l_error) with keys ``first ... end``; m is in base 2.

    ``kv`` is (k, v); ``at`` is (batch, key head, first query); ``full`` is as in ``apply_mask``.
    In masked tiles, by bounds of rows, values that no query sees may be NaN. In fp32, l_error is
    the rounding error of l, a sum with one term for each tile.
    """
    acc, m, l, l_error = state
    k, v = kv
    batch, kv_head, start_q = at
    seq_kv, scale = sizes[1], score.scale
    BLOCK_KV: tl.constexpr = CONFIG.BLOCK_KV
    ALL_KEYS: tl.constexpr = not MASKED
    COMPENSATED: tl.constexpr = CONFIG.TERMS > 0 or q_tile.dtype == tl.float32
    for start_kv in tl.range(first, end, BLOCK_KV):
        kv_at = batch, kv_head, start_kv
        k_tile = load_tile(k, layout.k, kv_at, seq_kv, layout.head_dim, BLOCK_KV, ALL_KEYS, CONFIG)
        s = dot_transposed(q_tile, k_tile, CONFIG)  # [BLOCK_Q, BLOCK_KV]
        if scale.sign is not None:
            s = s * scale.sign
        if scale.cap is not None:
            s = capped(s, scale.cap)
        log2 = scale.log2
        if score.slope is not None or score.bias is not None:
            s = in_base_2(s, score, lies, start_q, start_kv, sizes, False, ALL_KEYS, CONFIG)
            log2 = 1.0
        if MASKED:
            s = apply_mask(s, start_q, start_kv, band, sizes, full, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * log2)
        finite = finite_max(m_new)
        p = tl.exp2(s * log2 - finite[:, None])
        alpha = tl.exp2(m - finite)
        if COMPENSATED:
            l, l_error = add_compensated(l * alpha, l_error * alpha, tl.sum(p, 1))
        else:
            l = l * alpha + tl.sum(p, 1)
        v_tile = load_tile(v, layout.v, kv_at, seq_kv, layout.head_dim, BLOCK_KV, ALL_KEYS, CONFIG)
        if MASKED and band[2] is not None:
            kept = seen_keys(start_kv, band, sizes, BLOCK_KV)
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
    partial,
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

    With split_len, a program sees only the keys of its split. ``partial`` is (acc of the splits,
    not divided by l; their m, then their l; counters).
    """
    BLOCK_Q: tl.constexpr = CONFIG.BLOCK_Q
    MASKED: tl.constexpr = left is not None or right is not None or bounds[0] is not None
    SECTIONED: tl.constexpr = MASKED and CONFIG.TERMS > 0
    grid = tl.program_id(0), tl.num_programs(0)
    sizes, split = (seq_q, seq_kv), (batches, split_len)
    q_at, out_at = own_tile(grid, seq_q, heads, split, BLOCK_Q, MASKED, SECTIONED)
    batch, head, start_q = q_at
    band = left, right, bounds[0], bounds[1]
    if bounds[0] is not None:
        keys, queries = of_batch(bounds[0], bounds[1], batch, layout.bounds)
        band = None, None, keys, queries
    slope, bias = scored[0], scored[1]
    if slope is not None:
        slope = slope_of(slope, lies, batch, head)
    if bias is not None:
        bias = bias_of(bias, lies, batch, head, CONFIG.VECTOR)
    score = Score(scale, slope, bias, None)
    begin = split_begin(out_at[0], split)
    q_tile = load_tile(q, layout.q, q_at, seq_q, layout.head_dim, BLOCK_Q, False, CONFIG)
    acc = tl.zeros([BLOCK_Q, CONFIG.BLOCK_D], tl.float32)
    m, l = first_state(scored[2], lies, batch, head, begin == 0, BLOCK_Q)
    state = acc, m, l, tl.zeros([BLOCK_Q], tl.float32)
    first, full_begin, full_end, end = key_tiles(start_q, band, sizes, begin, split_len, CONFIG)
    WIDE_FP32: tl.constexpr = CONFIG.PRECISION == "bf16x6" and CONFIG.BLOCK_D >= ONE_LOOP_FP32
    BOUNDED: tl.constexpr = left is not None or bounds[0] is not None
    ONE_LOOP: tl.constexpr = CONFIG.TERMS > 0 or WIDE_FP32 or BOUNDED
    full = (full_begin, full_end) if BOUNDED else None
    begin, stop = first, full_end
    if bounds[0] is not None:
        begin, stop = whole_tiles(full_begin, full_end, end)
    at, kv = (batch, head // group, start_q), (k, v)
    if not ONE_LOOP or bounds[0] is not None:
        state = mainloop(
            *(state, q_tile, kv, layout, at, begin, stop, None),
            *(sizes, band, score, lies, False, CONFIG),
        )
    if bounds[0] is None:
        if not ONE_LOOP:
            begin = stop
        state = mainloop(
            state, q_tile, kv, layout, at, begin, end, full, sizes, band, score, lies, True, CONFIG
        )
    else:
        for side in range(2):
            lo, hi = first if side == 0 else stop, begin if side == 0 else end
            state = mainloop(
                state, q_tile, kv, layout, at, lo, hi, full, sizes, band, score, lies, True, CONFIG
            )
    store_state(o, lse, partial, layout, q_at, out_at[0], heads, sizes, split, state, CONFIG)


@triton.jit
def store_state(
    o, lse, partial, layout, at, out_batch, heads, sizes, split, state, CONFIG: tl.constexpr
):
    """Store a tile of o and lse, or the state of a split.

    With counters, the last split of a tile to be stored combines all splits.
    """
    batch, head, start_q = at
    seq_q, seq_kv = sizes
    batches, split_len = split
    state, head_dim = (state[0], state[1], state[2]), layout.head_dim
    if split_len is not None:
        blocks, splits = tl.cdiv(seq_q, CONFIG.BLOCK_Q), tl.cdiv(seq_kv, split_len)
        tile = (batch * heads + head) * blocks + start_q // CONFIG.BLOCK_Q
        grid, rows = (splits, batches * heads * blocks, CONFIG.BLOCK_Q), seq_q - start_q
        store_split(partial, grid, out_batch // batches, tile, rows, state)
        if partial[2] is not None:
            if is_last(partial[2] + tile, splits):
                whole = combined(partial, grid, (tile, 0), rows, CONFIG.BLOCK_Q, CONFIG.BLOCK_D)
                store_output(o, lse, layout.o, at, heads, seq_q, head_dim, whole, CONFIG.PADDED)
    else:
        store_output(o, lse, layout.o, at, heads, seq_q, head_dim, state, CONFIG.PADDED)
