"""Sums of the online softmax: compensated addition, and the final normalization."""

from __future__ import annotations

import triton
import triton.language as tl

from flashattn.kernels.constants import LN2


@triton.jit
def add_compensated(total, error, x):
    """Return total + x and its rounding error, which the next sum subtracts (Kahan, 1965)."""
    x -= error
    longer = total + x
    return longer, (longer - total) - x


@triton.jit
def finite_max(m):
    """Return m, or 0 for rows that have seen no key yet, as -inf - -inf is NaN."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def normalized(acc, m, l):
    """Return o and the logsumexp; fully masked rows have l = 0."""
    fully_masked = l == 0.0
    l = tl.where(fully_masked, 1.0, l)
    inverse = tl.div_rn(tl.full(l.shape, 1.0, tl.float32), l)  # one division per row
    return acc * inverse[:, None], tl.where(fully_masked, float("-inf"), (m + tl.log2(l)) * LN2)
