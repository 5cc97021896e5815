"""Combine the results of splits in a fixed order: o by a weighted mean, gradients by a sum."""

from __future__ import annotations

import triton
import triton.language as tl

from flashattn.kernels.constants import SIZES
from flashattn.kernels.portable.memory import multiple, store_rows, store_tile, tile_mask
from flashattn.kernels.portable.softmax import finite_max, normalized

COMBINE_ROWS, COMBINE_WARPS = 4, 1  # rows of a program of flashattn_combine
UNROLL = tl.constexpr(4)  # splits that are loaded at the same time
REDUCE_BLOCK, REDUCE_WARPS = 16, 4  # rows of a program of flashattn_bwd_reduce


@triton.jit
def store_dense(x, strides, row, heads, size, cols, tile, mask, PADDED: tl.constexpr):
    """Store rows in x; rows are numbered across batches and heads, ``size`` in each head."""
    stride_b, stride_h, stride_t = strides
    batch, head = (row // size // heads).to(tl.int64), (row // size % heads).to(tl.int64)
    origin = batch * multiple(stride_b, PADDED) + head * multiple(stride_h, PADDED)
    origin += (row % size).to(tl.int64) * multiple(stride_t, PADDED)
    tl.store(x + origin[:, None] + cols, tile.to(x.dtype.element_ty), mask=mask)


@triton.jit
def split_pointers(partial, grid, split, at, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return pointers to acc [ROWS, BLOCK_D], m and l of a split.

    Args:
        partial: acc [tiles, splits, block, BLOCK_D], and m and l [2, tiles, splits, block].
        grid: (splits, tiles, block).
        split: index of the split.
        at: (tile, first row).
        ROWS: number of rows.
        BLOCK_D: number of columns.
    """
    splits, tiles, block = grid
    tile, first = at
    rows, columns = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    start = (tl.cast(tile, tl.int64) * splits + split) * block + first
    m = partial[1] + start + rows
    acc = partial[0] + start * BLOCK_D + rows[:, None] * BLOCK_D + columns[None, :]
    return acc, m, m + tl.cast(tiles, tl.int64) * splits * block


@triton.jit
def store_split(partial, grid, split, tile, rows, state):
    """Store acc, m and l of ``rows`` rows; one logsumexp for m and l would round weights."""
    acc, m, l = state
    acc_at, m_at, l_at = split_pointers(partial, grid, split, (tile, 0), acc.shape[0], acc.shape[1])
    there = tl.arange(0, acc.shape[0]) < rows
    tl.store(m_at, m, mask=there)
    tl.store(l_at, l, mask=there)
    tl.store(acc_at, acc, mask=there[:, None])


@triton.jit
def is_last(counter, splits):
    """Return whether all splits of a tile are stored; if so, set the counter to zero again."""
    tl.debug_barrier()  # all threads have stored their part
    last = tl.atomic_add(counter, 1, sem="acq_rel") == splits - 1
    tl.store(counter, 0, mask=last)
    return last


@triton.jit
def combined(partial, grid, at, rows, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return acc, m and l of ROWS rows, of which ``rows`` exist, over all splits in order."""
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    there = tl.arange(0, ROWS) < rows
    for split in tl.range(0, grid[0], loop_unroll_factor=UNROLL):
        acc_at, m_at, l_at = split_pointers(partial, grid, split, at, ROWS, BLOCK_D)
        m_split = tl.load(m_at, mask=there, other=float("-inf"))
        l_split = tl.load(l_at, mask=there, other=0.0)
        acc_split = tl.load(acc_at, mask=there[:, None], other=0.0)
        m_new = tl.maximum(m, m_split)
        finite = finite_max(m_new)
        alpha, weight = tl.exp2(m - finite), tl.exp2(m_split - finite)
        l = l * alpha + l_split * weight
        acc = acc * alpha[:, None] + acc_split * weight[:, None]
        m = m_new
    return acc, m, l


@triton.jit
def store_output(o, lse, strides, at, heads, seq_q, head_dim, state, PADDED: tl.constexpr):
    """Store a tile of o and lse, computed from acc, m and l."""
    batch, head, start_q = at
    acc, m, l = state
    acc, m = normalized(acc, m, l)
    store_rows(lse, batch * heads + head, seq_q, start_q, seq_q, m)
    store_tile(o, strides, at, seq_q, acc, head_dim, PADDED)


@triton.jit(do_not_specialize=SIZES)
def flashattn_combine(
    partial,
    o,
    lse,
    o_strides,
    num_splits,
    tiles,
    heads,
    seq_q,
    head_dim,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    """Combine BLOCK rows of a tile of BLOCK_Q queries."""
    part, tile = tl.program_id(0) % (BLOCK_Q // BLOCK), tl.program_id(0) // (BLOCK_Q // BLOCK)
    blocks, first = tl.cdiv(seq_q, BLOCK_Q), part * BLOCK
    row, start_q = tile // blocks, tile % blocks * BLOCK_Q + first
    grid = num_splits, tiles, BLOCK_Q
    state = combined(partial, grid, (tile, first), seq_q - start_q, BLOCK, BLOCK_D)
    at = row // heads, row % heads, start_q
    store_output(o, lse, o_strides, at, heads, seq_q, head_dim, state, PADDED)


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
    """Sum BLOCK rows of a gradient over its splits, partial [num_splits, *shape], in order."""
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
    """Sum the splits of dk and dv, of dq, or of all three; gradients without splits are None.

    Args:
        partials: of dk, dv and dq, in fp32; all batches for each split of the queries or keys.
        grads: dk and dv [batches, kv_heads, seq_kv, D], dq [batches, heads, seq_q, D].
        strides: of the gradients: of batches, heads and rows.
        num_splits: of the queries.
        num_splits_kv: of the keys.
        batches: of all gradients.
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
