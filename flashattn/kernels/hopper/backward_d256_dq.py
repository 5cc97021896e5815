"""flashattn_hopper_bwd_d256_dq: dq of D = 129 to 256, in a pass of its own (see ``backward_d256``).

A CTA owns 128 queries, 64 for each of two warpgroups, and visits keys as the forward does.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
)

from flashattn.kernels.hopper.backward_d256 import BLOCK
from flashattn.kernels.hopper.compat import store_tile
from flashattn.kernels.hopper.config import SIZES
from flashattn.kernels.hopper.mask import Mask, descending_run, ordered_runs
from flashattn.kernels.hopper.mma import (
    acc_wait,
    mma_packed,
    mma_qk,
    mma_wait,
    products,
    store_acc,
    zero_acc,
)
from flashattn.kernels.hopper.pipeline import clear_tiles, new_pipeline
from flashattn.kernels.hopper.registers import acc_layout, opaque, pack
from flashattn.kernels.hopper.scheduler import DESCENDING, LINEAR, Shape, TileScheduler
from flashattn.kernels.hopper.score import Score

PAIR = gl.constexpr(128)  # queries of both warpgroups


@gluon.jit
def visited_key_tiles(block, mask):
    """Return (first, full_begin, full_end, end) of key tiles; there is at least one."""
    first, full_begin, full_end, end = mask.key_tiles(block * PAIR, PAIR, BLOCK)
    end = gl.maximum(end, first + 1)
    if mask.two_sided:
        first, full_begin, full_end, end = ordered_runs(first, full_begin, full_end, end)
    return first, full_begin, full_end, end


@gluon.jit
def producer_dq(inputs, high, pipelines, scheduler, shape):
    """Load queries and dO, then keys and values from last to first."""
    q, k, v, grad_o = inputs
    queries, grads, keys, values = pipelines
    q_high, k_high, v_high, grad_o_high = high
    n = 0
    block, batch, head = scheduler.tile_coord(gl.program_id(0))
    kv_head = head // shape.group
    first, _, _, end = visited_key_tiles(block, shape.mask_of(batch))
    for w in gl.static_range(2):
        queries.load(w, q, batch, head, block * PAIR + w * BLOCK, high=q_high)
    keys.load(n, k, batch, kv_head, (end - 1) * BLOCK, high=k_high)
    for w in gl.static_range(2):
        grads.load(w, grad_o, batch, head, block * PAIR + w * BLOCK, high=grad_o_high)
    values.load(n, v, batch, kv_head, (end - 1) * BLOCK, high=v_high)
    n += 1
    for i in range(end - 2, first - 1, -1):
        keys.load(n, k, batch, kv_head, i * BLOCK, high=k_high)
        values.load(n, v, batch, kv_head, i * BLOCK, high=v_high)
        n += 1


@gluon.jit
def opaque_tile(pipeline, n):
    """Return the n-th tile, which stays in place, by an address that the compiler cannot hoist.

    Otherwise registers would hold the addresses of all 32 operands of a step's first two products.
    """
    return pipeline.tile(opaque(n))


@gluon.jit
def compute_p_ds(n, s, dp, values, stats, start_q, start_kv, masked, score, t):
    """Return dS of the n-th key tile, packed; the products for its S and dP are in flight.

    masked may be None.
    """
    lse_log2, delta = stats
    s = score.capped(mma_wait(s, products(t.v_hi)))
    seen, log2, _ = score.in_base_2(s, start_q, start_kv)
    if masked is not None:
        mask, bounds = masked
        seen = mask.apply(seen, start_q, start_kv, bounds, float("-inf"))
    p = score.with_slope(gl.exp2(seen * log2 - lse_log2[:, None]), s)
    dp = mma_wait(dp, 0)
    values.consumer_release(n)
    return pack(p * (dp - delta[:, None]), values.tiles.dtype)


@gluon.jit
def dq_step(
    WARPGROUP: gl.constexpr, n, state, pipelines, stats, start_q, start_kv, masked, score, t
):
    """Add the key tile before the n-th to dq, and compute dS of the n-th."""
    queries, grads, keys, values = pipelines
    ds, dq = state
    if masked is not None:
        mask, _ = masked
        clear_tiles((keys, values), n, start_kv, mask.queries, mask.seq_kv)
    k = keys.tile(n - 1)
    dq = mma_packed(ds, k, dq, t.d_lo, t.d_hi)
    q = opaque_tile(queries, WARPGROUP)
    s = mma_qk(q, keys.consumer_wait(n), t.d_lo, t.d_hi)
    do = opaque_tile(grads, WARPGROUP)
    dp = mma_qk(do, values.consumer_wait(n), t.v_lo, t.v_hi)
    dq = acc_wait(dq, products(t.d_hi) + products(t.v_hi), t.d_hi)
    keys.consumer_release(n - 1)
    ds = compute_p_ds(n, s, dp, values, stats, start_q, start_kv, masked, score, t)
    return ds, dq


@gluon.jit
def consumer_dq(
    WARPGROUP: gl.constexpr,
    descriptors,
    stats,
    pipelines,
    scheduler,
    shape,
    lse_rows,
    scale,
    score,
    t,
):
    """Compute dq of 64 queries of the tile."""
    dq, dq_high = descriptors
    lse_log2, delta = stats
    queries, grads, keys, values = pipelines
    n = 0
    block, batch, head = scheduler.tile_coord(gl.program_id(0))
    start_q = block * PAIR + WARPGROUP * BLOCK
    mask = shape.mask_of(batch)
    RUNS: gl.constexpr = 2 if mask.two_sided else 1
    first, full_begin, full_end, end = visited_key_tiles(block, mask)
    masked = mask, mask.key_bounds(start_q, BLOCK, acc_layout(BLOCK))
    own = score.of_head(batch, head)
    at = (batch * scheduler.heads + head).to(gl.int64) * lse_rows + start_q
    rows = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, acc_layout(BLOCK)))
    row_stats = gl.load(lse_log2 + at + rows), gl.load(delta + at + rows)
    start_kv = (end - 1) * BLOCK
    clear_tiles((queries, grads), WARPGROUP, start_q, mask.keys, mask.seq_q)
    clear_tiles((keys, values), n, start_kv, mask.queries, mask.seq_kv)
    queries.consumer_wait(WARPGROUP)
    q = opaque_tile(queries, WARPGROUP)
    s = mma_qk(q, keys.consumer_wait(n), t.d_lo, t.d_hi)
    grads.consumer_wait(WARPGROUP)
    do = opaque_tile(grads, WARPGROUP)
    dp = mma_qk(do, values.consumer_wait(n), t.v_lo, t.v_hi)
    ds = compute_p_ds(n, s, dp, values, row_stats, start_q, start_kv, masked, own, t)
    n += 1
    state = ds, zero_acc(t.d_lo, t.d_hi)
    full_end = gl.minimum(full_end, end - 1)
    for run in range(RUNS):  # masked, then whole tiles; second run: left bound
        start, stop, low = descending_run(run, first, full_begin, full_end, end - 1, mask.two_sided)
        if mask.masked:  # else only the last tile of keys may need a mask
            for i in range(start - 1, stop - 1, -1):
                start_kv = i * BLOCK
                state = dq_step(
                    WARPGROUP, n, state, pipelines, row_stats, start_q, start_kv, masked, own, t
                )
                n += 1
        for i in range(stop - 1, low - 1, -1):
            start_kv = i * BLOCK
            state = dq_step(
                WARPGROUP, n, state, pipelines, row_stats, start_q, start_kv, None, own, t
            )
            n += 1
    ds, acc = state
    acc = acc_wait(mma_packed(ds, keys.tile(n - 1), acc, t.d_lo, t.d_hi), 0, t.d_hi)
    store_acc(acc, scale, q, t.d_lo, t.d_hi)
    fence_async_shared()
    store_tile(dq, [batch, head, start_q, 0], queries.tiles.index(WARPGROUP))
    if dq_high is not None:
        store_tile(dq_high, [batch, head, start_q, t.d_lo], queries.high.index(WARPGROUP))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=[*SIZES, "lse_rows"])
def flashattn_hopper_bwd_d256_dq(
    q,
    k,
    v,
    grad_o,
    lse_log2,
    delta,
    dq,
    q_high,
    k_high,
    v_high,
    grad_o_high,
    dq_high,
    key_bounds,
    query_bounds,
    slopes,
    tiles,
    blocks,
    heads,
    section_heads,
    group,
    seq_q,
    seq_kv,
    lse_rows,
    left,
    right,
    keys_stride,
    queries_stride,
    slopes_stride,
    query_offset,
    scale,
    scale_log2,
    cap,
    t: gl.constexpr,
):
    """Compute dq; all tensors but lse_log2, delta, bounds and slopes are descriptors.

    Tiles are as in ``flashattn_hopper_fwd``, and bounds as in ``flashattn_hopper_bwd``.
    """
    mask = Mask(seq_q, seq_kv, left, right, key_bounds, query_bounds)
    shape = Shape(group, mask, keys_stride, queries_stride)
    score = Score(scale_log2, cap, q.dtype == gl.float16, slopes, slopes_stride, query_offset)
    ORDER: gl.constexpr = DESCENDING if mask.masked else LINEAR
    scheduler = TileScheduler(tiles, blocks, heads, section_heads, ORDER)
    queries = new_pipeline(q, 2, 1, high=q_high)
    grads = new_pipeline(grad_o, 2, 1, high=grad_o_high)
    keys = new_pipeline(k, t.stages, 2, high=k_high)
    values = new_pipeline(v, t.stages - 1, 2, high=v_high)
    inputs, high = (q, k, v, grad_o), (q_high, k_high, v_high, grad_o_high)
    dq_out, stats, pipelines = (dq, dq_high), (lse_log2, delta), (queries, grads, keys, values)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                consumer_dq,
                (0, dq_out, stats, pipelines, scheduler, shape, lse_rows, scale, score, t),
            ),
            (
                consumer_dq,
                (1, dq_out, stats, pipelines, scheduler, shape, lse_rows, scale, score, t),
            ),
            (producer_dq, (inputs, high, pipelines, scheduler, shape)),
        ],
        [4, 1],
        [240, 24],
    )
