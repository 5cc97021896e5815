"""flashattn_hopper_bwd: dk, dv and dq in one pass over the scores.

A program owns 128 keys of a head, 64 for each of two warpgroups, which keep dk and dv in registers
while tiles of queries and of dO come by. The scores are transposed, [keys, queries], so P and dS
are in registers as the products for dv and dk take them. For dq the warpgroups exchange dS through
shared memory, and each computes half of the tile from all 128 keys. One warp loads; another adds
the tiles of dq to an fp32 workspace, which flashattn_hopper_bwd_dq scales and rounds.

While the tensor cores multiply, the other units work: on the exponentials under the product for
dP, on dS under dv's, on its exchange under dk's, and dq is written out under the next scores.

A tile of dq takes what programs add after the first of them has stored, so the workspace need not
be cleared. Deterministic: they add in a fixed order, and a warp of its own waits for the turn.

Under a mask the order is that of their keys. Whom a program waits for has a smaller number, so it
runs, or did. All visit the last queries first, which all keys see. Where a few heads have all
programs, these take several workspaces in rotation, added up at the end.

Without a mask those of a head that run at once begin at queries of their own, go round, and add in
the order in which they come by: nobody waits for another to begin. All of a round do run, as the
launch is cooperative, and earlier rounds are over before a program begins the next.

Where few keys are shared by many heads, a program has the queries of some of them only: ``shares``.

Sources: Shah et al., 2024, "FlashAttention-3", for the roles and dq's halves; Triton's Gluon.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashattn.kernels import launch
from flashattn.kernels.backward import (
    Gradients,
    Grads,
    Plan,
    Saved,
    copies,
    known,
    readable,
    row_shape,
    row_terms,
)
from flashattn.kernels.backward import backward as portable
from flashattn.kernels.backward import plan as portable_plan
from flashattn.kernels.hopper import backward_d256, backward_fp32
from flashattn.kernels.hopper.compat import add_tile, store_tile
from flashattn.kernels.hopper.config import (
    BackwardConfig,
    WideConfig,
    columns,
    pick_backward,
    pick_wide,
)
from flashattn.kernels.hopper.forward import takes
from flashattn.kernels.hopper.gqa import Shares, key_head, share, store_share
from flashattn.kernels.hopper.mma import mma_pv, mma_qk, mma_wait, store_acc, zero_acc
from flashattn.kernels.hopper.pipeline import new_pipeline, new_scalar_pipeline
from flashattn.kernels.hopper.scheduler import nth, place_kv, round_of
from flashattn.kernels.hopper.semaphore import (
    await_turn,
    order_after_turn,
    pass_on,
    slab,
    slabs_for,
    turn_at,
    turn_of,
)
from flashattn.kernels.hopper.tma import WARPS, Numbers, Tiles
from flashattn.kernels.launch import PLANS, Facts, Launch, Like
from flashattn.kernels.primitives import LOG2E
from flashattn.kernels.tiles import block_d

KEYS = gl.constexpr(64)  # of a warpgroup
BLOCK_KV = gl.constexpr(128)
QUERIES = gl.constexpr(64)  # of a warpgroup's part of a tile of dq
LINE = gl.constexpr(64)  # numbers in a row of the workspace
MEET = gl.constexpr("bar.sync 10, 256; mov.b32 $0, 0;")  # Triton takes barriers from 0 on


@gluon.jit
def meet():
    """Wait for the other warpgroup."""
    gl.inline_asm_elementwise(MEET, "=r,~{memory}", [], gl.int32, False, 1)


@gluon.jit
def visited(start_kv, seq_q, seq_kv, diagonal, BLOCK_Q: gl.constexpr, CAUSAL: gl.constexpr):
    """Return (first, full, end) tiles of queries; those from full on see all keys; first < end."""
    end = gl.cdiv(seq_q, BLOCK_Q)
    first, full = 0, 0
    if CAUSAL:
        first = gl.minimum(gl.maximum(start_kv - diagonal, 0) // BLOCK_Q, end - 1)
        full = gl.cdiv(gl.maximum(start_kv + BLOCK_KV - 1 - diagonal, 0), BLOCK_Q)
    full = gl.minimum(gl.maximum(full, first), end)
    if start_kv + BLOCK_KV > seq_kv:
        full = end
    return first, full, end


@gluon.jit
def load(
    q, k, v, grad_o, lse2, delta, keys, values, queries, grads, tiles, blocks, owners, shares, band,
    at_once, apart, group, seq_q, seq_kv, diagonal, BLOCK_Q: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Be the warp that loads: keys and values, and before these the first queries, with dO."""
    n = 0
    held = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        block, batch, owner = place_kv(tile, tiles, blocks, owners, band)
        _, count, number = round_of(tile, tiles, blocks, band, at_once)
        start_kv, kv_head = block * BLOCK_KV, key_head(owner, shares)
        first, _, end = visited(start_kv, seq_q, seq_kv, diagonal, BLOCK_Q, CAUSAL)
        for head in range(owner * group, owner * group + group):
            for visit in range(end - first):
                start_q = nth(visit, number, count, apart, end, CAUSAL) * BLOCK_Q
                row = batch * (owners * group) + head
                queries.load(n, q, batch, head, start_q, lse2, row)
                grads.producer_commit(n, grad_o, batch, head, start_q, delta, row)
                n += 1
                if visit == 0 and head == owner * group:
                    for w in gl.static_range(2):
                        keys.load(held + w, k, batch, kv_head, start_kv + w * KEYS)
                    for w in gl.static_range(2):
                        values.load(held + w, v, batch, kv_head, start_kv + w * KEYS)
                    held += 2


