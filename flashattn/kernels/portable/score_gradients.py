"""Gradients of a bias whose elements several scores share, and of sinks.

One program writes each element, in a fixed order: no atomics.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashattn.kernels.constants import SIZES
from flashattn.kernels.portable.gradients import WIDE, Inputs, score_gradients
from flashattn.kernels.portable.mask import key_tiles, of_batch
from flashattn.kernels.portable.memory import load_rows, load_tile
from flashattn.kernels.portable.score import Score, bias_of, in_base_2, slope_of

SINK_BLOCK, SINK_WARPS = 1024, 4  # numbers that a program of flashattn_bwd_dsink adds at a time
RELATIVE_BLOCK, RELATIVE_WARPS = 256, 2  # elements of a program of flashattn_bwd_drelative


@triton.jit
def sum_by_distance(x, BLOCK: tl.constexpr):
    """Return sums of x [BLOCK, BLOCK] over i: of x[i, i + j], and of x[i, i + j - BLOCK]."""
    at = tl.arange(0, BLOCK)[:, None] + tl.arange(0, BLOCK)[None, :]
    x = tl.gather(x, at % BLOCK, 1)
    return tl.sum(tl.where(at < BLOCK, x, 0.0), 0), tl.sum(tl.where(at < BLOCK, 0.0, x), 0)


@triton.jit
def add_scores(
    acc,
    inputs,
    q_at,
    gqa,
    own_keys,
    end_keys,
    sizes,
    band,
    score,
    lies,
    added,
    ONE: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """Add dS of a tile of queries and of keys ``own_keys ... end_keys`` to a tile of dbias.

    ``added`` is the ALiBi and bias of these scores, in base 2, or None. ONE says that the keys are
    one visible tile: without a loop over keys, the outer loop is pipelined.
    """
    q, _, _, grad_o, stats, layout = inputs
    batch, head, start_q = q_at
    heads, group = gqa
    seq_q = sizes[0]
    BLOCK_Q: tl.constexpr = CONFIG.BLOCK_Q
    BLOCK_KV: tl.constexpr = CONFIG.BLOCK_KV
    row, at = batch * heads + head, (batch, head // group, start_q)
    q_tile = load_tile(q, layout.q, q_at, seq_q, layout.head_dim, BLOCK_Q, False, CONFIG)
    do_tile = load_tile(grad_o, layout.grad_o, q_at, seq_q, layout.head_dim, BLOCK_Q, False, CONFIG)
    lse_log2 = load_rows(stats[0], row, layout.stats, start_q, BLOCK_Q)[:, None]
    if added is not None:
        lse_log2 = lse_log2 - added
    delta_rows = load_rows(stats[1], row, layout.stats, start_q, BLOCK_Q)
    own = q_tile, do_tile, lse_log2, delta_rows[:, None]
    if ONE:
        ds, _s, _k_tile = score_gradients(
            own, inputs, at, own_keys, None, sizes, band, score, lies, True, CONFIG
        )
        acc += ds
    else:
        first, _, _, end = key_tiles(start_q, band, sizes, 0, None, CONFIG)
        for start_kv in tl.range(tl.maximum(first, own_keys), tl.minimum(end, end_keys), BLOCK_KV):
            ds, _s, _k_tile = score_gradients(
                own, inputs, at, start_kv, None, sizes, band, score, lies, True, CONFIG
            )
            acc += ds
    return acc


@triton.jit
def store_shared(
    acc,
    dbias,
    row,
    start_q,
    start_kv,
    sizes,
    OF_QUERIES: tl.constexpr,
    OF_KEYS: tl.constexpr,
):
    """Sum a tile over the queries and keys that share an element, and store it.

    ``row`` is the index of a head of dbias, counted across batches.
    """
    seq_q, seq_kv = sizes
    queries, keys = start_q + tl.arange(0, acc.shape[0]), start_kv + tl.arange(0, acc.shape[1])
    row = tl.cast(row, tl.int64)
    to = dbias.dtype.element_ty
    if OF_QUERIES and OF_KEYS:
        at = (row * seq_q + queries)[:, None] * seq_kv + keys[None, :]
        there = (queries < seq_q)[:, None] & (keys < seq_kv)[None, :]
        tl.store(dbias + at, acc.to(to), mask=there)
    elif OF_QUERIES:
        tl.store(dbias + row * seq_q + queries, tl.sum(acc, 1).to(to), mask=queries < seq_q)
    elif OF_KEYS:
        tl.store(dbias + row * seq_kv + keys, tl.sum(acc, 0).to(to), mask=keys < seq_kv)
    else:
        tl.store(dbias + row, tl.sum(tl.sum(acc, 1), 0).to(to))


@triton.jit
def store_by_distance(acc, partial, row, rows, start_kv, sizes):
    """Sum a tile by distance s - t, and store both parts: from start_kv on, and before.

    Both are parts of a relative bias's gradient; ``rows`` is the number of heads of all batches.
    """
    seq_q, seq_kv = sizes
    BLOCK: tl.constexpr = acc.shape[1]
    size = seq_q + seq_kv - 1
    to = partial + tl.cast(row, tl.int64) * size
    first, second = sum_by_distance(acc, BLOCK)
    at = start_kv + seq_q - 1 + tl.arange(0, BLOCK)
    tl.store(to + at, first, mask=(at >= 0) & (at < size))
    at -= BLOCK
    to += tl.cast(rows, tl.int64) * size
    tl.store(to + at, second, mask=(at >= 0) & (at < size))


@triton.jit
def own_part(sizes, OF_QUERIES: tl.constexpr, OF_KEYS: tl.constexpr, CONFIG: tl.constexpr):
    """Return the head of dbias of which a program owns a part, and where the part begins."""
    BLOCK_Q: tl.constexpr = CONFIG.BLOCK_Q
    BLOCK_KV: tl.constexpr = CONFIG.BLOCK_KV
    seq_q, seq_kv = sizes
    row = tl.program_id(0)
    start_q, start_kv = 0, 0
    if OF_KEYS:
        start_kv = row % tl.cdiv(seq_kv, BLOCK_KV) * BLOCK_KV
        row = row // tl.cdiv(seq_kv, BLOCK_KV)
    if OF_QUERIES:
        start_q = row % tl.cdiv(seq_q, BLOCK_Q) * BLOCK_Q
        row = row // tl.cdiv(seq_q, BLOCK_Q)
    return row, start_q, start_kv


@triton.jit
def own_distance(sizes, BLOCK: tl.constexpr):
    """Return a program's head, its first query and end, and the distance s - t of its tiles."""
    seq_q, seq_kv = sizes
    before = tl.cdiv(seq_q, BLOCK)
    blocks = before + tl.cdiv(seq_kv, BLOCK) + 1  # the first and the last have no tiles and store 0
    row = tl.program_id(0) // blocks
    start_kv = (tl.program_id(0) % blocks - before) * BLOCK
    return row, tl.maximum(0, -start_kv), tl.minimum(seq_q, seq_kv - start_kv), start_kv


