"""Scheduling: which tile a program takes, and in which order it visits the tiles of the other side.

Sources: Qiang et al., 2026, "DASH: Deterministic Attention Scheduling for High-throughput
Reproducible LLM Training", for programs that begin at tiles of their own; the rounds are ours.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashattn.kernels.primitives import BAND


@gluon.jit
def place(tile, tiles, blocks, heads, band, CAUSAL: gl.constexpr):
    """Return (block, batch, head) of a tile of queries.

    Under a causal mask the longest rows of ``band`` heads come first, whose keys and values stay in
    the L2 cache; then those of the next.
    """
    if CAUSAL:
        start = tile // (band * blocks) * band
        width = gl.minimum(band, tiles // blocks - start)
        within = tile - start * blocks
        block, row = blocks - 1 - within // width, start + within % width
    else:
        block, row = tile % blocks, tile // blocks
    return block, row // heads, row % heads


@gluon.jit
def own_place(blocks, heads, CAUSAL: gl.constexpr):
    """Return ``place`` of this program where each has one tile, in bands as ``banded_tile`` has."""
    return place(gl.program_id(0), gl.num_programs(0), blocks, heads, BAND, CAUSAL)


@gluon.jit
def place_kv(tile, tiles, blocks, heads, band):
    """Return (block, batch, head) of a tile of keys: those that most queries see come first.

    So it is within ``band`` heads, then within the next; the tiles of a head are in their order.
    """
    start = tile // (band * blocks) * band
    width = gl.minimum(band, tiles // blocks - start)
    within = tile - start * blocks
    block, row = within // width, start + within % width
    return block, row // heads, row % heads


@gluon.jit
def round_of(tile, tiles, blocks, band, at_once):
    """Return (eldest, count, number): of a head's blocks that run at once, one of which a tile has.

    That is the first of them, how many they are, and which of them the tile's is. They are of the
    same ``at_once`` tiles: 1 leaves every block alone.
    """
    start = tile // (band * blocks) * band
    width = gl.minimum(band, tiles // blocks - start)
    within = tile - start * blocks
    begin = tile // at_once * at_once - start * blocks - within % width
    eldest = gl.maximum(gl.cdiv(begin, width), 0)
    end = gl.minimum(gl.cdiv(begin + at_once, width), blocks)
    return eldest, end - eldest, within // width - eldest


@gluon.jit
def nth(n, number, count, apart, end, CAUSAL: gl.constexpr):
    """Return the n-th tile of queries, of ``end``, that one of a round's blocks visits.

    The first of them begins with the last tile, and the others with ``apart - 1``, with as many
    more, and so on; after tile 0 comes the last. So all keep that distance, or less where there is
    no room for it, and nobody waits for another to begin. Under a mask all begin with the last.
    """
    if CAUSAL:
        i = end - 1 - n
    else:
        i = number * gl.minimum(apart * count, end) // count - 1 - n
        i = gl.where(i < 0, i + end, i)
    return i
