"""Sums of the online softmax: compensated, and normalized at the end."""

from __future__ import annotations

import triton
import triton.language as tl

from flashattn.kernels.constants import LN2


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
