"""Which keys a query sees: two bounds, and all that follows from them.

Query t sees keys t - left <= s <= t + right; a bound that is None hides nothing. Both bounds of
``keys_of`` and of ``queries_of`` never fall as their argument grows. They may lie outside of a
sequence, and none is seen where they cross. ``band`` is (left, right).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def keys_of(t, band, seq_kv):
    """Return (lo, hi): query t sees keys lo ... hi - 1, of so many; seq_kv None is no end."""
    left, right = band
    lo = 0
    if left is not None:
        lo = t - left
    if right is None:
        hi = seq_kv
    elif seq_kv is None:
        hi = t + right + 1
    else:
        hi = tl.minimum(seq_kv - 1, t + right) + 1
    return lo, hi


@triton.jit
def queries_of(s, band, seq_q):
    """Return (lo, hi): key s is seen by queries lo ... hi - 1."""
    left, right = band
    lo, hi = 0, seq_q
    if right is not None:
        lo = tl.maximum(s - right, 0)
    if left is not None:
        hi = tl.minimum(s + left + 1, seq_q)
    return lo, hi


@triton.jit
def key_tiles(
    start_q, band, seq_q, seq_kv, begin, split_len, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr
):
    """Return (first, full_begin, full_end, end) of the keys that a tile of queries visits.

    All queries see all keys of full_begin ... full_end, which are whole tiles; there are none under
    a left bound, where every tile is masked. A split visits ``split_len`` keys from ``begin`` on,
    whole tiles as well; split_len None is all keys.
    """
    left, right = band
    first = begin
    full_end, end = seq_kv // BLOCK_KV * BLOCK_KV, seq_kv
    if right is not None:
        _, hi = keys_of(start_q, band, None)
        full_end = tl.minimum(full_end, tl.maximum(hi, 0) // BLOCK_KV * BLOCK_KV)
        _, hi = keys_of(tl.minimum(start_q + BLOCK_Q, seq_q) - 1, band, None)
        end = tl.minimum(end, tl.maximum(hi, 0))
    if split_len is not None:
        full_end = tl.maximum(tl.minimum(full_end, begin + split_len), begin)
        end = tl.minimum(end, begin + split_len)
    if left is not None:
        lo, _ = keys_of(start_q, band, seq_kv)
        first = tl.maximum(first, tl.maximum(lo, 0) // BLOCK_KV * BLOCK_KV)
        full_end = first
    return first, first, full_end, end


@triton.jit
def query_tiles(
    start_kv, band, seq_q, begin, split_len, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr
):
    """Return (first, full_begin, full_end, end) of the queries that a tile of keys visits.

    Queries that do not exist count as such that see all keys: their P is 0. Under a left bound
    every tile is masked, as ``key_tiles`` says.
    """
    left, right = band
    first, _ = queries_of(start_kv, band, seq_q)
    first = first // BLOCK_Q * BLOCK_Q
    full_begin, end = queries_of(start_kv + BLOCK_KV - 1, band, seq_q)
    full_begin = tl.cdiv(full_begin, BLOCK_Q) * BLOCK_Q
    if right is not None:
        full_begin = tl.minimum(full_begin, tl.cdiv(seq_q, BLOCK_Q) * BLOCK_Q)
    if left is not None:
        full_begin = end
    if split_len is not None:
        end = tl.minimum(end, begin + split_len)
        first = tl.maximum(first, begin)
        full_begin = tl.maximum(tl.minimum(full_begin, end), first)
    return first, full_begin, end, end


@triton.jit
def apply_mask(
    x, start_q, start_kv, band, seq_kv, value, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr
):
    """Return a tile [queries, keys] with ``value`` where a query does not see a key.

    The last key seen is compared, hi - 1, so that the + 1 of ``keys_of`` costs nothing.
    """
    left, _ = band
    lo, hi = keys_of(start_q + tl.arange(0, BLOCK_Q), band, seq_kv)
    last = tl.broadcast_to(hi - 1, [BLOCK_Q])
    keys = (start_kv + tl.arange(0, BLOCK_KV))[None, :]
    seen = keys <= last[:, None]
    if left is not None:
        seen = seen & (keys >= lo[:, None])
    return tl.where(seen, x, value)


@triton.jit
def apply_mask_transposed(
    x, start_q, start_kv, band, value, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr
):
    """Return a tile [keys, queries] likewise; of keys that do not exist it says nothing."""
    left, right = band
    queries = start_q + tl.arange(0, BLOCK_Q)[None, :]
    keys = start_kv + tl.arange(0, BLOCK_KV)[:, None]
    if right is not None:
        _, hi = keys_of(queries, band, None)
        x = tl.where(keys <= hi - 1, x, value)
    if left is not None:
        lo, _ = keys_of(queries, band, 0)
        x = tl.where(keys >= lo, x, value)
    return x