@triton.jit
def shared_by(row, lies, batches, heads):
    """Return the batches and the heads that share a head of dbias: first, end, first, end."""
    first_batch, end_batch = 0, batches
    first_head, end_head, batch = 0, heads, row
    if lies.head is not None:
        first_head, batch = row % heads, row // heads
        end_head = first_head + 1
    if lies.batch is not None:
        first_batch, end_batch = batch, batch + 1
    return first_batch, end_batch, first_head, end_head


@triton.jit(do_not_specialize=SIZES)
def flashattn_bwd_dbias(
    q,
    k,
    v,
    grad_o,
    stats,
    dbias,
    bounds,
    scored,
    lies,
    layout,
    heads,
    group,
    seq_q,
    seq_kv,
    left,
    right,
    batches,
    scale,
    CONFIG: tl.constexpr,
):
    """Compute the gradient of a bias that several scores share.

    A program owns a tile of the bias, or of its rows or columns, and walks over the batches, heads,
    queries and keys that share it.
    """
    BLOCK_Q: tl.constexpr = CONFIG.BLOCK_Q
    BLOCK_KV: tl.constexpr = CONFIG.BLOCK_KV
    OF_QUERIES: tl.constexpr = lies.query is not None
    OF_KEYS: tl.constexpr = lies.key is not None
    inputs = Inputs(q, k, v, grad_o, stats, layout)
    gqa, sizes = (heads, group), (seq_q, seq_kv)
    row, start_q, start_kv = own_part(sizes, OF_QUERIES, OF_KEYS, CONFIG)
    first_batch, end_batch, first_head, end_head = shared_by(row, lies, batches, heads)
    end_q = start_q + BLOCK_Q if OF_QUERIES else seq_q
    end_keys = start_kv + BLOCK_KV if OF_KEYS else seq_kv
    acc = tl.zeros([BLOCK_Q, BLOCK_KV], tl.float32)
    for batch in tl.range(first_batch, end_batch):
        band = left, right, bounds[0], bounds[1]
        if bounds[0] is not None:
            keys, queries = of_batch(bounds[0], bounds[1], batch, layout.bounds)
            band = None, None, keys, queries
        for head in tl.range(first_head, end_head):
            slope, bias = scored[0], bias_of(scored[1], lies, batch, head, CONFIG.VECTOR)
            if slope is not None:
                slope = slope_of(slope, lies, batch, head)
            score = Score(scale, slope, bias, None)
            for own_q in tl.range(start_q, end_q, BLOCK_Q):
                q_at = batch, head, own_q
                acc = add_scores(
                    acc,
                    inputs,
                    q_at,
                    gqa,
                    start_kv,
                    end_keys,
                    sizes,
                    band,
                    score,
                    lies,
                    None,
                    False,
                    CONFIG,
                )
    store_shared(acc, dbias, row, start_q, start_kv, sizes, OF_QUERIES, OF_KEYS)


