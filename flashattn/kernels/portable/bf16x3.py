"""flashattn_decompose: split fp32 into three bf16 terms, or two, whose products a kernel sums.

A kernel can decompose what it has loaded, but then it does so each time it loads a tile. If tiles
are decomposed beforehand, they are in shared memory as the tensor cores take them, which saves
registers and is a third faster: see ``docs/kernels.md``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashattn.kernels.constants import HALF_BIT, SIZES
from flashattn.kernels.portable.memory import load_by_pointers, store_tile
from flashattn.kernels.portable.mma import decompose
from flashattn.kernels.portable.scheduler import tile_coord

BLOCK, WARPS = 32, 4
ROUNDS_TO_INFINITY = tl.constexpr((2 - 2**-8) * 2.0**127)  # the least fp32 that does, in bf16


@triton.jit
def decompose_rows(
    program,
    x,
    terms,
    strides,
    shape,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TERMS: tl.constexpr,
):
    """Write BLOCK rows of x, which has ``shape``, to dense terms [B, TERMS H, rows, BLOCK_D]."""
    _, heads, rows, head_dim = shape
    block, batch, head = tile_coord(program, None, tl.cdiv(rows, BLOCK), heads, False, False)
    start = block * BLOCK
    tile = load_by_pointers(
        x, strides, (batch, head, start), rows, head_dim, PADDED, BLOCK, BLOCK_D, False
    )
    size = tl.cast(rows, tl.int64) * BLOCK_D
    add = tl.where(tl.abs(tile) < ROUNDS_TO_INFINITY, HALF_BIT, 0)
    values = decompose(tile, TERMS, add)
    dense = size * heads * TERMS, size, BLOCK_D
    for i in tl.static_range(TERMS):
        at = batch, head * TERMS + i, start
        store_tile(terms, dense, at, rows, values[i], head_dim, 0)


@triton.jit(do_not_specialize=SIZES)
def flashattn_decompose(
    inputs,
    terms,
    strides,
    batches,
    heads,
    kv_heads,
    seq_q,
    seq_kv,
    head_dim,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TERMS: tl.constexpr,
):
    """Decompose k, v, q, and grad_o unless it is None; program ids follow this order.

    Args:
        inputs: q, k, v and grad_o, or None.
        terms: of each input, [B, TERMS H, rows, BLOCK_D].
        strides: of each input.
        batches: of all inputs.
        heads: of q and grad_o.
        kv_heads: of k and v.
        seq_q: rows of q and grad_o.
        seq_kv: rows of k and v.
        head_dim: D.
        PADDED: see ``memory.tile_mask``.
        BLOCK: rows of a program.
        BLOCK_D: columns of a program.
        TERMS: three or two.
    """
    q, k, v, grad_o = inputs
    program = tl.program_id(0)
    keys, queries = (batches, kv_heads, seq_kv, head_dim), (batches, heads, seq_q, head_dim)
    of_keys = tl.cdiv(seq_kv, BLOCK) * batches * kv_heads
    of_queries = tl.cdiv(seq_q, BLOCK) * batches * heads
    if program < of_keys:
        decompose_rows(program, k, terms[1], strides[1], keys, PADDED, BLOCK, BLOCK_D, TERMS)
    elif program < 2 * of_keys:
        decompose_rows(
            program - of_keys, v, terms[2], strides[2], keys, PADDED, BLOCK, BLOCK_D, TERMS
        )
    elif program < 2 * of_keys + of_queries:
        own = program - 2 * of_keys
        decompose_rows(own, q, terms[0], strides[0], queries, PADDED, BLOCK, BLOCK_D, TERMS)
    elif grad_o is not None:
        own = program - 2 * of_keys - of_queries
        decompose_rows(own, grad_o, terms[3], strides[3], queries, PADDED, BLOCK, BLOCK_D, TERMS)