@gluon.jit
def send(dq, part, batch, head, row, first, LINES: gl.constexpr):
    """Add a part of dq, some lines of the workspace, to it, or store it if it is the first."""
    BOX: gl.constexpr = dq.block_shape[2]
    for i in gl.static_range(0, LINES, BOX):
        box = part.slice(i, BOX, dim=2)
        if first:
            store_tile(dq, [batch, head, row + i, 0], box)
        else:
            add_tile(dq, [batch, head, row + i, 0], box)


@gluon.jit
def follow(
    turns, allowed, tiles, blocks, owners, band, at_once, apart, ordered, slabs, group, seq_q,
    seq_kv, diagonal, BLOCK_Q: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Be the warp that waits for turns, and tells them: the one that stores has no time to."""
    n = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        block, batch, owner = place_kv(tile, tiles, blocks, owners, band)
        eldest, count, number = round_of(tile, tiles, blocks, band, at_once)
        first, _, end = visited(block * BLOCK_KV, seq_q, seq_kv, diagonal, BLOCK_Q, CAUSAL)
        place_of = slab(block, batch, tiles, blocks, owners, slabs)
        for head in range(owner * group, owner * group + group):
            for visit in range(end - first):
                i = nth(visit, number, count, apart, end, CAUSAL)
                turn = turn_at(
                    i, block, eldest, number, count, apart, end, slabs, ordered, CAUSAL,
                )  # fmt: skip
                await_turn(turn_of(turns, place_of, head, owners, group, end, i), turn)
                allowed.write(n, turn)
                n += 1


@gluon.jit
def store(
    dq, turns, staging, staged, left, allowed, tiles, blocks, owners, band, at_once, apart, ordered,
    slabs, group, seq_q, seq_kv, diagonal, BLOCK_Q: gl.constexpr, LINES: gl.constexpr,
    CAUSAL: gl.constexpr,
):  # fmt: skip
    """Be the warp that adds both warpgroups' parts of dq to the workspace."""
    n = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        block, batch, owner = place_kv(tile, tiles, blocks, owners, band)
        _, count, number = round_of(tile, tiles, blocks, band, at_once)
        first, _, end = visited(block * BLOCK_KV, seq_q, seq_kv, diagonal, BLOCK_Q, CAUSAL)
        place_of = slab(block, batch, tiles, blocks, owners, slabs)
        for head in range(owner * group, owner * group + group):
            for visit in range(end - first):
                i = nth(visit, number, count, apart, end, CAUSAL)
                row = i * LINES
                turn = allowed.read(n)
                if CAUSAL:  # it is the same for all
                    turn = turn_at(i, block, 0, 0, 1, 1, end, slabs, ordered, CAUSAL)
                order_after_turn()
                mbarrier.wait(staged.index(0), n & 1)
                send(dq, staging.index(0), place_of, head, row, turn == 0, LINE)
                mbarrier.wait(staged.index(1), n & 1)
                send(dq, staging.index(1), place_of, head, row + LINE, turn == 0, LINES - LINE)
                for w in gl.static_range(2):
                    tma.store_wait(1 - w)
                    mbarrier.arrive(left.index(w), count=1)
                if turn < ordered:
                    pass_on(turn_of(turns, place_of, head, owners, group, end, i))
                n += 1
    tma.store_wait(0)


@gluon.jit
def hide(p, start_q, start_kv, seq_kv, diagonal, BLOCK_Q: gl.constexpr, CAUSAL: gl.constexpr):
    """Put 0 where a query does not see a key, or there is no key: there P could be inf."""
    layout: gl.constexpr = p.type.layout
    queries = gl.arange(0, BLOCK_Q, layout=gl.SliceLayout(0, layout))
    keys = start_kv + gl.arange(0, KEYS, layout=gl.SliceLayout(1, layout))
    seen_from = gl.full([KEYS], 0, gl.int32, layout=gl.SliceLayout(1, layout))
    if CAUSAL:
        seen_from = keys - diagonal - start_q
    seen_from = gl.where(keys < seq_kv, seen_from, BLOCK_Q)
    return gl.where(queries[None, :] >= seen_from[:, None], p, 0.0)


@gluon.jit
def part(
    WARPGROUP: gl.constexpr, exchange, n, keys, BLOCK_Q: gl.constexpr, COLUMNS: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Begin this warpgroup's part of dq, of 64 queries and some columns, over all keys."""
    dq = gl.zeros([QUERIES, COLUMNS], gl.float32, LAYOUT)
    for w in gl.static_range(2):
        ds = exchange.index((n & 1) * 2 + w)
        k = keys.term(w)
        if BLOCK_Q == QUERIES:
            k = k.slice(WARPGROUP * LINE, COLUMNS, dim=1)
        else:
            ds = ds.slice(WARPGROUP * QUERIES, QUERIES, dim=1)
        dq = warpgroup_mma(ds.permute((1, 0)), k, dq, use_acc=w > 0, is_async=True)
    return dq


@gluon.jit
def in_order(dq, COLUMNS: gl.constexpr):
    """Return a part of dq in the workspace's order, as rows of 64 numbers.

    Rows are (warp, half, lane // 4), columns (block, lane % 4, pair). In memory the four numbers of
    a thread in a block are neighbours, then threads, then blocks: no bank is in conflict.
    """
    dq = gl.permute(gl.reshape(dq, [4, 2, 8, COLUMNS // 8, 4, 2]), (3, 0, 2, 4, 1, 5))
    return gl.reshape(dq, [COLUMNS, LINE])


@gluon.jit
def stage(WARPGROUP: gl.constexpr, dq, staging, left, n, COLUMNS: gl.constexpr):
    """Write this warpgroup's part of the n-th tile of dq to where the warp that stores finds it."""
    mbarrier.wait(left.index(WARPGROUP), (n & 1) ^ 1)
    staging.index(WARPGROUP).reshape([LINE, LINE]).slice(0, COLUMNS, dim=0).store(
        in_order(dq, COLUMNS)
    )


@gluon.jit
def hand_over(WARPGROUP: gl.constexpr, staged, queries, n):
    """Say that the part of dq is there, and that the n-th tile of queries is not needed more."""
    fence_async_shared()
    mbarrier.arrive(staged.index(WARPGROUP), count=1)
    queries.consumer_release(n)


@gluon.jit
def step(
    WARPGROUP: gl.constexpr, state, k, v, keys, queries, grads, exchange, staging, staged, left, n,
    start_q, start_kv, seq_kv, diagonal, scale_log2, BLOCK_Q: gl.constexpr, D_LO: gl.constexpr,
    D_HI: gl.constexpr, COLUMNS: gl.constexpr, CAUSAL: gl.constexpr, MASKED: gl.constexpr, late,
    S: gl.constexpr, P: gl.constexpr, DQ: gl.constexpr,
):  # fmt: skip
    """Fold the n-th tile of queries; if late, the state has the part of dq of the one before."""
    dq, dk, dv = state
    q, lse2 = queries.consumer_wait(n), queries.stats(n)
    s = mma_qk(k, q, D_LO, D_HI, S)
    if late:
        stage(WARPGROUP, dq, staging, left, n - 1, COLUMNS)
    do, delta = grads.consumer_wait(n), grads.stats(n)
    dp = mma_qk(v, do, D_LO, D_HI, S)
    if late:
        hand_over(WARPGROUP, staged, queries, n - 1)
    s = mma_wait(s, 1, D_HI)
    p = gl.exp2(s * scale_log2 - lse2.load(gl.SliceLayout(0, S))[None, :])
    if MASKED:
        p = hide(p, start_q, start_kv, seq_kv, diagonal, BLOCK_Q, CAUSAL)
    p_operand = gl.convert_layout(p.to(q.dtype), P, assert_trivial=True)
    dv = mma_pv(p_operand, do, dv, D_LO, D_HI)
    dp = mma_wait(dp, 1, D_HI)
    ds = (p * (dp - delta.load(gl.SliceLayout(0, S))[None, :])).to(q.dtype)
    # The other warpgroup has read what was there: it came to the last meeting after it did so.
    exchange.index((n & 1) * 2 + WARPGROUP).store(ds)
    fence_async_shared()
    dk = mma_pv(gl.convert_layout(ds, P, assert_trivial=True), q, dk, D_LO, D_HI)
    meet()
    dq = part(WARPGROUP, exchange, n, keys, BLOCK_Q, COLUMNS, DQ)
    return mma_wait_all(dq, dk, dv, D_HI)


@gluon.jit
def mma_wait_all(dq, dk, dv, D_HI: gl.constexpr):
    """Wait for all products."""
    if D_HI == 0:
        dq, k, v = warpgroup_mma_wait(0, deps=[dq, dk[0], dv[0]])
        dk, dv = (k,), (v,)
    else:
        dq, k, l, v, w = warpgroup_mma_wait(0, deps=[dq, dk[0], dk[1], dv[0], dv[1]])
        dk, dv = (k, l), (v, w)
    return dq, dk, dv


@gluon.jit
def attend(
    WARPGROUP: gl.constexpr, dk, dv, keys, values, queries, grads, exchange, staging, staged, left,
    tiles, blocks, owners, shares, head_dim, strides, band, group, seq_q, seq_kv, diagonal, scale,
    scale_log2, BLOCK_Q: gl.constexpr, D_LO: gl.constexpr, D_HI: gl.constexpr, LINES: gl.constexpr,
    CAUSAL: gl.constexpr,
):  # fmt: skip
    """Be a warpgroup that computes dk and dv of its keys, and its parts of dq."""
    COLUMNS: gl.constexpr = LINES - LINE if WARPGROUP == 1 else LINE  # of a part of dq
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16])
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    DKV: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D_LO, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, DKV, 2)
    n = 0
    held = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        block, batch, owner = place_kv(tile, tiles, blocks, owners, band)
        first, full, end = visited(block * BLOCK_KV, seq_q, seq_kv, diagonal, BLOCK_Q, CAUSAL)
        start_kv = block * BLOCK_KV + WARPGROUP * KEYS
        dk_acc = zero_acc(D_LO, D_HI)
        dv_acc = zero_acc(D_LO, D_HI)
        for w in gl.static_range(2):
            keys.consumer_wait(held + w)
        values.consumer_wait(held + WARPGROUP)
        k, v = keys.term(WARPGROUP), values.term(WARPGROUP)
        dq = gl.zeros([QUERIES, COLUMNS], gl.float32, DQ)
        middle = gl.minimum(full, end - 1)
        for half in range(2 * group):  # of a head: the last tile, then those that all keys see
            second = half % 2 > 0  # ... and then those that not all see: masked as the last is
            start, stop = gl.where(second, middle, end), gl.where(second, first, end - 1)
            for i in range(start - 1, stop - 1, -1):
                dq, dk_acc, dv_acc = step(
                    WARPGROUP, (dq, dk_acc, dv_acc), k, v, keys, queries, grads, exchange, staging,
                    staged, left, n, i * BLOCK_Q, start_kv, seq_kv, diagonal, scale_log2, BLOCK_Q,
                    D_LO, D_HI, COLUMNS, CAUSAL, True, i < end - 1, S, P, DQ,
                )  # fmt: skip
                n += 1
            for i in range(gl.where(second, middle, end - 1) - 1, middle - 1, -1):
                dq, dk_acc, dv_acc = step(
                    WARPGROUP, (dq, dk_acc, dv_acc), k, v, keys, queries, grads, exchange, staging,
                    staged, left, n, i * BLOCK_Q, start_kv, seq_kv, diagonal, scale_log2, BLOCK_Q,
                    D_LO, D_HI, COLUMNS, CAUSAL, False, gl.constexpr(True), S, P, DQ,
                )  # fmt: skip
                n += 1
            if second:
                stage(WARPGROUP, dq, staging, left, n - 1, COLUMNS)
                hand_over(WARPGROUP, staged, queries, n - 1)
        if shares is None:
            meet()  # both have read all keys, so gradients may take their place
            store_acc(dk_acc, scale, k, D_LO, D_HI)
            store_acc(dv_acc, 1.0, v, D_LO, D_HI)
            fence_async_shared()
            store_tile(dk, [batch, owner, start_kv, 0], keys.tiles.index(WARPGROUP))
            store_tile(dv, [batch, owner, start_kv, 0], values.tiles.index(WARPGROUP))
            tma.store_wait(0)
        else:
            batches = tiles // (blocks * owners)
            store_share(
                dk_acc, scale, dk, strides, owner, batch, batches, shares, start_kv, seq_kv,
                head_dim, D_LO, D_HI,
            )  # fmt: skip
            store_share(
                dv_acc, 1.0, dv, strides, owner, batch, batches, shares, start_kv, seq_kv, head_dim,
                D_LO, D_HI,
            )  # fmt: skip
        for w in gl.static_range(2):
            keys.consumer_release(w)
        values.consumer_release(WARPGROUP)
        held += 2


@gluon.jit(
    do_not_specialize=[
        "tiles",
        "blocks",
        "owners",
        "shares",
        "band",
        "at_once",
        "apart",
        "ordered",
        "slabs",
        "group",
        "seq_q",
        "seq_kv",
        "diagonal",
    ]
)
def flashattn_hopper_bwd(
    q, k, v, grad_o, lse2, delta, dq, dk, dv, turns, tiles, blocks, owners, shares, head_dim,
    strides, band, at_once, apart, ordered, slabs, group, seq_q, seq_kv, diagonal, scale,
    scale_log2, BLOCK_Q: gl.constexpr, D_LO: gl.constexpr, D_HI: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
):  # fmt: skip
    """Compute dk and dv, and add dq / scale to a workspace, of which there are ``slabs``.

    A head's programs take the slabs in rotation. The first ``ordered`` of a slab add in their
    order, and the others after these. All tensors but turns are descriptors; dk and dv are not
    where heads are divided into shares, whose fp32 sums [shares, batches, ...] they then are.
    """
    LINES: gl.constexpr = BLOCK_Q * (D_LO + D_HI) // LINE  # of a tile of dq in the workspace
    gl.static_assert(LINE < LINES)
    gl.static_assert(LINES <= 2 * LINE)
    keys = new_pipeline(k, 2, 2)
    values = new_pipeline(v, 2, 1)
    queries = new_pipeline(q, STAGES, 2, row_stats=lse2)
    grads = new_pipeline(grad_o, STAGES, 2, row_stats=delta, shared=queries)
    exchange = gl.allocate_shared_memory(
        q.dtype, [4, KEYS, BLOCK_Q], gl.NVMMASharedLayout(128, 16, 2)
    )
    staging = gl.allocate_shared_memory(dq.dtype, [2, 1, 1, LINE, LINE], dq.layout)
    staged = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    left = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for w in gl.static_range(2):
        mbarrier.init(staged.index(w), count=1)
        mbarrier.init(left.index(w), count=1)
    allowed = new_scalar_pipeline(1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (attend, (0, dk, dv, keys, values, queries, grads, exchange, staging, staged, left,
                      tiles, blocks, owners, shares, head_dim, strides, band, group, seq_q, seq_kv,
                      diagonal, scale, scale_log2, BLOCK_Q, D_LO, D_HI, LINES, CAUSAL)),
            (attend, (1, dk, dv, keys, values, queries, grads, exchange, staging, staged, left,
                      tiles, blocks, owners, shares, head_dim, strides, band, group, seq_q, seq_kv,
                      diagonal, scale, scale_log2, BLOCK_Q, D_LO, D_HI, LINES, CAUSAL)),
            (load, (q, k, v, grad_o, lse2, delta, keys, values, queries, grads, tiles, blocks,
                    owners, shares, band, at_once, apart, group, seq_q, seq_kv, diagonal, BLOCK_Q,
                    CAUSAL)),
            (store, (dq, turns, staging, staged, left, allowed, tiles, blocks, owners, band,
                     at_once, apart, ordered, slabs, group, seq_q, seq_kv, diagonal, BLOCK_Q, LINES,
                     CAUSAL)),
            (follow, (turns, allowed, tiles, blocks, owners, band, at_once, apart, ordered, slabs,
                      group, seq_q, seq_kv, diagonal, BLOCK_Q, CAUSAL)),
        ],
        [4, 1, 1, 1],
        [240, 24, 24, 24],
    )  # fmt: skip


@triton.jit(do_not_specialize=["blocks", "heads", "slabs", "seq_q", "diagonal"])
def flashattn_hopper_bwd_dq(
    total, dq, dq_strides, blocks, heads, slabs, seq_q, diagonal, scale, head_dim: tl.constexpr,
    BLOCK_Q: tl.constexpr, COLUMNS: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Write dq = scale * the sum of slabs in its order, and 0 to queries that see no key.

    A head has ``blocks`` of 64 queries; 32 columns of one are 32 rows of 64 numbers. Those of a
    tile of queries that a slab's first program did not visit are not there.
    """
    block = tl.program_id(0)
    row = (block // blocks).to(tl.int64)
    queries = block % blocks * 64 + tl.arange(0, 64)
    there = slabs
    if CAUSAL:
        tile = block % blocks * 64 // BLOCK_Q
        if tile < tl.cdiv(seq_q, BLOCK_Q) - 1:  # the last is visited by all
            there = tl.minimum(slabs, ((tile + 1) * BLOCK_Q - 1 + diagonal) // 128 + 1)
    base = dq + row // heads * dq_strides[0] + row % heads * dq_strides[1]
    numbers = tl.arange(0, 32)[:, None] * 64 + tl.arange(0, 64)[None, :]
    pitch = tl.num_programs(0).to(tl.int64) * COLUMNS * 64
    for start in tl.static_range(0, COLUMNS, 32):
        at = total + (block.to(tl.int64) * COLUMNS + start) * 64
        x = tl.load(at + numbers)
        for i in tl.range(1, there):
            x += tl.load(at + i * pitch + numbers)
        x = tl.permute(tl.reshape(x * scale, [4, 4, 8, 4, 2, 2]), (1, 4, 2, 0, 3, 5))
        x = tl.reshape(x, [64, 32])
        if CAUSAL:
            x = tl.where(queries[:, None] + diagonal >= 0, x, 0.0)
        columns = start + tl.arange(0, 32)
        inside = (queries[:, None] < seq_q) & (columns[None, :] < head_dim)
        place_of = queries[:, None].to(tl.int64) * dq_strides[2] + columns[None, :]
        tl.store(base + place_of, x.to(dq.dtype.element_ty), mask=inside)


def block_q(head_dim: int) -> int:
    """Return the queries of a tile: as many as make two parts of dq."""
    return 2 * QUERIES.value * LINE.value // block_d(head_dim)


def box_lines(head_dim: int) -> int:
    """Return the lines of the workspace that are stored at a time: what both parts consist of."""
    return LINE.value // 2 if columns(head_dim)[1] else LINE.value


def constants(config: BackwardConfig, head_dim: int, *, causal: bool) -> dict[str, Any]:
    """Return the values of the kernel's constexpr arguments."""
    first, rest = columns(head_dim)
    return {
        "BLOCK_Q": block_q(head_dim),
        "D_LO": first,
        "D_HI": rest,
        "STAGES": config.slots,
        "CAUSAL": causal,
    }


def rounding_constants(head_dim: int, *, causal: bool) -> dict[str, Any]:
    """Return the values of flashattn_hopper_bwd_dq's constexpr arguments."""
    wide = sum(columns(head_dim))
    return {"head_dim": head_dim, "BLOCK_Q": block_q(head_dim), "COLUMNS": wide, "CAUSAL": causal}


@dataclass(frozen=True)
class Lines:
    """The workspace [B, H, lines, 64] in fp32, of which [lines, 64] are stored at a time."""

    lines: int

    def describe(self, x: torch.Tensor) -> TensorDescriptor:
        """Return a descriptor of x."""
        layout = gl.NVMMASharedLayout(0, 32, 4)
        block = [1, 1, self.lines, LINE.value]
        return TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout)


def backward(grads: Grads, saved: Saved, **how: Any) -> Gradients:
    """Launch what ``plan`` returns for the same arguments.

    Returns:
        The gradients of q, k and v, in their dtype.
    """
    return plan(grads, saved, **how)(grads, saved)


def plan(
    grads: Grads,
    saved: Saved,
    *,
    diagonal: int | None,
    scale: float,
    precision: str = "auto",
    deterministic: bool = False,
    config: BackwardConfig | WideConfig | None = None,
) -> Plan:
    """Return what launches flashattn_bwd_delta, flashattn_hopper_bwd and flashattn_hopper_bwd_dq.

    Wider heads are those of ``backward_d256``, fp32 those of ``backward_fp32``. What they cannot
    take is the portable kernels': tensors that no descriptor can have, and scales that are not
    positive. It does for these tensors, and for all that are ``Like`` them.

    Args:
        grads: of o [B, H, T, D], copied once if no descriptor can have it, and of lse [B, H, T],
            copied if not contiguous, or None.
        saved: q, k, v as ``forward`` took them, o and lse as it returned them, copied likewise.
        diagonal: as in ``forward.plan``.
        scale: as in ``forward.plan``.
        precision: as in ``forward.plan``.
        deterministic: whether a repeated call gives the same bits of dq; dk and dv are always so.
        config: instead of the table's.
    """
    if saved[0].dtype == torch.float32:
        how: dict[str, Any] = {"diagonal": diagonal, "scale": scale, "precision": precision}
        return portable_plan(grads, saved, **how, passes=backward_fp32.passes)
    launch.input_precision(precision, saved[0].dtype)
    return _plan(known(grads, saved), diagonal, scale, deterministic, config)


@lru_cache(PLANS)
def _plan(
    given: tuple[Facts, ...],
    diagonal: int | None,
    scale: float,
    deterministic: bool,  # noqa: FBT001
    config: BackwardConfig | WideConfig | None,
) -> Plan:
    """Choose what answers.

    Args:
        given: what is ``known``.
        diagonal: as in ``plan``.
        scale: as in ``plan``.
        deterministic: as in ``plan``.
        config: instead of the table's.
    """
    q, k, v, grad_o, o, *numbers = (Like(*x) for x in given)
    causal = diagonal is not None
    how: dict[str, Any] = {"diagonal": diagonal, "scale": scale}
    chosen = (
        config
        or pick_wide(q.shape[3], q.shape[2], causal=causal)
        or pick_backward(
            q.shape[3],
            q.shape[2],
            causal=causal,
            deterministic=deterministic,
            heads=k.shape[0] * k.shape[1],
            multiprocessors=launch.multiprocessors(q.device),
        )
    )
    scattered = not (grad_o.dense and grad_o.describable)
    unreadable = not readable([q, k, v, o], numbers)
    hopeless = scattered and grad_o.meta.is_contiguous()
    if chosen is None or hopeless or not (unreadable or takes(q, k, v, scale=scale)):
        return lambda grads, saved: portable(grads, saved, **how)
    if scattered or unreadable:

        def copied(grads: Grads, saved: Saved) -> Gradients:
            (grad_o, grad_lse), saved = copies(grads, saved)
            grads = grad_o.contiguous() if scattered else grad_o, grad_lse
            return plan(grads, saved, **how, deterministic=deterministic, config=config)(
                grads, saved
            )

        return copied
    dq = q._replace(strides=torch.empty_like(q.meta).stride())
    if isinstance(chosen, WideConfig):
        pitch = row_shape(q.shape)[1]
        wide = backward_d256.plan(q, k, v, grad_o, dq, pitch, diagonal, scale, chosen)
        return partial(_fill, wide)
    return partial(_fill, _narrow(q, k, v, dq, diagonal, scale, deterministic, chosen))


def _fill(
    launches: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None],
    grads: Grads,
    saved: Saved,
) -> Gradients:
    """Allocate dq, dk and dv, and launch what fills them."""
    (grad_o, grad_lse), (q, k, v, o, lse) = grads, saved
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    with launch.on_device(q):
        lse2, delta = row_terms(grad_o, grad_lse, o, lse)
        launches((q, k, v, grad_o, lse2, delta), (dq, dk, dv))
    return dq, dk, dv


