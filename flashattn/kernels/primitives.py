"""Jitted sentences that the kernels are written in: load a tile, multiply, find keys to visit."""

from __future__ import annotations

import triton
import triton.language as tl

# Sizes that change from call to call: one compiled kernel serves them all.
SIZES = ["heads", "kv_heads", "group", "seq_q", "seq_kv", "diagonal", "batches", "rows"]
SIZES += ["chunk", "chunk_kv", "parts", "parts_kv", "owners"]
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# Triton's interpreter multiplies the bit patterns of bf16, so there the operands are widened first.
HIGH_BITS = tl.constexpr(-65536)  # of an fp32: those of a bf16
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
BAND = tl.constexpr(32)  # heads
# Columns of fp32 from which a kernel that cuts what it loads has one loop, which masks all tiles:
# with two it spills more as a rule, takes 0 to 4% more time on an H200, and compiles for half as
# long again.
WIDE_FP32 = tl.constexpr(256)


@triton.constexpr_function
def cut_parts(precision):
    """Return of how many parts of bf16 operands are, "cut3" or "cut2"; 0: they come whole."""
    return int(precision[-1]) if precision.startswith("cut") else 0


@triton.jit
def high_part(x):
    """Return the first 8 bits of fp32, as fp32."""
    return (x.to(tl.int32, bitcast=True) & HIGH_BITS).to(tl.float32, bitcast=True)


@triton.jit
def cut(x, PARTS: tl.constexpr):
    """Return three bf16 whose sum is x, of fp32, or two; what is not finite is the first.

    Three hold all 24 bits. They are as far apart as 2^-133 at least, so x is exact from 2^-110 on,
    and off by up to 2^-134 where it is smaller. Two hold 16 bits and a rounded one.
    """
    high = high_part(x)
    rest = x - high
    rest = tl.where(rest == rest, rest, 0.0)  # inf - inf
    if PARTS == 2:  # noqa: PLR2004 - of a constexpr
        parts = high.to(tl.bfloat16), rest.to(tl.bfloat16)
    else:
        middle = high_part(rest)
        low = rest - middle
        parts = high.to(tl.bfloat16), middle.to(tl.bfloat16), low.to(tl.bfloat16)  # type: ignore[assignment]
    return parts


@triton.jit
def multiply(a, b, acc, PRECISION: tl.constexpr):
    """Return acc + a @ b, in fp32; PRECISION says how fp32 operands are multiplied."""
    if INTERPRETED:
        result = tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    else:
        result = tl.dot(a, b, acc, input_precision=PRECISION)
    return result


@triton.jit
def cut_products(a, b, PARTS: tl.constexpr):
    """Return a @ b of what is cut, the least first: six products, or three.

    They leave out what is below the last bit of fp32, or of two parts.
    """
    if PARTS == 2:  # noqa: PLR2004
        s = multiply(a[0], b[1], None, "ieee")
    else:
        s = multiply(a[1], b[1], None, "ieee")
        s = multiply(a[0], b[2], s, "ieee")
        s = multiply(a[2], b[0], s, "ieee")
        s = multiply(a[0], b[1], s, "ieee")
    s = multiply(a[1], b[0], s, "ieee")
    s = tl.where(s == s, s, 0.0)  # inf * 0, of numbers whose product is inf
    return multiply(a[0], b[0], s, "ieee")


@triton.jit
def dot_transposed(a, b, PRECISION: tl.constexpr):
    """Return a @ b.T, in fp32, of two tiles; see ``dot``."""
    PARTS: tl.constexpr = cut_parts(PRECISION)
    if PARTS == 3:  # noqa: PLR2004
        result = cut_products(a, (b[0].T, b[1].T, b[2].T), PARTS)
    elif PARTS == 2:  # noqa: PLR2004
        result = cut_products(a, (b[0].T, b[1].T), PARTS)
    elif a.shape[1] == 1:
        result = a.to(tl.float32) * b.to(tl.float32).T
    else:
        result = multiply(a, b.T, None, PRECISION)
    return result


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """Return acc + a @ b, in fp32, of fp32 numbers and a tile, to whose dtype they are rounded.

    PRECISION says how fp32 is multiplied; "cut3": tiles are three of bf16, whose sum they are;
    "cut2": two. A single column is no matrix, so tensor cores are not asked.
    """
    PARTS: tl.constexpr = cut_parts(PRECISION)
    if PARTS > 0:
        result = acc + cut_products(cut(a, PARTS), b, PARTS)
    elif b.shape[1] == 1:
        result = acc + tl.sum(a * b.to(tl.float32).T, 1)[:, None]
    else:
        result = multiply(a.to(b.dtype), b, acc, PRECISION)
    return result


@triton.jit
def add_compensated(total, lost, x):
    """Return total + x, and what rounding added, which the next sum takes off (Kahan, 1965)."""
    x -= lost
    longer = total + x
    return longer, (longer - total) - x


@triton.jit
def normalized(acc, m, l):
    """Return o and the logsumexp; rows that see no key have l = 0."""
    dead = l == 0.0
    l = tl.where(dead, 1.0, l)
    o = tl.div_rn(acc, tl.broadcast_to(l[:, None], acc.shape))
    return o, tl.where(dead, float("-inf"), (m + tl.log2(l)) * LN2)


@triton.jit
def program_tile(program, blocks, heads, LAST_FIRST: tl.constexpr):
    """Return (block, batch, head) of a program: neighbours share a head, its keys in L2."""
    block, row = program % blocks, program // blocks
    if LAST_FIRST:
        block = (
            blocks - 1 - block
        )  # under a causal mask the longest first, so that none is left over
    return block, row // heads, row % heads


@triton.jit
def banded_tile(program, programs, blocks, heads, LAST_FIRST: tl.constexpr, BANDED: tl.constexpr):
    """Return likewise (block, batch, head) of one of ``programs``; BANDED: the longest first.

    Those of BAND heads, then of the next: so none is left over where heads are few and a
    multiprocessor has room for one program or two; and several programs at a time share each
    head's keys still.
    """
    if BANDED:
        first = program // (BAND * blocks) * BAND
        width = tl.minimum(BAND, programs // blocks - first)
        within = program - first * blocks
        block, row = within // width, first + within % width
        if LAST_FIRST:
            block = blocks - 1 - block
        batch, head = row // heads, row % heads
    else:
        block, batch, head = program_tile(program, blocks, heads, LAST_FIRST)
    return block, batch, head


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


@triton.jit
def visited_keys(
    start_q,
    seq_q,
    seq_kv,
    diagonal,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Return (full, end): a tile of queries sees all keys 0 ... full, and some of full ... end."""
    full = seq_kv // BLOCK_KV * BLOCK_KV
    end = seq_kv
    if CAUSAL:
        full = tl.minimum(full, tl.maximum(start_q + diagonal + 1, 0) // BLOCK_KV * BLOCK_KV)
        end = tl.minimum(end, tl.maximum(tl.minimum(start_q + BLOCK_Q, seq_q) + diagonal, 0))
    return full, end


@triton.jit
def seen_keys(
    start_q,
    start_kv,
    seq_kv,
    diagonal,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Return which scores of a tile count [BLOCK_Q, BLOCK_KV]: keys that exist and are seen."""
    last = tl.full([BLOCK_Q], seq_kv - 1, tl.int32)
    if CAUSAL:
        last = tl.minimum(last, start_q + tl.arange(0, BLOCK_Q) + diagonal)
    return (start_kv + tl.arange(0, BLOCK_KV))[None, :] <= last[:, None]
