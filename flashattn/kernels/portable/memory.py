"""Load and store tiles and rows, by pointers or by tensor descriptors."""

from __future__ import annotations

import triton
import triton.language as tl

from flashattn.kernels.portable.mma import cut_parts


@triton.jit
def multiple(x, PADDED: tl.constexpr):
    """Return x, of which Triton knows now that PADDED, see ``tiles.padding``, divides it."""
    if PADDED > 1:
        x = x // PADDED * PADDED
    return x


@triton.jit
def tile_pointers(
    x,
    strides,
    batch,
    head,
    start,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Return pointers [BLOCK, BLOCK_D] to rows ``start ...`` of one head; offsets are 64-bit."""
    stride_b, stride_h, stride_t = strides
    stride_b, stride_h = multiple(stride_b, PADDED), multiple(stride_h, PADDED)
    stride_t = multiple(stride_t, PADDED)
    origin = tl.cast(batch, tl.int64) * stride_b + tl.cast(head, tl.int64) * stride_h
    rows = start + tl.arange(0, BLOCK)
    return x + origin + rows.to(tl.int64)[:, None] * stride_t + tl.arange(0, BLOCK_D)[None, :]


@triton.jit
def tile_mask(
    start,
    size,
    head_dim,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Return which elements of a tile exist, or None when all do.

    PADDED is ``tiles.padding``: of so many columns at a time all are there or none. WHOLE says that
    all rows exist.
    """
    rows = (start + tl.arange(0, BLOCK) < size)[:, None]
    if PADDED == 0:
        mask = None if WHOLE else rows
    else:
        cols = (tl.arange(0, BLOCK_D) // PADDED < head_dim // PADDED)[None, :]
        mask = cols if WHOLE else rows & cols
    return mask


@triton.jit
def load_one(
    x,
    strides,
    batch,
    head,
    start,
    size,
    head_dim,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WHOLE: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """Load a tile that is not cut, or one part of it, see ``load_tile``."""
    if DESCRIPTORS:
        tile = x.load([batch, head, start, 0]).reshape(BLOCK, BLOCK_D)
    else:
        pointers = tile_pointers(x, strides, batch, head, start, PADDED, BLOCK, BLOCK_D)
        mask = tile_mask(start, size, head_dim, PADDED, BLOCK, BLOCK_D, WHOLE)
        if mask is None:
            tile = tl.load(pointers)
        else:
            tile = tl.load(pointers, mask=mask, other=0.0)
    return tile


@triton.jit
def load_tile(
    x,
    strides,
    batch,
    head,
    start,
    size,
    head_dim,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WHOLE: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Load rows ``start ...`` of one head [BLOCK, BLOCK_D]; what lies outside is 0.

    What is cut has a head for each part, and no columns to pad: see ``dot``.
    """
    PARTS: tl.constexpr = cut_parts(PRECISION)
    if PARTS == 2:  # noqa: PLR2004
        tile = (
            load_one(x, strides, batch, head * 2, start, size, head_dim,
                     0, BLOCK, BLOCK_D, WHOLE, DESCRIPTORS),
            load_one(x, strides, batch, head * 2 + 1, start, size, head_dim,
                     0, BLOCK, BLOCK_D, WHOLE, DESCRIPTORS),
        )  # fmt: skip
    elif PARTS == 3:  # noqa: PLR2004
        tile = (  # type: ignore[assignment]
            load_one(x, strides, batch, head * 3, start, size, head_dim,
                     0, BLOCK, BLOCK_D, WHOLE, DESCRIPTORS),
            load_one(x, strides, batch, head * 3 + 1, start, size, head_dim,
                     0, BLOCK, BLOCK_D, WHOLE, DESCRIPTORS),
            load_one(x, strides, batch, head * 3 + 2, start, size, head_dim,
                     0, BLOCK, BLOCK_D, WHOLE, DESCRIPTORS),
        )  # fmt: skip
    else:
        tile = load_one(x, strides, batch, head, start, size, head_dim,
                        PADDED, BLOCK, BLOCK_D, WHOLE, DESCRIPTORS)  # fmt: skip
    return tile


@triton.jit
def store_tile(
    x,
    strides,
    batch,
    head,
    start,
    size,
    tile,
    head_dim,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Store rows ``start ...`` of one head, rounded to x's dtype; what lies outside stays."""
    pointers = tile_pointers(x, strides, batch, head, start, PADDED, BLOCK, BLOCK_D)
    mask = tile_mask(start, size, head_dim, PADDED, BLOCK, BLOCK_D, False)
    tl.store(pointers, tile.to(x.dtype.element_ty), mask=mask)


@triton.jit
def store_rows(x, row, pitch, start, size, values, BLOCK: tl.constexpr):
    """Store a vector [BLOCK] at ``start`` of row ``row`` of a dense matrix, up to ``size``."""
    offsets = start + tl.arange(0, BLOCK)
    tl.store(x + row.to(tl.int64) * pitch + offsets, values, mask=offsets < size)


@triton.jit
def load_rows(x, row, pitch, start, BLOCK: tl.constexpr):
    """Load a vector [BLOCK] at ``start`` of row ``row`` of a dense matrix, padded to tiles."""
    return tl.load(x + row.to(tl.int64) * pitch + start + tl.arange(0, BLOCK))
