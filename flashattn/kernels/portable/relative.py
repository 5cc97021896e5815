"""A relative bias as rows that a thread loads 16 bytes at a time, or as Hopper's kernels read it.

Row t of the scores begins at element T - 1 - t of the vector. There are ``tile.VECTOR`` copies of
it, each of which begins one element later, so one of them has that element at an aligned address.
The copies take O(T + S) memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashattn.kernels.constants import SIZES
from flashattn.kernels.launch import KernelLaunch
from flashattn.plan.spec import TensorSpec
from flashattn.plan.splits import cdiv

BLOCK, WARPS = 512, 4  # elements of a copy that a program fills


@triton.jit(do_not_specialize=[*SIZES, "size", "length"])
def flashattn_shift(
    bias,
    shifted,
    strides,
    heads,
    size,
    length,
    factor,
    COPIES: tl.constexpr,
    FRONT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Fill shifted [B or 1, H or 1, COPIES, length] with the vector from element 0, 1, ... on.

    Args:
        bias: [B or 1, H or 1, size].
        shifted: dense; 0 before and after the vector.
        strides: of the bias.
        heads: H or 1.
        size: T + S - 1.
        length: of a copy.
        factor: what elements are multiplied by; None leaves them as they are.
        COPIES: number of copies.
        FRONT: elements before the vector.
        BLOCK: elements of a program.
    """
    blocks = tl.cdiv(length, BLOCK)
    row, start = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BLOCK
    origin = tl.cast(row // heads, tl.int64) * strides[0]
    origin += tl.cast(row % heads, tl.int64) * strides[1]
    copies, at = tl.arange(0, COPIES)[:, None], start + tl.arange(0, BLOCK)[None, :]
    found = copies + at - FRONT
    there = found < size
    if FRONT > 0:
        there &= found >= 0
    x = tl.load(bias + origin + found.to(tl.int64) * strides[2], mask=there, other=0.0)
    if factor is not None:
        x = x.to(tl.float32) * factor
    to = shifted + (tl.cast(row, tl.int64) * COPIES + copies) * length + at
    tl.store(to, x, mask=at < length)


def shift(
    bias: TensorSpec, shifted: TensorSpec, front: int = 0, factor: float | None = None
) -> KernelLaunch:
    """Return the launch of flashattn_shift."""
    batch, heads, count, length = shifted.shape
    return KernelLaunch(
        flashattn_shift,
        batch * heads * cdiv(length, BLOCK),
        (bias.strides, heads, bias.shape[-1], length, factor),
        {"COPIES": count, "FRONT": front, "BLOCK": BLOCK, "num_warps": WARPS},
    )


@triton.jit
def load_shifted(shifted, length, queries, keys, seq_q, COPIES: tl.constexpr):
    """Load a tile of one head's bias; keys that do not exist are loaded, too."""
    begin = seq_q - 1 - queries
    row = begin % COPIES * (length // COPIES * COPIES) + begin // COPIES * COPIES
    return tl.load(shifted + row + keys, mask=queries < seq_q, other=0.0)
