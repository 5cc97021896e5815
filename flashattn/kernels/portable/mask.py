"""The mask: the two bounds of the keys that a query sees, and all that follows from them.

``band`` is (left, right, keys, queries). Query t sees keys t - left <= s <= t + right; a bound that
is None hides nothing. Or ``keys`` and ``queries`` are not None, and point to the bounds of each row
(see ``flashattn.bounds``). The bounds that ``keys_of`` and ``queries_of`` return never decrease as
their argument grows. They may lie outside the sequence; where they cross, nothing is seen.

``sizes`` is (seq_q, seq_kv).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def keys_of(t, band, sizes):
    """Return (lo, hi): query t sees keys lo ... hi - 1; seq_kv None is no end."""
    left, right, keys, _ = band
    seq_q, seq_kv = sizes
    lo, hi = 0, seq_kv
    if keys is not None:
        at = keys + 2 * tl.minimum(t, seq_q - 1)
        lo, hi = tl.load(at), tl.load(at + 1)
    if left is not None:
        lo = t - left
    if right is not None:
        if seq_kv is None:
            hi = t + right + 1
        else:
            hi = tl.minimum(seq_kv - 1, t + right) + 1
    return lo, hi


@triton.jit
def queries_of(s, band, sizes):
    """Return (lo, hi): key s is seen by queries lo ... hi - 1."""
    left, right, _, queries = band
    seq_q, seq_kv = sizes
    lo, hi = 0, seq_q
    if queries is not None:
        at = queries + 2 * tl.minimum(s, seq_kv - 1)
        lo, hi = tl.load(at), tl.load(at + 1)
    if right is not None:
        lo = tl.maximum(s - right, 0)
    if left is not None:
        hi = tl.minimum(s + left + 1, seq_q)
    return lo, hi


@triton.jit
def of_batch(keys, queries, batch, strides):
    """Return pointers to the bounds of a batch's rows; ``strides`` are the batch strides."""
    batch = tl.cast(batch, tl.int64)
    return keys + batch * strides[0], queries + batch * strides[1]


@triton.jit
def keep_rows(tile, kept, TERMS: tl.constexpr):
    """Return a tile, or its bf16 terms, with 0 in the rows that are not kept."""
    if TERMS == 2:
        result = keep_rows(tile[0], kept, 0), keep_rows(tile[1], kept, 0)
    elif TERMS == 3:
        result = (  # type: ignore[assignment]
            keep_rows(tile[0], kept, 0),
            keep_rows(tile[1], kept, 0),
            keep_rows(tile[2], kept, 0),
        )
    else:
        result = tl.where(kept[:, None], tile, tl.zeros_like(tile))
    return result


@triton.jit
def seen_keys(start_kv, band, sizes, BLOCK: tl.constexpr):
    """Return which keys of a tile any query sees, by bounds of rows; others may be NaN."""
    lo, hi = queries_of(start_kv + tl.arange(0, BLOCK), band, sizes)
    return lo < hi


@triton.jit
def live_queries(start_q, band, sizes, BLOCK: tl.constexpr):
    """Return which queries of a tile see any key, by bounds of rows; others may be NaN."""
    lo, hi = keys_of(start_q + tl.arange(0, BLOCK), band, sizes)
    return lo < hi


@triton.jit
def whole_tiles(full_begin, full_end, end):
    """Return (begin, stop) of the tiles whose keys all queries see: begin <= stop <= end."""
    begin = tl.minimum(full_begin, end)
    return begin, tl.maximum(tl.minimum(full_end, end), begin)