@triton.jit(do_not_specialize=SIZES)
def flashattn_bwd_dbias_relative(
    q,
    k,
    v,
    grad_o,
    stats,
    dbias,
    bounds,
    scored,
    lies,
    layout,
    heads,
    group,
    seq_q,
    seq_kv,
    left,
    right,
    batches,
    scale,
    CONFIG: tl.constexpr,
):
    """Compute the gradient of a relative bias in parts; ``dbias`` holds two for each head.

    A program owns the tiles of scores of one head at one distance; see ``store_by_distance``.
    """
    BLOCK: tl.constexpr = CONFIG.BLOCK_Q
    CLEAN: tl.constexpr = bounds[0] is None
    # Without a loop over keys the terms of all four tiles would stay in registers.
    WALKS: tl.constexpr = CONFIG.PRECISION == "bf16x6" and CONFIG.BLOCK_D >= WIDE
    inputs, gqa, sizes = Inputs(q, k, v, grad_o, stats, layout), (heads, group), (seq_q, seq_kv)
    row, start_q, end_q, distance = own_distance(sizes, BLOCK)
    batch, head, start_kv = row // heads, row % heads, start_q + distance
    band = left, right, bounds[0], bounds[1]
    if CLEAN:  # all tiles at one distance are seen as the first is
        first, _, _, end = key_tiles(start_q, band, sizes, 0, None, CONFIG)
        end_q = tl.where((start_kv + BLOCK > first) & (start_kv < end), end_q, start_q)
    else:
        keys, queries = of_batch(bounds[0], bounds[1], batch, layout.bounds)
        band = None, None, keys, queries
    slope, bias = scored[0], bias_of(scored[1], lies, batch, head, CONFIG.VECTOR)
    if slope is not None:
        slope = slope_of(slope, lies, batch, head)
    at_distance, score = Score(scale, slope, bias, None), Score(scale, None, None, None)
    acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    if start_q < end_q:
        added = in_base_2(acc, at_distance, lies, start_q, start_kv, sizes, False, False, CONFIG)
        for own_q in tl.range(start_q, end_q, BLOCK):
            own_keys, q_at = own_q + distance, (batch, head, own_q)
            acc = add_scores(
                acc,
                inputs,
                q_at,
                gqa,
                own_keys,
                own_keys + BLOCK,
                sizes,
                band,
                score,
                lies,
                added,
                CLEAN and not WALKS,
                CONFIG,
            )
    store_by_distance(acc, dbias, row, batches * heads, distance, sizes)


@triton.jit(do_not_specialize=[*SIZES, "size"])
def flashattn_bwd_drelative(partial, dbias, lies, heads, batches, size, BLOCK: tl.constexpr):
    """Sum the parts of a relative bias's gradient; a program owns BLOCK elements.

    Args:
        partial: [2, batches, heads, size], in fp32.
        dbias: [batches or 1, heads or 1, size].
        lies: says which batches and heads share it.
        heads: H.
        batches: B.
        size: T + S - 1.
        BLOCK: elements of a program.
    """
    blocks = tl.cdiv(size, BLOCK)
    row = tl.program_id(0) // blocks
    at = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    first_batch, end_batch, first_head, end_head = shared_by(row, lies, batches, heads)
    acc = tl.zeros([BLOCK], tl.float32)
    for batch in tl.range(first_batch, end_batch):
        for head in tl.range(first_head, end_head):
            for part in tl.static_range(2):
                own = tl.cast((part * batches + batch) * heads + head, tl.int64) * size
                acc += tl.load(partial + own + at, mask=at < size, other=0.0)
    to = tl.cast(row, tl.int64) * size + at
    tl.store(dbias + to, acc.to(dbias.dtype.element_ty), mask=at < size)


@triton.jit(do_not_specialize=SIZES)
def flashattn_bwd_dsink(
    partial, dsink, heads, batches, rows, SHARED: tl.constexpr, BLOCK: tl.constexpr
):
    """Sum the gradients of sinks; a program owns one sink, of all batches if SHARED.

    Args:
        partial: [batches, heads, rows], each the sum over some queries.
        dsink: [batches or 1, heads].
        heads: H.
        batches: B.
        rows: partial sums of a head.
        SHARED: whether all batches have the same sinks.
        BLOCK: partial sums that are added at a time.
    """
    program = tl.program_id(0)
    acc = tl.zeros([BLOCK], tl.float32)
    for row in tl.range(program, batches * heads if SHARED else program + 1, heads):
        for start in tl.range(0, rows, BLOCK):
            at = start + tl.arange(0, BLOCK)
            acc += tl.load(partial + tl.cast(row, tl.int64) * rows + at, mask=at < rows, other=0.0)
    tl.store(dsink + program, tl.sum(acc, 0))
