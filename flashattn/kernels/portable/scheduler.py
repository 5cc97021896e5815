"""Which tile a program owns."""

from __future__ import annotations

import triton
import triton.language as tl

from flashattn.kernels.constants import BAND


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
