"""The tile scheduler: which tile of which head a program owns, and which split it walks over."""

from __future__ import annotations

import triton
import triton.language as tl

from flashattn.kernels.constants import SECTION_HEADS


@triton.jit
def tile_coord(program, programs, blocks, heads, REVERSED: tl.constexpr, SECTIONED: tl.constexpr):
    """Return (block, batch, head) of one of ``programs``.

    Neighbours share a head, and so its keys in L2. REVERSED starts the last block first: under a
    causal mask it has the most work (longest processing time first). SECTIONED starts all blocks of
    SECTION_HEADS heads in that order before those of the next heads: no long block is left for the
    end, and several programs at a time still share a head's keys.
    """
    if SECTIONED:
        first = program // (SECTION_HEADS * blocks) * SECTION_HEADS
        width = tl.minimum(SECTION_HEADS, programs // blocks - first)
        within = program - first * blocks
        block, row = within // width, first + within % width
    else:
        block, row = program % blocks, program // blocks
    if REVERSED:
        block = blocks - 1 - block
    return block, row // heads, row % heads


@triton.jit
def own_tile(
    grid,
    size,
    heads,
    split,
    BLOCK: tl.constexpr,
    REVERSED: tl.constexpr,
    SECTIONED: tl.constexpr,
):
    """Return the tile that a program owns, among ``size`` rows, and its tile of the output.

    Both are (batch, head, first row). ``grid`` is (program, number of programs). ``split`` is
    (batches, split_len): unless split_len is None, the output has so many batches for each split
    of the rows that a program loops over.
    """
    program, programs = grid
    batches, split_len = split
    blocks = tl.cdiv(size, BLOCK)
    block, out_batch, head = tile_coord(program, programs, blocks, heads, REVERSED, SECTIONED)
    start = block * BLOCK
    if split_len is None:
        batch = out_batch
    else:
        batch = out_batch % batches
    return (batch, head, start), (out_batch, head, start)


@triton.jit
def split_begin(out_batch, split):
    """Return the first row of the split that a program loops over."""
    batches, split_len = split
    if split_len is None:
        begin = 0
    else:
        begin = out_batch // batches * split_len
    return begin
