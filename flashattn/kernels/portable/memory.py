"""Load and store tiles and rows, by pointers or by tensor descriptors."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def multiple(x, PADDED: tl.constexpr):
    """Return x such that Triton knows that PADDED (see ``plan.tile.padding``) divides it."""
    if PADDED > 1:
        x = x // PADDED * PADDED
    return x


@triton.jit
def tile_pointers(x, strides, at, PADDED: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return 64-bit pointers [BLOCK, BLOCK_D] to rows from ``at`` (batch, head, row) on."""
    batch, head, start = at
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
    ALL_ROWS: tl.constexpr,
):
    """Return which elements of a tile exist, or None when all do.

    PADDED (see ``plan.tile.padding``) columns at a time exist together or not at all. ALL_ROWS says
    that all rows exist.
    """
    rows = (start + tl.arange(0, BLOCK) < size)[:, None]
    if PADDED == 0:
        mask = None if ALL_ROWS else rows
    else:
        cols = (tl.arange(0, BLOCK_D) // PADDED < head_dim // PADDED)[None, :]
        mask = cols if ALL_ROWS else rows & cols
    return mask


@triton.jit
def load_by_pointers(
    x,
    strides,
    at,
    size,
    head_dim,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ALL_ROWS: tl.constexpr,
):
    """Load rows [BLOCK, BLOCK_D] from ``at`` (batch, head, row) on, with 0 out of bounds."""
    pointers = tile_pointers(x, strides, at, PADDED, BLOCK, BLOCK_D)
    mask = tile_mask(at[2], size, head_dim, PADDED, BLOCK, BLOCK_D, ALL_ROWS)
    if mask is None:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=mask, other=0.0)
    return tile


@triton.jit
def load_one(
    x,
    strides,
    at,
    size,
    head_dim,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    ALL_ROWS: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """Load a tile that is not decomposed, or one term of one that is; see ``load_tile``."""
    if CONFIG.DESCRIPTORS:
        batch, head, start = at
        tile = x.load([batch, head, start, 0]).reshape(BLOCK, CONFIG.BLOCK_D)
    else:
        tile = load_by_pointers(
            x, strides, at, size, head_dim, PADDED, BLOCK, CONFIG.BLOCK_D, ALL_ROWS
        )
    return tile


@triton.jit
def load_term(
    x,
    strides,
    at,
    size,
    TERM: tl.constexpr,
    BLOCK: tl.constexpr,
    ALL_ROWS: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """Load one bf16 term of a decomposed tile."""
    batch, head, start = at
    at = batch, head * CONFIG.TERMS + TERM, start
    return load_one(x, strides, at, size, 0, 0, BLOCK, ALL_ROWS, CONFIG)


@triton.jit
def load_tile(
    x,
    strides,
    at,
    size,
    head_dim,
    BLOCK: tl.constexpr,
    ALL_ROWS: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """Load rows [BLOCK, BLOCK_D] from ``at`` (batch, head, row) on, with 0 out of bounds.

    A decomposed tensor has a head for each bf16 term, and no columns to pad; its tile is a tuple.
    """
    if CONFIG.TERMS == 2:
        tile = (
            load_term(x, strides, at, size, 0, BLOCK, ALL_ROWS, CONFIG),
            load_term(x, strides, at, size, 1, BLOCK, ALL_ROWS, CONFIG),
        )
    elif CONFIG.TERMS == 3:
        tile = (  # type: ignore[assignment]
            load_term(x, strides, at, size, 0, BLOCK, ALL_ROWS, CONFIG),
            load_term(x, strides, at, size, 1, BLOCK, ALL_ROWS, CONFIG),
            load_term(x, strides, at, size, 2, BLOCK, ALL_ROWS, CONFIG),
        )
    else:
        tile = load_one(x, strides, at, size, head_dim, CONFIG.PADDED, BLOCK, ALL_ROWS, CONFIG)
    return tile


@triton.jit
def store_tile(x, strides, at, size, tile, head_dim, PADDED: tl.constexpr):
    """Store rows from ``at`` on, rounded to x's dtype; nothing is stored out of bounds."""
    BLOCK: tl.constexpr = tile.shape[0]
    BLOCK_D: tl.constexpr = tile.shape[1]
    pointers = tile_pointers(x, strides, at, PADDED, BLOCK, BLOCK_D)
    mask = tile_mask(at[2], size, head_dim, PADDED, BLOCK, BLOCK_D, False)
    tl.store(pointers, tile.to(x.dtype.element_ty), mask=mask)


@triton.jit
def store_rows(x, row, stride, start, size, values):
    """Store a vector at ``start`` of row ``row`` of a dense matrix, up to ``size``."""
    offsets = start + tl.arange(0, values.shape[0])
    tl.store(x + row.to(tl.int64) * stride + offsets, values, mask=offsets < size)


@triton.jit
def load_rows(x, row, stride, start, BLOCK: tl.constexpr):
    """Load a vector [BLOCK] at ``start`` of row ``row`` of a dense matrix, padded to tiles."""
    return tl.load(x + row.to(tl.int64) * stride + start + tl.arange(0, BLOCK))
