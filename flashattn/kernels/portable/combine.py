"""Results of splits combined: o by a weighted mean, gradients by a sum, in a fixed order."""

from __future__ import annotations

import triton
import triton.language as tl

from flashattn.kernels.constants import SIZES
from flashattn.kernels.portable.memory import multiple, tile_mask
from flashattn.kernels.portable.softmax import finite_max, normalized

COMBINE_BLOCK, COMBINE_WARPS = 4, 1  # rows of a program of flashattn_combine
REDUCE_BLOCK, REDUCE_WARPS = 16, 4  # likewise of flashattn_bwd_reduce


@triton.jit
def store_dense(x, strides, row, heads, size, cols, tile, mask, PADDED: tl.constexpr):
    """Store rows, counted through all heads of all batches, where x has them; ``size`` a head."""
    stride_b, stride_h, stride_t = strides
    batch, head = (row // size // heads).to(tl.int64), (row // size % heads).to(tl.int64)
    origin = batch * multiple(stride_b, PADDED) + head * multiple(stride_h, PADDED)
    origin += (row % size).to(tl.int64) * multiple(stride_t, PADDED)
    tl.store(x + origin[:, None] + cols, tile.to(x.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=SIZES)
def flashattn_combine(
    o_partial,
    lse_partial,
    o,
    lse,
    o_strides,
    num_splits,
    rows,
    heads,
    seq_q,
    head_dim,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Combine o [num_splits, rows, head_dim], not divided by l; lse is m and l of each split."""
    start = tl.program_id(0) * BLOCK
    row = start + tl.arange(0, BLOCK)
    cols = tl.arange(0, BLOCK_D)[None, :]
    mask = tile_mask(start, rows, head_dim, PADDED, BLOCK, BLOCK_D, False)
    m = tl.full([BLOCK], float("-inf"), tl.float32)
    for split in range(num_splits):
        m_split = tl.load(lse_partial + split * rows + row, mask=row < rows, other=float("-inf"))
        m = tl.maximum(m, m_split)
    finite = finite_max(m)
    acc = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    l = tl.zeros([BLOCK], tl.float32)
    for split in range(num_splits):
        at = split * rows + row
        m_split = tl.load(lse_partial + at, mask=row < rows, other=float("-inf"))
        weight = tl.exp2(m_split - finite)
        l += weight * tl.load(lse_partial + num_splits * rows + at, mask=row < rows, other=0.0)
        origin = at.to(tl.int64)[:, None] * multiple(head_dim, PADDED)
        acc += weight[:, None] * tl.load(o_partial + origin + cols, mask=mask, other=0.0)
    acc, lse_rows = normalized(acc, m, l)
    store_dense(o, o_strides, row, heads, seq_q, cols, acc, mask, PADDED)
    tl.store(lse + row, lse_rows, mask=row < rows)


@triton.jit
def add_splits(
    program,
    partial,
    total,
    strides,
    num_splits,
    shape,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Add up BLOCK rows of a gradient, partial [num_splits, *shape], in this order."""
    batches, heads, size, head_dim = shape
    rows = batches * heads * size
    start = program * BLOCK
    row = start + tl.arange(0, BLOCK)
    cols = tl.arange(0, BLOCK_D)[None, :]
    mask = tile_mask(start, rows, head_dim, PADDED, BLOCK, BLOCK_D, False)
    acc = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    for split in range(num_splits):
        origin = (tl.cast(split, tl.int64) * rows + row)[:, None] * multiple(head_dim, PADDED)
        acc += tl.load(partial + origin + cols, mask=mask, other=0.0)
    store_dense(total, strides, row, heads, size, cols, acc, mask, PADDED)


@triton.jit(do_not_specialize=SIZES)
def flashattn_bwd_reduce(
    partials,
    grads,
    strides,
    num_splits,
    num_splits_kv,
    batches,
    heads,
    kv_heads,
    seq_q,
    seq_kv,
    head_dim,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Add up the splits of gradients: of dk and dv, of dq, or of all; None are those without.

    Args:
        partials: of dk, dv and dq, in fp32; batches for each split of the queries, or of the keys.
        grads: dk and dv [batches, kv_heads, seq_kv, D], dq [batches, heads, seq_q, D].
        strides: of these, of batches, heads and rows.
        num_splits: of the queries.
        num_splits_kv: of the keys.
        batches: of all.
        heads: of dq.
        kv_heads: of dk and dv.
        seq_q: rows of dq.
        seq_kv: rows of dk and dv.
        head_dim: D.
        PADDED: see ``memory.tile_mask``.
        BLOCK: rows of a program.
        BLOCK_D: columns of a program.
    """
    dk, dv, dq = grads
    program = tl.program_id(0)
    if dk is not None:
        shape = batches, kv_heads, seq_kv, head_dim
        programs = tl.cdiv(batches * kv_heads * seq_kv, BLOCK)
        if program < programs:
            add_splits(
                program, partials[0], dk, strides[0], num_splits, shape, PADDED, BLOCK, BLOCK_D
            )
        elif program < 2 * programs:
            own = program - programs
            add_splits(own, partials[1], dv, strides[1], num_splits, shape, PADDED, BLOCK, BLOCK_D)
        program -= 2 * programs
    if dq is not None:
        if program >= 0:
            shape = batches, heads, seq_q, head_dim
            add_splits(
                program, partials[2], dq, strides[2], num_splits_kv, shape, PADDED, BLOCK, BLOCK_D
            )
