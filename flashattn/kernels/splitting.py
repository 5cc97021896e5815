"""Splitting: where programs are few, what one would walk over is divided into parts of several.

flashattn_merge puts parts of o together by their largest scores, flashattn_bwd_sum adds up those of
a gradient; always in the same order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from flashattn.kernels import launch
from flashattn.kernels.launch import Launch
from flashattn.kernels.primitives import INTERPRETED, SIZES, normalized, tile_mask
from flashattn.kernels.tiles import Kernel, block_d

# Programs that a multiprocessor shall have, when few tiles of queries are to fill a GPU. On an H200
# one head of 16 384 causal queries took 114 us with 4 and 187 with 2; decoding, which waits for
# memory, 142 us with 2 and 161 with 4.
PROGRAMS = {"fwd": 4, "decode": 2, "bwd_dkdv": 4, "bwd_dq": 4}
# Tiles that a part has at least: below, merging costs more than the split gains. Fewer in
# the interpreter, so that small problems are split; and it pretends to one multiprocessor.
SHORTEST = {"fwd": 4, "decode": 4, "bwd_dkdv": 2, "bwd_dq": 2}
SHORTEST |= dict.fromkeys(SHORTEST, 2) if INTERPRETED.value else {}
MERGE_BLOCK, MERGE_WARPS = 4, 1  # rows of o that a program of flashattn_merge puts together
SUM_BLOCK, SUM_WARPS = 16, 4  # likewise of flashattn_bwd_sum


def split(
    kernel: Kernel,
    programs: int,
    rows: int,
    block: int,
    device: torch.device,
    most: int | None = None,
) -> tuple[int, int]:
    """Return (parts, rows of a part), so that few programs, which walk over rows, fill the GPU.

    It depends on sizes and on the GPU alone, so a repeated call gives the same bits.

    Args:
        kernel: which.
        programs: without a split.
        rows: that a program walks over, keys or queries; at least 1.
        block: rows of a tile, of which a part has whole ones.
        device: of the launch.
        most: parts, instead of what fills the GPU.
    """
    tiles = -(-rows // block)
    if most is None:
        most = min(
            PROGRAMS[kernel] * launch.multiprocessors(device) // programs, tiles // SHORTEST[kernel]
        )
    chunk = -(-tiles // max(most, 1)) * block
    return -(-rows // chunk), chunk


@triton.jit
def store_dense(x, strides, row, heads, size, cols, tile, mask):
    """Store rows, counted through all heads of all batches, where x has them; ``size`` a head."""
    stride_b, stride_h, stride_t = strides
    batch, head = (row // size // heads).to(tl.int64), (row // size % heads).to(tl.int64)
    origin = batch * stride_b + head * stride_h + (row % size).to(tl.int64) * stride_t
    tl.store(x + origin[:, None] + cols, tile.to(x.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=SIZES)
def flashattn_merge(
    o_parts,
    lse_parts,
    o,
    lse,
    o_strides,
    parts,
    rows,
    heads,
    seq_q,
    head_dim,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Put together parts that are dense: o [parts, rows, head_dim] and lse [2, parts, rows]."""
    start = tl.program_id(0) * BLOCK
    row = start + tl.arange(0, BLOCK)
    cols = tl.arange(0, BLOCK_D)[None, :]
    mask = tile_mask(start, rows, head_dim, PADDED, BLOCK, BLOCK_D, False)
    m = tl.full([BLOCK], float("-inf"), tl.float32)
    for part in range(parts):
        m_part = tl.load(lse_parts + part * rows + row, mask=row < rows, other=float("-inf"))
        m = tl.maximum(m, m_part)
    finite = tl.where(m == float("-inf"), 0.0, m)  # a row that sees no key
    acc = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    l = tl.zeros([BLOCK], tl.float32)
    for part in range(parts):
        at = part * rows + row
        m_part = tl.load(lse_parts + at, mask=row < rows, other=float("-inf"))
        weight = tl.exp2(m_part - finite)
        l += weight * tl.load(lse_parts + parts * rows + at, mask=row < rows, other=0.0)
        origin = at.to(tl.int64)[:, None] * head_dim
        acc += weight[:, None] * tl.load(o_parts + origin + cols, mask=mask, other=0.0)
    acc, lse_rows = normalized(acc, m, l)
    store_dense(o, o_strides, row, heads, seq_q, cols, acc, mask)
    tl.store(lse + row, lse_rows, mask=row < rows)


@triton.jit(do_not_specialize=SIZES)
def flashattn_bwd_sum(
    terms,
    total,
    total_strides,
    parts,
    rows,
    heads,
    seq_q,
    head_dim,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Add up parts of a gradient, terms [parts, rows, head_dim], which are dense, in their order.

    Args:
        terms: fp32.
        total: [batches, heads, seq_q, head_dim].
        total_strides: of its batches, heads and rows.
        parts: how many.
        rows: batches * heads * seq_q.
        heads: of total.
        seq_q: its rows, be they queries or keys.
        head_dim: D.
        PADDED: whether it is less than BLOCK_D.
        BLOCK: rows of a program.
        BLOCK_D: columns of a program.
    """
    start = tl.program_id(0) * BLOCK
    row = start + tl.arange(0, BLOCK)
    cols = tl.arange(0, BLOCK_D)[None, :]
    mask = tile_mask(start, rows, head_dim, PADDED, BLOCK, BLOCK_D, False)
    acc = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    for part in range(parts):
        origin = (tl.cast(part, tl.int64) * rows + row)[:, None] * head_dim
        acc += tl.load(terms + origin + cols, mask=mask, other=0.0)
    store_dense(total, total_strides, row, heads, seq_q, cols, acc, mask)


def merging(parts: int, shape: torch.Size, strides: tuple[int, ...]) -> Launch:
    """Prepare the launch of flashattn_merge for o of this shape and strides."""
    return _prepare(flashattn_merge, 4, (MERGE_BLOCK, MERGE_WARPS), parts, shape, strides)


def adding(parts: int, shape: torch.Size, strides: tuple[int, ...]) -> Launch:
    """Prepare the launch of flashattn_bwd_sum for a gradient likewise."""
    return _prepare(flashattn_bwd_sum, 2, (SUM_BLOCK, SUM_WARPS), parts, shape, strides)


def _prepare(
    kernel: Any,
    tensors: int,
    fixed: tuple[int, int],
    parts: int,
    shape: torch.Size,
    strides: tuple[int, ...],
) -> Launch:
    """Prepare a launch of programs of so many rows and warps each."""
    batch, heads, rows, head_dim = shape
    block, warps = fixed
    d = block_d(head_dim)
    return Launch(
        kernel,
        triton.cdiv(batch * heads * rows, block),
        [None] * tensors,
        (strides[:3], parts, batch * heads * rows, heads, rows),
        {
            "head_dim": head_dim,
            "PADDED": head_dim < d,
            "BLOCK": block,
            "BLOCK_D": d,
            "num_warps": warps,
        },
    )
