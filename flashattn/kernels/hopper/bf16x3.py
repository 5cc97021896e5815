"""fp32 products from two or three bf16 terms of each operand, see ``portable.bf16x3``.

As in the portable kernels, the smaller products come first, and the largest is added to their sum.
Each call has an accumulator of its own, which the caller adds in fp32.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from flashattn.kernels.constants import HIGH_BITS
from flashattn.kernels.hopper.mma import ROWS
from flashattn.kernels.hopper.registers import acc_layout, operand_layout


@gluon.jit
def leading_bits(x, ADD: gl.constexpr):
    """Return the leading 8 bits of each number, truncated if ADD is 0, rounded if HALF_BIT."""
    return ((x.to(gl.int32, bitcast=True) + ADD) & HIGH_BITS).to(gl.float32, bitcast=True)


@gluon.jit
def bf16_operand(x, COLUMNS: gl.constexpr):
    """Return a term as the left operand of a product with COLUMNS columns."""
    return gl.convert_layout(x.to(gl.bfloat16), operand_layout(COLUMNS), assert_trivial=True)


@gluon.jit
def bf16_terms(x, COLUMNS: gl.constexpr, TERMS: gl.constexpr, ADD: gl.constexpr = 0):
    """Return the bf16 terms of fp32 x as left operands, see ``portable.mma.decompose``."""
    a = leading_bits(x, ADD)
    rest = x - a
    rest = gl.where(rest == rest, rest, 0.0)  # inf - inf
    if TERMS == 2:
        terms = bf16_operand(a, COLUMNS), bf16_operand(rest, COLUMNS)
    else:
        b = leading_bits(rest, 0)
        terms = (  # type: ignore[assignment]
            bf16_operand(a, COLUMNS),
            bf16_operand(b, COLUMNS),
            bf16_operand(rest - b, COLUMNS),
        )
    return terms


@gluon.jit
def mma_terms(a, b, TERMS: gl.constexpr):
    """Return the product of a [64, k] and b [k, columns], both as bf16 terms."""
    WIDTH: gl.constexpr = b[0].shape[1]
    acc = gl.zeros([ROWS, WIDTH], gl.float32, acc_layout(WIDTH))
    if TERMS == 2:
        acc = warpgroup_mma(a[0], b[1], acc, use_acc=False, is_async=True)
    else:
        acc = warpgroup_mma(a[1], b[1], acc, use_acc=False, is_async=True)
        acc = warpgroup_mma(a[0], b[2], acc, is_async=True)
        acc = warpgroup_mma(a[2], b[0], acc, is_async=True)
        acc = warpgroup_mma(a[0], b[1], acc, is_async=True)
    acc = warpgroup_mma(a[1], b[0], acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    acc = gl.where(acc == acc, acc, 0.0)  # inf * 0 of terms whose full product is inf
    acc = warpgroup_mma(a[0], b[0], acc, is_async=True)
    return warpgroup_mma_wait(0, deps=[acc])


@gluon.jit
def transpose_terms(x, TERMS: gl.constexpr):
    """Return the terms of a tile, transposed."""
    if TERMS == 2:
        turned = x[0].permute((1, 0)), x[1].permute((1, 0))
    else:
        turned = x[0].permute((1, 0)), x[1].permute((1, 0)), x[2].permute((1, 0))  # type: ignore[assignment]
    return turned