@triton.jit
def key_tiles(start_q, band, sizes, begin, split_len, CONFIG: tl.constexpr):
    """Return (first, full_begin, full_end, end) of the keys that a tile of queries visits.

    All queries see all keys of full_begin ... full_end, which are whole tiles; with a left bound or
    bounds of rows, these two may cross. A split visits ``split_len`` keys from ``begin`` on, also
    whole tiles; split_len None is all keys.
    """
    BLOCK_Q: tl.constexpr = CONFIG.BLOCK_Q
    BLOCK_KV: tl.constexpr = CONFIG.BLOCK_KV
    left, right, keys, _ = band
    seq_q, seq_kv = sizes
    last_q = tl.minimum(start_q + BLOCK_Q, seq_q) - 1
    full_end, end = seq_kv // BLOCK_KV * BLOCK_KV, seq_kv
    if right is not None or keys is not None:
        _, hi = keys_of(start_q, band, (seq_q, None))
        full_end = tl.minimum(full_end, tl.maximum(hi, 0) // BLOCK_KV * BLOCK_KV)
        _, hi = keys_of(last_q, band, (seq_q, None))
        end = tl.minimum(end, tl.maximum(hi, 0))
    if split_len is not None:
        full_end = tl.maximum(tl.minimum(full_end, begin + split_len), begin)
        end = tl.minimum(end, begin + split_len)
    first, full_begin = begin, begin
    if left is not None or keys is not None:
        lo, _ = keys_of(start_q, band, sizes)
        first = tl.maximum(first, tl.maximum(lo, 0) // BLOCK_KV * BLOCK_KV)
        lo, _ = keys_of(last_q, band, sizes)
        full_begin = tl.maximum(first, tl.cdiv(tl.maximum(lo, 0), BLOCK_KV) * BLOCK_KV)
    return first, full_begin, full_end, end


@triton.jit
def query_tiles(start_kv, band, sizes, begin, split_len, CONFIG: tl.constexpr):
    """Return (first, full_begin, full_end, end) of the queries that a tile of keys visits.

    Queries that do not exist count as seeing all keys, as their P is 0. Otherwise this is like
    ``key_tiles``.
    """
    BLOCK_Q: tl.constexpr = CONFIG.BLOCK_Q
    BLOCK_KV: tl.constexpr = CONFIG.BLOCK_KV
    right = band[1]
    first, full_end = queries_of(start_kv, band, sizes)
    first = first // BLOCK_Q * BLOCK_Q
    full_end = full_end // BLOCK_Q * BLOCK_Q
    full_begin, end = queries_of(start_kv + BLOCK_KV - 1, band, sizes)
    full_begin = tl.cdiv(full_begin, BLOCK_Q) * BLOCK_Q
    if right is not None:
        full_begin = tl.minimum(full_begin, tl.cdiv(sizes[0], BLOCK_Q) * BLOCK_Q)
    if split_len is not None:
        end = tl.minimum(end, begin + split_len)
        first = tl.maximum(first, begin)
        full_begin = tl.maximum(tl.minimum(full_begin, end), first)
    return first, full_begin, full_end, end


@triton.jit
def apply_mask(x, start_q, start_kv, band, sizes, full, value):
    """Return a tile [queries, keys] with ``value`` where a query does not see a key.

    ``full`` is (begin, end) of the keys whose tiles need no mask, or None. Keys are compared with
    the last key seen, hi - 1, so that the + 1 of ``keys_of`` costs nothing.
    """
    BLOCK_Q: tl.constexpr = x.shape[0]
    BLOCK_KV: tl.constexpr = x.shape[1]
    queries = start_q + tl.arange(0, BLOCK_Q)
    keys = (start_kv + tl.arange(0, BLOCK_KV))[None, :]
    before, behind = True, True
    if full is not None:
        before, behind = start_kv < full[0], start_kv + BLOCK_KV > full[1]
    if behind:
        _, hi = keys_of(queries, band, sizes)
        last = tl.broadcast_to(hi - 1, [BLOCK_Q])
        x = tl.where(keys <= last[:, None], x, value)
    if band[0] is not None or band[2] is not None:
        if before:
            lo, _ = keys_of(queries, band, sizes)
            x = tl.where(keys >= lo[:, None], x, value)
    return x


@triton.jit
def apply_mask_transposed(x, start_q, start_kv, band, seq_q, full, value):
    """Return a tile [keys, queries] likewise; keys that do not exist are not masked."""
    BLOCK_Q: tl.constexpr = x.shape[1]
    queries = start_q + tl.arange(0, BLOCK_Q)[None, :]
    keys = start_kv + tl.arange(0, x.shape[0])[:, None]
    before, behind = True, True
    if full is not None:
        before, behind = start_q < full[0], start_q + BLOCK_Q > full[1]
    if band[1] is not None or band[2] is not None:
        if before:
            _, hi = keys_of(queries, band, (seq_q, None))
            x = tl.where(keys <= hi - 1, x, value)
    if band[0] is not None or band[2] is not None:
        if behind:
            lo, _ = keys_of(queries, band, (seq_q, 0))
            x = tl.where(keys >= lo, x, value)
    return x