@dataclass(frozen=True)
class _Narrow:
    """What is launched for D <= 128.

    Args:
        fold: flashattn_hopper_bwd.
        rounding: flashattn_hopper_bwd_dq.
        shares: what dk and dv are filled with.
        total: shape of the workspace.
        turns: counters, one for each tile of queries, of those that have added to its dq.
    """

    fold: Launch
    rounding: Launch
    shares: Shares
    total: tuple[int, ...]
    turns: int

    def __call__(self, given: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> None:
        """Fill dq, dk and dv."""
        dq, dk, dv = grads
        total = torch.empty(self.total, device=dq.device, dtype=torch.float32)
        turns = torch.zeros(self.turns, device=dq.device, dtype=torch.int32)
        self.shares.fill(lambda x: self.fold(*given, total, *x, turns), (dk, dv))
        self.rounding(total, dq)


def _narrow(
    q: Like,
    k: Like,
    v: Like,
    dq: Like,
    diagonal: int | None,
    scale: float,
    deterministic: bool,  # noqa: FBT001
    config: BackwardConfig,
) -> _Narrow:
    """Choose the programs, and prepare the launches."""
    batch, heads, seq_q, head_dim = q.shape
    kv_heads, seq_kv = k.shape[1:3]
    causal = diagonal is not None
    rows, wide = block_q(head_dim), sum(columns(head_dim))
    query_tiles, blocks = triton.cdiv(seq_q, rows), triton.cdiv(seq_kv, BLOCK_KV.value)
    tiles = blocks * batch * kv_heads
    shares = share(q, k, v, tiles, causal=causal)
    owners, tiles = kv_heads * shares.count, tiles * shares.count
    query_blocks = query_tiles * (rows // QUERIES.value)
    programs = min(launch.multiprocessors(q.device), tiles) if config.persistent else tiles
    at_once = programs if config.persistent and not causal else 1
    slabs = 1
    if deterministic and causal:
        slabs = slabs_for(batch * owners, blocks, q.device, head_dim=head_dim)
    queries, keys, numbers = Tiles(rows), Tiles(KEYS.value), Numbers(rows)
    lines, grads = Lines(box_lines(head_dim)), shares.operand(keys)
    fold = Launch(
        flashattn_hopper_bwd,
        programs,
        [queries, keys, keys, queries, numbers, numbers, lines, grads, grads, None],
        (
            tiles,
            blocks,
            owners,
            *shares.numbers,
            config.band,
            at_once,
            config.apart,
            blocks if deterministic else 1,
            slabs,
            heads // owners,
            seq_q,
            seq_kv,
            diagonal or 0,
            scale,
            scale * LOG2E.value,
        ),
        constants(config, head_dim, causal=causal)
        # Programs wait for those before them: these run, or they are started in their order.
        | {"num_warps": WARPS, "launch_cooperative_grid": config.persistent},
    )
    rounding = Launch(
        flashattn_hopper_bwd_dq,
        batch * heads * query_blocks,
        [None, None],
        (dq.strides[:3], query_blocks, heads, slabs, seq_q, diagonal or 0, scale),
        rounding_constants(head_dim, causal=causal) | {"num_warps": WARPS},
    )
    workspace = slabs * batch, heads, query_blocks * wide, LINE.value
    return _Narrow(fold, rounding, shares, workspace, slabs * batch * heads * query_tiles)
