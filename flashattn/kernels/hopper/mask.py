"""The mask on the device: which keys a query sees, as two monotone bounds; all else is derived.

Query t sees keys t - left <= s <= t + right; None is no bound. Bounds may lie outside of a
sequence, and no key or query is seen if they cross. The mask depends on t - s alone, so a tile is
masked in coordinates of its own, with left and right shifted.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def keys_of(t, left, right, seq_kv):
    """Return (lo, hi): query t sees keys lo ... hi - 1."""
    lo, hi = 0, seq_kv
    if left is not None:
        lo = t - left
    if right is not None:
        hi = gl.minimum(t + (right + 1), seq_kv)
    return lo, hi


@triton.jit
def keys_of_tl(t, left, right, seq_kv):
    """Return the same in a kernel of Triton's own language."""
    lo, hi = 0, seq_kv
    if left is not None:
        lo = tl.maximum(t - left, 0)
    if right is not None:
        hi = tl.minimum(t + (right + 1), seq_kv)
    return lo, hi


@gluon.jit
def queries_of(s, left, right, seq_q):
    """Return (lo, hi): key s is seen by queries lo ... hi - 1."""
    lo, hi = 0, seq_q
    if right is not None:
        lo = s - right
    if left is not None:
        hi = s + (left + 1)
    return lo, hi


@gluon.jit
def key_tiles(
    start_q, left, right, seq_q, seq_kv, BLOCK_Q: gl.constexpr, BLOCK_KV: gl.constexpr,
):  # fmt: skip
    """Return (first, full_begin, full_end, end) of the key tiles that a query tile visits.

    All of its queries see all keys of tiles full_begin ... full_end - 1. Bounds may cross.
    """
    lo, full_hi = keys_of(start_q, left, right, seq_kv)
    full_lo, hi = keys_of(gl.minimum(start_q + BLOCK_Q, seq_q) - 1, left, right, seq_kv)
    if left is not None:  # the first queries may see the first key
        lo, full_lo = gl.maximum(lo, 0), gl.maximum(full_lo, 0)
    if right is not None:  # the first queries may see no key
        full_hi, hi = gl.maximum(full_hi, 0), gl.maximum(hi, 0)
    full_end, end = full_hi // BLOCK_KV, gl.cdiv(hi, BLOCK_KV)
    return lo // BLOCK_KV, gl.cdiv(full_lo, BLOCK_KV), full_end, end


@gluon.jit
def query_tiles(
    start_kv, left, right, seq_q, BLOCK_Q: gl.constexpr, BLOCK_KV: gl.constexpr,
):  # fmt: skip
    """Return (first, full_begin, full_end, end) of the query tiles that a key tile visits.

    All of its keys are seen by all queries of tiles full_begin ... full_end - 1. Bounds may cross.
    """
    lo, full_hi = queries_of(start_kv, left, right, seq_q)
    full_lo, hi = queries_of(start_kv + BLOCK_KV - 1, left, right, seq_q)
    if left is not None:  # the first keys may be seen by no query
        full_hi = gl.minimum(gl.maximum(full_hi, 0), seq_q)
        hi = gl.minimum(gl.maximum(hi, 0), seq_q)
    full_end, end = full_hi // BLOCK_Q, gl.cdiv(hi, BLOCK_Q)
    if left is None:  # what pads the last tile needs no mask
        full_end = end
    if right is not None:  # the first keys may be seen by all queries
        lo, full_lo = gl.maximum(lo, 0), gl.maximum(full_lo, 0)
    return lo // BLOCK_Q, gl.cdiv(full_lo, BLOCK_Q), full_end, end


@gluon.jit
def ordered_runs(first, full_begin, full_end, end):
    """Return the bounds of the tiles to visit, if any, so that none is below the one before."""
    end = gl.maximum(end, first)
    full_end = gl.minimum(gl.maximum(full_end, first), end)
    return first, gl.minimum(gl.maximum(full_begin, first), full_end), full_end, end


@gluon.jit
def descending_run(run, first, full_begin, full_end, end, left):
    """Return (start, stop, low): start - 1 ... stop are masked, and stop - 1 ... low need no mask.

    Tiles are visited from the last to the first in one run, or in two if ``left`` masks the first.
    """
    start, stop, low = end, full_end, full_begin
    if left is not None:
        second = run > 0
        low = gl.minimum(full_begin, full_end)
        start, stop = gl.where(second, low, end), gl.where(second, first, full_end)
        low = gl.where(second, first, low)
    return start, stop, low


@gluon.jit
def apply_mask(x, start_q, start_kv, left, right, seq_kv, value: gl.constexpr):
    """Return a tile [queries, keys] with ``value`` where a query does not see a key."""
    layout: gl.constexpr = x.type.layout
    keys = gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, layout))
    rows = gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, layout))
    if right is None:
        seen = keys[None, :] < seq_kv - start_kv
    else:
        _, hi = keys_of(rows, None, start_q + right - start_kv, seq_kv - start_kv)
        seen = keys[None, :] < hi[:, None]
    if left is not None:
        lo, _ = keys_of(rows, left + start_kv - start_q, None, seq_kv)
        seen = seen & (keys[None, :] >= lo[:, None])
    return gl.where(seen, x, value)


@gluon.jit
def apply_mask_transposed(x, start_q, start_kv, left, right, seq_kv=None):
    """Return a tile [keys, queries] with 0 where a query does not see a key.

    If seq_kv is not None, no query sees keys from there on: their P could be inf.
    """
    layout: gl.constexpr = x.type.layout
    queries = gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, layout))
    keys = start_kv + gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, layout))
    lo = gl.full([x.shape[0]], 0, gl.int32, layout=gl.SliceLayout(1, layout))
    if right is not None:
        lo, _ = queries_of(keys, None, right, x.shape[1])
        lo -= start_q
    if seq_kv is not None:
        lo = gl.where(keys < seq_kv, lo, x.shape[1])
    seen = queries[None, :] >= lo[:, None]
    if left is not None:
        _, hi = queries_of(keys - start_q, left, None, x.shape[1])
        seen = seen & (queries[None, :] < hi[:, None])
    return gl.where(seen, x, 0.0)
