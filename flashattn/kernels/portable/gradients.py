"""The gradients on the device, in two deterministic passes: algorithm 2 of FlashAttention-2, split.

``flashattn_bwd_delta`` prepares two numbers a row; ``flashattn_bwd_dkdv`` owns a tile of keys and
walks over queries; ``flashattn_bwd_dq`` owns a tile of queries and walks over keys; where both
together are few programs, ``flashattn_bwd`` is all of them, side by side, and where there is next
to nothing to do it finds the two numbers itself. Each output element is written by one program, in
one order: no atomics. The algorithm is of Dao, 2023.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashattn.kernels.constants import SIZES
from flashattn.kernels.portable.mask import seen_keys, visited_keys
from flashattn.kernels.portable.memory import load_tile, store_tile
from flashattn.kernels.portable.mma import WIDE_FP32, cut_parts, dot, dot_transposed
from flashattn.kernels.portable.preprocess import load_delta, load_lse2
from flashattn.kernels.portable.scheduler import banded_tile

# Columns from which two loops leave too few registers: each pass where both are at once, and dk and
# dv of fp32 that the kernel cuts.
WIDE = tl.constexpr(128)


@triton.jit
def fold_queries(
    state,
    k_tile,
    v_tile,
    q,
    grad_o,
    lse2,
    delta,
    o,
    q_strides,
    grad_o_strides,
    o_strides,
    batch,
    head,
    row,
    pitch,
    start_kv,
    first,
    end,
    seq_q,
    diagonal,
    scale_log2,
    head_dim,
    PADDED: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """Add what queries ``first ... end`` of one head give to (dk, dv) of a tile of keys.

    The scores are computed transposed, [BLOCK_KV, BLOCK_Q], so that P and dS come out of one
    product in the layout in which the next one takes them.
    """
    dk, dv = state
    for start_q in tl.range(first, end, BLOCK_Q):
        q_tile = load_tile(
            q, q_strides, batch, head, start_q, seq_q,
            head_dim, PADDED, BLOCK_Q, BLOCK_D, False, DESCRIPTORS, PRECISION,
        )  # fmt: skip
        lse2_rows = load_lse2(lse2, o, row, pitch, start_q, seq_q, BLOCK_Q)
        s = dot_transposed(k_tile, q_tile, PRECISION)
        p = tl.exp2(s * scale_log2 - lse2_rows[None, :])
        if MASKED:
            rows = start_q + tl.arange(0, BLOCK_Q)[None, :]
            p = tl.where(start_kv + tl.arange(0, BLOCK_KV)[:, None] <= rows + diagonal, p, 0.0)
        do_tile = load_tile(
            grad_o, grad_o_strides, batch, head, start_q, seq_q,
            head_dim, PADDED, BLOCK_Q, BLOCK_D, False, DESCRIPTORS, PRECISION,
        )  # fmt: skip
        dv = dot(p, do_tile, dv, PRECISION)
        dp = dot_transposed(v_tile, do_tile, PRECISION)
        delta_rows = load_delta(
            delta, o, o_strides, do_tile, lse2_rows, batch, head, row, pitch, start_q, seq_q,
            head_dim, PADDED, BLOCK_Q, BLOCK_D,
        )  # fmt: skip
        ds = p * (dp - delta_rows[None, :])
        dk = dot(ds, q_tile, dk, PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=SIZES)
def flashattn_bwd_dkdv(
    q,
    k,
    v,
    grad_o,
    lse2,
    delta,
    dk,
    dv,
    o,
    q_strides,
    k_strides,
    v_strides,
    grad_o_strides,
    dk_strides,
    dv_strides,
    o_strides,
    heads,
    group,
    seq_q,
    seq_kv,
    pitch,
    diagonal,
    batches,
    chunk,
    scale,
    scale_log2,
    head_dim,
    PADDED: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    SPLIT: tl.constexpr,
    program=None,
    programs=None,
):
    """Compute dk and dv; a program owns a tile of keys of one head and sums its query heads.

    With SPLIT only those of its part, of ``chunk`` queries; dk and dv have a batch for each part.
    ``flashattn_bwd`` says which program of this pass it is, and of how many; with o, lse2 and delta
    are what ``load_lse2`` and ``load_delta`` say.
    """
    # Tiles that need no mask are masked, too, where a loop of their own would keep too many
    # addresses beside those of the other.
    CUT: tl.constexpr = cut_parts(PRECISION) > 0
    CROWDED: tl.constexpr = BLOCK_D >= WIDE and (program is not None or PRECISION == "bf16x6")
    ONE_LOOP: tl.constexpr = CAUSAL and (CUT or CROWDED or o is not None)
    if program is None:
        program, programs = tl.program_id(0), tl.num_programs(0)
    kv_heads = heads // group
    # Under a causal mask the first keys are seen by most queries, so they come first.
    block, place, kv_head = banded_tile(
        program, programs, tl.cdiv(seq_kv, BLOCK_KV), kv_heads, False, CAUSAL and CUT
    )
    start_kv = block * BLOCK_KV
    if SPLIT:
        batch = place % batches
    else:
        batch = place
    k_tile = load_tile(
        k, k_strides, batch, kv_head, start_kv, seq_kv,
        head_dim, PADDED, BLOCK_KV, BLOCK_D, False, DESCRIPTORS, PRECISION,
    )  # fmt: skip
    v_tile = load_tile(
        v, v_strides, batch, kv_head, start_kv, seq_kv,
        head_dim, PADDED, BLOCK_KV, BLOCK_D, False, DESCRIPTORS, PRECISION,
    )  # fmt: skip
    dk_acc = tl.zeros([BLOCK_KV, BLOCK_D], tl.float32)
    dv_acc = tl.zeros([BLOCK_KV, BLOCK_D], tl.float32)
    first, full = 0, 0  # queries from ``full`` on see all of the tile, those before ``first`` none
    if CAUSAL:
        first = tl.maximum(start_kv - diagonal, 0) // BLOCK_Q * BLOCK_Q
        full = tl.maximum(start_kv + BLOCK_KV - 1 - diagonal, 0)
        full = tl.minimum(tl.cdiv(full, BLOCK_Q) * BLOCK_Q, tl.cdiv(seq_q, BLOCK_Q) * BLOCK_Q)
    end = seq_q
    if SPLIT:  # a chunk is whole tiles
        begin = place // batches * chunk
        end = tl.minimum(end, begin + chunk)
        first = tl.maximum(first, begin)
        full = tl.maximum(tl.minimum(full, end), first)
    if ONE_LOOP:
        full = end
    for head in tl.range(kv_head * group, kv_head * group + group):
        row = batch * heads + head
        if CAUSAL:
            dk_acc, dv_acc = fold_queries(
                (dk_acc, dv_acc), k_tile, v_tile, q, grad_o, lse2, delta, o, q_strides,
                grad_o_strides, o_strides, batch, head, row, pitch, start_kv, first, full, seq_q,
                diagonal, scale_log2,
                head_dim, PADDED, BLOCK_D, BLOCK_Q, BLOCK_KV, True, PRECISION, DESCRIPTORS,
            )  # fmt: skip
        if not ONE_LOOP:
            dk_acc, dv_acc = fold_queries(
                (dk_acc, dv_acc), k_tile, v_tile, q, grad_o, lse2, delta, o, q_strides,
                grad_o_strides, o_strides, batch, head, row, pitch, start_kv, full, end, seq_q,
                diagonal, scale_log2,
                head_dim, PADDED, BLOCK_D, BLOCK_Q, BLOCK_KV, False, PRECISION, DESCRIPTORS,
            )  # fmt: skip
    store_tile(
        dk, dk_strides, place, kv_head, start_kv, seq_kv, dk_acc * scale,
        head_dim, PADDED, BLOCK_KV, BLOCK_D,
    )  # fmt: skip
    store_tile(
        dv, dv_strides, place, kv_head, start_kv, seq_kv, dv_acc,
        head_dim, PADDED, BLOCK_KV, BLOCK_D,
    )  # fmt: skip


@triton.jit
def fold_keys_dq(
    dq,
    q_tile,
    do_tile,
    lse2_rows,
    delta_rows,
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
    head_dim,
    PADDED: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """Add what keys ``first ... end`` give to dq of a tile of queries."""
    for start_kv in tl.range(first, end, BLOCK_KV):
        k_tile = load_tile(
            k, k_strides, batch, kv_head, start_kv, seq_kv,
            head_dim, PADDED, BLOCK_KV, BLOCK_D, not MASKED, DESCRIPTORS, PRECISION,
        )  # fmt: skip
        s = dot_transposed(q_tile, k_tile, PRECISION)  # [BLOCK_Q, BLOCK_KV]
        p = tl.exp2(s * scale_log2 - lse2_rows[:, None])
        if MASKED:  # keys that do not exist, too: their P could be inf, and inf * 0 is NaN
            seen = seen_keys(start_q, start_kv, seq_kv, diagonal, BLOCK_Q, BLOCK_KV, CAUSAL)
            p = tl.where(seen, p, 0.0)
        v_tile = load_tile(
            v, v_strides, batch, kv_head, start_kv, seq_kv,
            head_dim, PADDED, BLOCK_KV, BLOCK_D, not MASKED, DESCRIPTORS, PRECISION,
        )  # fmt: skip
        dp = dot_transposed(do_tile, v_tile, PRECISION)
        ds = p * (dp - delta_rows[:, None])
        dq = dot(ds, k_tile, dq, PRECISION)
    return dq


@triton.jit(do_not_specialize=SIZES)
def flashattn_bwd_dq(
    q,
    k,
    v,
    grad_o,
    lse2,
    delta,
    dq,
    o,
    q_strides,
    k_strides,
    v_strides,
    grad_o_strides,
    dq_strides,
    o_strides,
    heads,
    group,
    seq_q,
    seq_kv,
    pitch,
    diagonal,
    batches,
    chunk,
    scale,
    scale_log2,
    head_dim,
    PADDED: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    SPLIT: tl.constexpr,
    program=None,
    programs=None,
):
    """Compute dq; a program owns a tile of queries of one head.

    With SPLIT only what a part of its keys gives, ``chunk`` of them; dq has a batch for each part.
    ``program``, ``programs`` and o are as in ``flashattn_bwd_dkdv``.
    """
    CUT: tl.constexpr = cut_parts(PRECISION) > 0
    CROWDED: tl.constexpr = program is not None and BLOCK_D >= WIDE
    CUTS_WIDE: tl.constexpr = PRECISION == "bf16x6" and BLOCK_D >= WIDE_FP32
    ONE_LOOP: tl.constexpr = CUT or CUTS_WIDE or o is not None or (CAUSAL and CROWDED)
    if program is None:
        program, programs = tl.program_id(0), tl.num_programs(0)
    block, place, head = banded_tile(
        program, programs, tl.cdiv(seq_q, BLOCK_Q), heads, CAUSAL, CAUSAL and CUT
    )
    if SPLIT:
        batch, first = place % batches, place // batches * chunk
    else:
        batch, first = place, 0
    start_q, row = block * BLOCK_Q, batch * heads + head
    q_tile = load_tile(
        q, q_strides, batch, head, start_q, seq_q,
        head_dim, PADDED, BLOCK_Q, BLOCK_D, False, DESCRIPTORS, PRECISION,
    )  # fmt: skip
    do_tile = load_tile(
        grad_o, grad_o_strides, batch, head, start_q, seq_q,
        head_dim, PADDED, BLOCK_Q, BLOCK_D, False, DESCRIPTORS, PRECISION,
    )  # fmt: skip
    lse2_rows = load_lse2(lse2, o, row, pitch, start_q, seq_q, BLOCK_Q)
    delta_rows = load_delta(
        delta, o, o_strides, do_tile, lse2_rows, batch, head, row, pitch, start_q, seq_q,
        head_dim, PADDED, BLOCK_Q, BLOCK_D,
    )  # fmt: skip
    acc = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    full, end = visited_keys(start_q, seq_q, seq_kv, diagonal, BLOCK_Q, BLOCK_KV, CAUSAL)
    if SPLIT:  # a chunk is whole tiles
        full = tl.maximum(tl.minimum(full, first + chunk), first)
        end = tl.minimum(end, first + chunk)
    if ONE_LOOP:
        full = first
    else:
        acc = fold_keys_dq(
            acc, q_tile, do_tile, lse2_rows, delta_rows, k, v, k_strides, v_strides, batch, head //
            group, start_q, first, full, seq_kv, diagonal, scale_log2,
            head_dim, PADDED, BLOCK_D, BLOCK_Q, BLOCK_KV, CAUSAL, False, PRECISION, DESCRIPTORS,
        )  # fmt: skip
    acc = fold_keys_dq(
        acc, q_tile, do_tile, lse2_rows, delta_rows, k, v, k_strides, v_strides, batch, head //
        group, start_q, full, end, seq_kv, diagonal, scale_log2,
        head_dim, PADDED, BLOCK_D, BLOCK_Q, BLOCK_KV, CAUSAL, True, PRECISION, DESCRIPTORS,
    )  # fmt: skip
    store_tile(
        dq, dq_strides, place, head, start_q, seq_q, acc * scale, head_dim, PADDED, BLOCK_Q, BLOCK_D
    )


@triton.jit(do_not_specialize=SIZES)
def flashattn_bwd(
    q,
    k,
    v,
    grad_o,
    lse2,
    delta,
    dk,
    dv,
    dq,
    o,
    q_strides,
    k_strides,
    v_strides,
    grad_o_strides,
    dk_strides,
    dv_strides,
    dq_strides,
    o_strides,
    heads,
    group,
    seq_q,
    seq_kv,
    pitch,
    diagonal,
    batches,
    chunk,
    chunk_kv,
    owners,
    scale,
    scale_log2,
    head_dim,
    PADDED: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLIT_KV: tl.constexpr,
):
    """Compute dk, dv and dq: the first ``owners`` programs own keys, the others queries.

    With SPLIT of part of the queries each, ``chunk`` of them, with SPLIT_KV of ``chunk_kv`` keys.
    With o no launch has been before it: lse2 is lse, and delta its gradient, or None.
    """
    program = tl.program_id(0)
    if program < owners:
        flashattn_bwd_dkdv(
            q, k, v, grad_o, lse2, delta, dk, dv, o, q_strides, k_strides, v_strides,
            grad_o_strides, dk_strides, dv_strides, o_strides, heads, group, seq_q, seq_kv, pitch,
            diagonal, batches, chunk, scale, scale_log2, head_dim, PADDED, BLOCK_D, BLOCK_Q,
            BLOCK_KV, CAUSAL, PRECISION, DESCRIPTORS, SPLIT, program, owners,
        )  # fmt: skip
    else:
        flashattn_bwd_dq(
            q, k, v, grad_o, lse2, delta, dq, o, q_strides, k_strides, v_strides, grad_o_strides,
            dq_strides, o_strides, heads, group, seq_q, seq_kv, pitch, diagonal, batches, chunk_kv,
            scale, scale_log2, head_dim, PADDED, BLOCK_D, BLOCK_Q, BLOCK_KV, CAUSAL, PRECISION,
            DESCRIPTORS, SPLIT_KV, program - owners, tl.num_programs(0) - owners,
        )  # fmt: skip
