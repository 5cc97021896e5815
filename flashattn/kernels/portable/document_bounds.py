"""flashattn_document_bounds: the bounds of packed documents, from their cumulative lengths."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flashattn.kernels.cache_key import with_stable_key
from flashattn.kernels.launch import on_device

BLOCK, CHUNK, WARPS = 128, 64, 4  # rows of a program, and documents that it reads at a time


@triton.jit
def store_intervals(
    program,
    own,
    other,
    documents,
    before,
    after,
    intervals,
    OF_KEYS: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Store the intervals that BLOCK rows of one side see among the rows of the other side.

    A cumulative length that decreases counts as the largest before it, so that both ends of the
    intervals never decrease. ``own`` and ``other`` are (cumulative lengths, rows) of a side.
    """
    x = program * BLOCK + tl.arange(0, BLOCK)
    own, own_size = own
    other, other_size = other
    behind = tl.zeros_like(x) + documents + 1  # index of the first length above x
    for first in range(0, documents + 1, CHUNK):
        i = (first + tl.arange(0, CHUNK))[None, :]
        here = tl.load(own + i, mask=i <= documents, other=0).to(tl.int32)
        over = (here > x[:, None]) & (i <= documents)
        behind = tl.minimum(behind, tl.min(tl.where(over, i, documents + 1), 1))
    document = tl.maximum(behind - 1, 0)
    start, end = tl.zeros_like(x), tl.zeros_like(x)
    own_start, own_end = tl.zeros_like(x), tl.zeros_like(x)
    for first in range(0, documents + 1, CHUNK):
        i = (first + tl.arange(0, CHUNK))[None, :]
        here = tl.minimum(tl.load(own + i, mask=i <= documents, other=0).to(tl.int32), own_size)
        there = tl.minimum(
            tl.load(other + i, mask=i <= documents, other=0).to(tl.int32), other_size
        )
        until, beyond = i <= document[:, None], i <= document[:, None] + 1
        start = tl.maximum(start, tl.max(tl.where(until, there, 0), 1))
        end = tl.maximum(end, tl.max(tl.where(beyond, there, 0), 1))
        own_start = tl.maximum(own_start, tl.max(tl.where(until, here, 0), 1))
        own_end = tl.maximum(own_end, tl.max(tl.where(beyond, here, 0), 1))
    at = x + start - own_start
    if BOTTOM_RIGHT:
        at += (end - start) - (own_end - own_start)
    low, high = start, end
    if before is not None:
        low = tl.minimum(tl.maximum(at - before, start), end)
    if after is not None:
        high = tl.minimum(tl.maximum(at + after + 1, low), end)
    ahead = x < tl.load(own).to(tl.int32)
    inside = (document < documents) & ~ahead
    if OF_KEYS:  # see ``bounds``
        start = tl.where(ahead, 0, start)
    tl.store(intervals + 2 * x, tl.where(inside, low, start), mask=x < own_size)
    tl.store(intervals + 2 * x + 1, tl.where(inside, high, start), mask=x < own_size)


@triton.jit(do_not_specialize=["documents", "seq_q", "seq_kv", "left", "right"])
def flashattn_document_bounds(
    cu_q,
    cu_k,
    keys,
    queries,
    documents,
    seq_q,
    seq_kv,
    left,
    right,
    BOTTOM_RIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write the keys of each query and the queries of each key; a program takes BLOCK rows."""
    program, of_queries = tl.program_id(0), tl.cdiv(seq_q, BLOCK)
    q, kv = (cu_q, seq_q), (cu_k, seq_kv)
    if program < of_queries:
        store_intervals(
            program, q, kv, documents, left, right, keys, False, BOTTOM_RIGHT, BLOCK, CHUNK
        )
    else:
        own = program - of_queries
        store_intervals(
            own, kv, q, documents, right, left, queries, True, BOTTOM_RIGHT, BLOCK, CHUNK
        )


def launch(
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    seq_q: int,
    seq_kv: int,
    left: int | None,
    right: int | None,
    *,
    bottom_right: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bounds, int32 [1, T, 2] and [1, S, 2]; arguments as ``bounds.of_documents``."""
    left, right = (None if x is None else min(x, seq_q + seq_kv) for x in (left, right))  # int32
    with on_device(cu_q):
        keys, queries = (
            torch.empty((1, n, 2), dtype=torch.int32, device=cu_q.device) for n in (seq_q, seq_kv)
        )
        programs = triton.cdiv(seq_q, BLOCK) + triton.cdiv(seq_kv, BLOCK)
        if programs:
            with_stable_key(flashattn_document_bounds)[(programs,)](
                *(cu_q.contiguous(), cu_k.contiguous(), keys, queries, len(cu_q) - 1),
                *(seq_q, seq_kv, left, right, bottom_right, BLOCK, CHUNK),
                num_warps=WARPS,
            )
    return keys, queries
