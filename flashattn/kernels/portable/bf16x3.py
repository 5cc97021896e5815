"""flashattn_cut: fp32 as three numbers of bf16, or two, for kernels that add up their products.

A kernel can cut what it has loaded, each tile as often as it comes by. Cut beforehand a tile is in
shared memory as the tensor cores take it, which leaves registers and a third more speed: see
``docs/kernels.md``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashattn.kernels.constants import SIZES
from flashattn.kernels.portable.memory import load_one, store_tile
from flashattn.kernels.portable.mma import cut
from flashattn.kernels.portable.scheduler import program_tile

BLOCK, WARPS = 32, 4


@triton.jit
def cut_rows(
    program,
    x,
    cut_x,
    strides,
    heads,
    rows,
    head_dim,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Cut BLOCK rows of x [B, H, rows, D] into cut_x [B, PARTS H, rows, BLOCK_D], dense."""
    block, batch, head = program_tile(program, tl.cdiv(rows, BLOCK), heads, False)
    start = block * BLOCK
    tile = load_one(
        x, strides, batch, head, start, rows, head_dim, PADDED, BLOCK, BLOCK_D, False, False
    )
    pitch = tl.cast(rows, tl.int64) * BLOCK_D
    parts = cut(tile, PARTS)
    for i in tl.static_range(PARTS):
        store_tile(
            cut_x, (pitch * heads * PARTS, pitch, BLOCK_D), batch, head * PARTS + i, start, rows,
            parts[i], head_dim, 0, BLOCK, BLOCK_D,
        )  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def flashattn_cut(
    q,
    k,
    v,
    grad_o,
    cut_q,
    cut_k,
    cut_v,
    cut_grad_o,
    q_strides,
    k_strides,
    v_strides,
    grad_o_strides,
    batches,
    heads,
    kv_heads,
    seq_q,
    seq_kv,
    head_dim,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Cut k, v, q, and grad_o unless it is None: some programs each, in this order."""
    program = tl.program_id(0)
    of_keys = tl.cdiv(seq_kv, BLOCK) * batches * kv_heads
    of_queries = tl.cdiv(seq_q, BLOCK) * batches * heads
    if program < of_keys:
        cut_rows(
            program, k, cut_k, k_strides, kv_heads, seq_kv, head_dim, PADDED, BLOCK, BLOCK_D, PARTS
        )
    elif program < 2 * of_keys:
        cut_rows(
            program - of_keys, v, cut_v, v_strides, kv_heads, seq_kv, head_dim,
            PADDED, BLOCK, BLOCK_D, PARTS,
        )  # fmt: skip
    elif program < 2 * of_keys + of_queries:
        cut_rows(
            program - 2 * of_keys, q, cut_q, q_strides, heads, seq_q, head_dim,
            PADDED, BLOCK, BLOCK_D, PARTS,
        )  # fmt: skip
    elif grad_o is not None:
        cut_rows(
            program - 2 * of_keys - of_queries, grad_o, cut_grad_o, grad_o_strides, heads, seq_q,
            head_dim, PADDED, BLOCK, BLOCK_D, PARTS,
        )  # fmt: skip
