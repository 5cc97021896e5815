"""Which keys a tile of queries visits, and which of their scores count."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def visited_keys(
    start_q,
    seq_q,
    seq_kv,
    diagonal,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Return (full, end): a tile of queries sees all keys 0 ... full, and some of full ... end."""
    full = seq_kv // BLOCK_KV * BLOCK_KV
    end = seq_kv
    if CAUSAL:
        full = tl.minimum(full, tl.maximum(start_q + diagonal + 1, 0) // BLOCK_KV * BLOCK_KV)
        end = tl.minimum(end, tl.maximum(tl.minimum(start_q + BLOCK_Q, seq_q) + diagonal, 0))
    return full, end


@triton.jit
def seen_keys(
    start_q,
    start_kv,
    seq_kv,
    diagonal,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Return which scores of a tile count [BLOCK_Q, BLOCK_KV]: keys that exist and are seen."""
    last = tl.full([BLOCK_Q], seq_kv - 1, tl.int32)
    if CAUSAL:
        last = tl.minimum(last, start_q + tl.arange(0, BLOCK_Q) + diagonal)
    return (start_kv + tl.arange(0, BLOCK_KV))[None, :] <= last[:, None]
