"""Products of tiles on the tensor cores; fp32 is multiplied as a sum of bf16 products."""

from __future__ import annotations

import triton
import triton.language as tl

from flashattn.kernels.constants import HIGH_BITS, INTERPRETED

# BLOCK_D from which a kernel that decomposes what it loads has one loop, which masks all tiles. Two
# loops spill more, take 0 to 4% more time on an H200, and take half as long again to compile.
ONE_LOOP_FP32 = tl.constexpr(256)


@triton.jit
def leading_bits(x, add):
    """Return the first 8 bits of fp32, as fp32, truncated if add is 0, rounded if HALF_BIT."""
    return ((x.to(tl.int32, bitcast=True) + add) & HIGH_BITS).to(tl.float32, bitcast=True)


@triton.jit
def decompose(x, TERMS: tl.constexpr, add=0):
    """Return bf16 terms (hi, mid, lo) that sum to x, in fp32, or (hi, lo); hi may be inf or NaN.

    Three terms hold all 24 bits. Bf16 numbers are at least 2^-133 apart, so x is exact from 2^-110
    on, and off by up to 2^-134 if it is smaller. Two terms hold 16 bits and a rounded one.

    If factors are truncated (add is 0), all that ``mma_terms`` leaves out has the sign of the
    product, up to 3.4 units in its last place. So inputs and P are rounded (HALF_BIT): what is left
    out then has either sign, is a quarter as large, and is 0 where P is just below 1.
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
    """Return a @ b of decomposed tiles: six products, or three of two terms, smallest first.

    The products left out are below the last bit of fp32, or of two terms.
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
    """Return a @ b.T of two tiles, in fp32; see ``dot``."""
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
    """Return acc + a @ b, in fp32; a is in fp32 and is rounded to the dtype of the tile b.

    If b is decomposed, a tuple of bf16 terms, a is decomposed as well, with ``add``. A single
    column is not a matrix, so it does not use tensor cores.
    """
    if CONFIG.TERMS > 0:
        result = acc + mma_terms(decompose(a, CONFIG.TERMS, add), b, CONFIG.TERMS)
    elif b.shape[1] == 1:
        result = acc + tl.sum(a * b.to(tl.float32).T, 1)[:, None]
    else:
        result = mma(a.to(b.dtype), b, acc, CONFIG.PRECISION)
    return result
