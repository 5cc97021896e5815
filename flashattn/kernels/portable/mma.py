"""Products on the tensor cores, of fp32 by bf16 ones as well."""

from __future__ import annotations

import triton
import triton.language as tl

from flashattn.kernels.constants import HIGH_BITS, INTERPRETED

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
