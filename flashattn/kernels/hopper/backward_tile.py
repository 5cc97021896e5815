"""The tile of flashattn_hopper_bwd: 128 keys, and the tiles of queries that they visit."""

# Gluon's aggregates look at annotations as they are, so they cannot be postponed here.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashattn.kernels.hopper.compat import aggregate
from flashattn.kernels.hopper.mask import ordered_runs

BLOCK_KV = gl.constexpr(128)


@aggregate
class Tile:
    """What is known when the kernel is compiled.

    Args:
        block_q: queries.
        d_lo: columns that are multiplied first, see ``mma``.
        d_hi: columns that are multiplied next.
        lines: of a tile of dq in the accumulator.
    """

    block_q: gl.constexpr
    d_lo: gl.constexpr
    d_hi: gl.constexpr
    lines: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, block_q, d_lo, d_hi, lines):
        """Store the fields."""
        self.block_q = gl.constexpr(block_q)
        self.d_lo = gl.constexpr(d_lo)
        self.d_hi = gl.constexpr(d_hi)
        self.lines = gl.constexpr(lines)


@gluon.jit
def visited_tiles(block, mask, t):
    """Return (first, full_begin, full_end, end) of query tiles.

    The keys of tiles full_begin ... full_end - 1 need no mask. There is at least one tile, but none
    where a two-sided mask hides the keys from all queries: who has no turn must not wait for one.
    """
    start_kv = block * BLOCK_KV
    first, full_begin, full_end, end = mask.query_tiles(start_kv, t.block_q, BLOCK_KV)
    if mask.two_sided:
        full_end = gl.minimum(full_end, end - 1)
        first, full_begin, full_end, end = ordered_runs(first, full_begin, full_end, end)
    else:
        if mask.right is not None:
            first = gl.minimum(first, end - 1)
        full_begin = gl.minimum(gl.maximum(full_begin, first), end)
    if start_kv + BLOCK_KV > mask.seq_kv:
        full_begin = end
    return first, full_begin, full_end, end


@gluon.jit
def first_key_tile(i, mask, t):
    """Return the first key tile that visits a query tile."""
    first, _, _, _ = mask.key_tiles(i * t.block_q, t.block_q, BLOCK_KV)
    return first
