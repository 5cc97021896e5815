"""The key tiles of flashattn_hopper_bwd, 128 keys each, and the query tiles that they visit."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashattn.kernels.hopper.mask import ordered_runs

BLOCK_KV = gl.constexpr(128)


@gluon.jit
def visited_tiles(block, mask, t):
    """Return (first, full_begin, full_end, end) of query tiles.

    Tiles full_begin ... full_end - 1 need no mask. There is at least one tile, unless a two-sided
    mask hides the keys from all queries: that CTA has no turn to add dq, and must not wait for one.
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
