"""Products of tiles on the tensor cores; fp32 is multiplied as a sum of bf16 products."""

from __future__ import annotations

import triton
import triton.language as tl

from flashattn.kernels.constants import HIGH_BITS, INTERPRETED

# BLOCK_D from which a kernel that decomposes what it loads has one loop, which masks all tiles:
# with two it spills more, takes 0 to 4% more time on an H200, and compiles for half as long again.
ONE_LOOP_FP32 = tl.constexpr(256)


@triton.jit
def leading_bits(x, add):
    """Return the first 8 bits of fp32, as fp32, truncated if add is 0, rounded if HALF_BIT."""
    return ((x.to(tl.int32, bitcast=True) + add) & HIGH_BITS).to(tl.float32, bitcast=True)


@triton.jit
def decompose(x, TERMS: tl.constexpr, add=0):
    """Return bf16 terms (hi, mid, lo) whose sum is x, of fp32, or (hi, lo); hi may be not finite.

    Three hold all 24 bits. They are as far apart as 2^-133 at least, so x is exact from 2^-110 on,
    and off by up to 2^-134 where it is smaller. Two hold 16 bits and a rounded one.

    Of truncated factors (add is 0) all that ``mma_terms`` leaves out has the sign of the product,
    up to 3.4 units in its last place. So inputs and P are rounded (HALF_BIT): what is left out has
    no sign, is a quarter as large, and is nothing where P is just below 1.
    """
    hi = leading_bits(x, add)
    rest = x - hi
    rest = tl.where(rest == rest, rest, 0.0)  # inf - inf
    if TERMS == 2:
        terms = hi.to(tl.bfloat16), rest.to(tl.bfloat16)
    else:
        mid = leading_bits(rest, 0)
        lo = rest - mid
        terms = hi.to(tl.bfloat16), mid.to(tl.bfloat16), lo.to(tl.bfloat16)  # type: ignore[assignment]
    return terms


@triton.jit
def mma(a, b, acc, PRECISION: tl.constexpr):
    """Return acc + a @ b, in fp32; PRECISION says how fp32 operands are multiplied."""
    # Triton's interpreter multiplies the bit patterns of bf16, so there operands are widened first.
    if INTERPRETED:
        result = tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    else:
        result = tl.dot(a, b, acc, input_precision=PRECISION)
    return result


@triton.jit
def mma_terms(a, b, TERMS: tl.constexpr):
    """Return a @ b of decomposed tiles, the least first: six products, or three of two terms.

    They leave out what is below the last bit of fp32, or of two terms.
    """
    if TERMS == 2:
        s = mma(a[0], b[1], None, "ieee")
    else:
        s = mma(a[1], b[1], None, "ieee")
        s = mma(a[0], b[2], s, "ieee")
        s = mma(a[2], b[0], s, "ieee")
        s = mma(a[0], b[1], s, "ieee")
    s = mma(a[1], b[0], s, "ieee")
    s = tl.where(s == s, s, 0.0)  # inf * 0, of numbers whose product is inf
    return mma(a[0], b[0], s, "ieee")


@triton.jit
def dot_transposed(a, b, CONFIG: tl.constexpr):
    """Return a @ b.T, in fp32, of two tiles; see ``dot``."""
    if CONFIG.TERMS == 3:
        result = mma_terms(a, (b[0].T, b[1].T, b[2].T), CONFIG.TERMS)
    elif CONFIG.TERMS == 2:
        result = mma_terms(a, (b[0].T, b[1].T), CONFIG.TERMS)
    elif a.shape[1] == 1:
        result = a.to(tl.float32) * b.to(tl.float32).T
    else:
        result = mma(a, b.T, None, CONFIG.PRECISION)
    return result


@triton.jit
def dot(a, b, acc, CONFIG: tl.constexpr, add=0):
    """Return acc + a @ b, in fp32, of fp32 numbers and a tile, to whose dtype they are rounded.

    A decomposed tile is a tuple of bf16 terms, into which a is decomposed as well, by ``add``. A
    single column is no matrix, so tensor cores are not asked.
    """
    if CONFIG.TERMS > 0:
        result = acc + mma_terms(decompose(a, CONFIG.TERMS, add), b, CONFIG.TERMS)
    elif b.shape[1] == 1:
        result = acc + tl.sum(a * b.to(tl.float32).T, 1)[:, None]
    else:
        result = mma(a.to(b.dtype), b, acc, CONFIG.PRECISION)
    return result
