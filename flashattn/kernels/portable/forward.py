"""flashattn_fwd: algorithm 1 of FlashAttention-2 (Dao, 2023), one tile of queries per program.

Where that makes fewer programs than the GPU has room for, the keys are split as well, as in
Flash-Decoding (Dao, Haziza, Massa, Sizov, 2023): each program folds a part of the keys, and
flashattn_combine puts the parts together by their largest scores, always in the same order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flashattn.kernels.constants import SIZES
from flashattn.kernels.portable.mask import seen_keys, visited_keys
from flashattn.kernels.portable.memory import load_tile, store_rows, store_tile
from flashattn.kernels.portable.mma import WIDE_FP32, cut_parts, dot, dot_transposed
from flashattn.kernels.portable.scheduler import banded_tile
from flashattn.kernels.portable.softmax import add_compensated, normalized

SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # below it, -inf * scale is NaN on the GPU


@triton.jit
def fold_keys(
    state,
    q_tile,
    k,
    v,
    k_strides,
    v_strides,
    batch,
    kv_head,
    start_q,
    first,
    end,
    seq_kv,
    diagonal,
    scale_log2,
    scale_sign,
    head_dim,
    PADDED: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
    POSITIVE_SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """Fold keys ``first ... end`` into the online softmax, (acc, m, l, lost); ``m`` is in base 2.

    In fp32 ``lost`` is what rounding has added to ``l``, a sum of as many terms as there are tiles.
    """
    acc, m, l, lost = state
    COMPENSATED: tl.constexpr = cut_parts(PRECISION) > 0 or q_tile.dtype == tl.float32
    for start_kv in tl.range(first, end, BLOCK_KV):
        k_tile = load_tile(
            k, k_strides, batch, kv_head, start_kv, seq_kv,
            head_dim, PADDED, BLOCK_KV, BLOCK_D, not MASKED, DESCRIPTORS, PRECISION,
        )  # fmt: skip
        s = dot_transposed(q_tile, k_tile, PRECISION)  # [BLOCK_Q, BLOCK_KV]
        if not POSITIVE_SCALE:  # what is positive does not move the maximum
            s = s * scale_sign
        if MASKED:
            seen = seen_keys(start_q, start_kv, seq_kv, diagonal, BLOCK_Q, BLOCK_KV, CAUSAL)
            s = tl.where(seen, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * scale_log2)
        finite = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row that has seen no key yet
        p = tl.exp2(s * scale_log2 - finite[:, None])
        alpha = tl.exp2(m - finite)
        if COMPENSATED:
            l, lost = add_compensated(l * alpha, lost * alpha, tl.sum(p, 1))
        else:
            l = l * alpha + tl.sum(p, 1)
        v_tile = load_tile(
            v, v_strides, batch, kv_head, start_kv, seq_kv,
            head_dim, PADDED, BLOCK_KV, BLOCK_D, not MASKED, DESCRIPTORS, PRECISION,
        )  # fmt: skip
        acc = dot(p, v_tile, acc * alpha[:, None], PRECISION)
        m = m_new
    return acc, m, l, lost


@triton.jit(do_not_specialize=SIZES)
def flashattn_fwd(
    q,
    k,
    v,
    o,
    lse,
    q_strides,
    k_strides,
    v_strides,
    o_strides,
    heads,
    group,
    seq_q,
    seq_kv,
    diagonal,
    batches,
    chunk,
    scale_log2,
    scale_sign,
    head_dim,
    PADDED: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    CAUSAL: tl.constexpr,
    POSITIVE_SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Compute o and lse; a program folds the keys that one tile of queries of one head sees.

    With SPLIT only those of its part, of ``chunk`` keys; o has a batch for each part, of sums that
    nothing has divided, and lse holds m of each part, and then l of each.
    """
    CUT: tl.constexpr = cut_parts(PRECISION) > 0
    block, place, head = banded_tile(
        tl.program_id(0), tl.num_programs(0), tl.cdiv(seq_q, BLOCK_Q), heads, CAUSAL, CAUSAL and CUT
    )
    start_q = block * BLOCK_Q
    if SPLIT:
        batch, first = place % batches, place // batches * chunk
    else:
        batch, first = place, 0
    q_tile = load_tile(
        q,
        q_strides,
        batch,
        head,
        start_q,
        seq_q,
        head_dim,
        PADDED,
        BLOCK_Q,
        BLOCK_D,
        False,
        DESCRIPTORS,
        PRECISION,
    )
    acc = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    m = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_Q], tl.float32)
    lost = tl.zeros([BLOCK_Q], tl.float32)
    full, end = visited_keys(start_q, seq_q, seq_kv, diagonal, BLOCK_Q, BLOCK_KV, CAUSAL)
    if SPLIT:  # a chunk is whole tiles
        full = tl.maximum(tl.minimum(full, first + chunk), first)
        end = tl.minimum(end, first + chunk)
    if CUT or (PRECISION == "bf16x6" and BLOCK_D >= WIDE_FP32):
        full = first
    else:
        acc, m, l, lost = fold_keys(
            (acc, m, l, lost), q_tile, k, v, k_strides, v_strides, batch, head // group,
            start_q, first, full, seq_kv, diagonal, scale_log2, scale_sign,
            head_dim, PADDED, BLOCK_D, BLOCK_Q, BLOCK_KV, CAUSAL, False, POSITIVE_SCALE,
            PRECISION, DESCRIPTORS,
        )  # fmt: skip
    acc, m, l, lost = fold_keys(
        (acc, m, l, lost), q_tile, k, v, k_strides, v_strides, batch, head // group,
        start_q, full, end, seq_kv, diagonal, scale_log2, scale_sign,
        head_dim, PADDED, BLOCK_D, BLOCK_Q, BLOCK_KV, CAUSAL, True, POSITIVE_SCALE,
        PRECISION, DESCRIPTORS,
    )  # fmt: skip
    row = place * heads + head
    if SPLIT:  # m and l apart: a logsumexp in fp32 would round what a part weighs
        rows = tl.num_programs(0) // tl.cdiv(seq_q, BLOCK_Q)
        store_rows(lse, row, seq_q, start_q, seq_q, m, BLOCK_Q)
        store_rows(lse, row + rows, seq_q, start_q, seq_q, l, BLOCK_Q)
    else:
        acc, m = normalized(acc, m, l)
        store_rows(lse, row, seq_q, start_q, seq_q, m, BLOCK_Q)
    store_tile(o, o_strides, place, head, start_q, seq_q, acc, head_dim, PADDED, BLOCK_Q, BLOCK_D)
