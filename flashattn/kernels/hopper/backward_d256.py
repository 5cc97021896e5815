"""flashattn_hopper_bwd_d256_dkdv: dk and dv of D = 129 to 256; ``backward_d256_dq`` has dq.

Two passes, seven products of which one pass would need five: at 256 numbers a pass that adds dq to
memory would own 64 keys at most, as dk and dv of 128 fill all registers there are, and so add as
many bytes to the L2 cache, 64 KiB for 64 queries, as it loads. Each output element is written by
one program, in one order, so gradients are the same bits in each run.

A program owns 64 keys; 64 x 256 sums in fp32 are half of what a warpgroup has in registers. So one
warpgroup computes P and sums dv, and the other takes P from it, computes dS and sums dk: P and dS
stay in the registers that computed them, and no product is done twice. While the exponentials of
one run, the tensor cores have two products of the other. The scores are transposed,
[keys, queries]. P is handed over in fp16, times 2^14, which keeps 11 bits of all that counts.

In clocks of a multiprocessor, for 64 x 64 scores: a product needs the tensor cores for 512. Shared
memory gives 128 bytes a clock: a product of two operands from there takes 512, too, one whose left
operand is in registers 256; a tile that comes takes 256. This kernel so needs 2048 for its
products and about 2200 for shared memory, and that of dq 1536 and 1536. At three quarters of that,
what the forward reaches, both take 5000 clocks, 10.5 MFLOP of the five products: about 460 TFLOP/s.
One pass would need 2560 and 3650, and 64 KiB of additions in memory. Measured on an H200, N = 4096
without a mask: 460 and 495 in two runs; each alone makes 626 and 669 of its own products.

Sources: Shah et al., 2024, "FlashAttention-3", for the roles; Triton's Gluon.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
)

from flashattn.kernels.hopper.compat import store_tile
from flashattn.kernels.hopper.config import SIZES
from flashattn.kernels.hopper.gqa import new_gqa_splits
from flashattn.kernels.hopper.mask import Mask, ordered_runs
from flashattn.kernels.hopper.mma import (
    acc_wait,
    mma_packed,
    mma_qk,
    mma_wait,
    products,
    store_acc,
    zero_acc,
)
from flashattn.kernels.hopper.pipeline import new_pipeline, new_shared_p
from flashattn.kernels.hopper.registers import acc_layout, pack
from flashattn.kernels.hopper.scheduler import ASCENDING, LINEAR, Shape, TileScheduler
from flashattn.kernels.hopper.score import Score

BLOCK = gl.constexpr(64)  # keys of a tile; queries of a tile, or of a warpgroup
LIFT = gl.constexpr(14.0)  # P is stored times 2^14: small ones are normal numbers in fp16, too
LOWER = gl.constexpr(2.0**-14)


@gluon.jit
def visited_query_tiles(block, mask):
    """Return (first, full_begin, full_end, end) of query tiles; there is at least one."""
    first, full_begin, full_end, end = mask.query_tiles(block * BLOCK, BLOCK, BLOCK)
    if mask.two_sided:
        end = gl.maximum(end, first + 1)
        first, full_begin, full_end, end = ordered_runs(first, full_begin, full_end, end)
    else:
        if mask.right is not None:
            first = gl.minimum(first, end - 1)
        full_begin = gl.minimum(gl.maximum(full_begin, first), end)
    return first, full_begin, full_end, end


@gluon.jit
def producer_dkdv(inputs, pipeline, own_pipeline, scheduler, splits, shape):
    """Load k and the queries, or v and dO, the first tile of these first.

    Each pair has a warp of its own: a tile of queries is in use for longer than one of dO, and a
    warp that waited for a stage of the one would leave a stage of the other empty.
    """
    x, row_stats, own, x_high, own_high = inputs
    n = 0
    block, batch, split_head = scheduler.tile_coord(gl.program_id(0))
    first, _, _, end = visited_query_tiles(block, shape.mask_of(batch))
    begin = split_head * shape.group
    for head in range(begin, begin + shape.group):
        row = batch * (scheduler.heads * shape.group) + head
        for i in range(first, end):
            pipeline.load(n, x, batch, head, i * BLOCK, row_stats, row, x_high)
            n += 1
            if i == first and head == begin:
                kv_head = splits.kv_head(split_head)
                own_pipeline.load(0, own, batch, kv_head, block * BLOCK, high=own_high)


@gluon.jit
def compute_p(n, s, lse_log2, sP, start_q, start_kv, masked, score, DTYPE: gl.constexpr):
    """Return 2^14 P of the n-th tile of queries, packed, and share it; masked may be None."""
    rows = lse_log2.load(gl.SliceLayout(0, s.type.layout)) - LIFT
    s = score.capped(s)
    x = s * score.log2 - rows[None, :]
    p = gl.exp2(score.sloped(x, start_q, start_kv, True))
    if masked is not None:
        mask, bounds, _ = masked
        p = mask.apply_transposed(p, start_q, start_kv, bounds, True)
    # The n-th queries lie where the stages before them did, which dk released after it read P.
    sP.store(n, score.with_slope(p, s))
    return pack(p, DTYPE)


@gluon.jit
def dv_step(n, state, k, queries, grads, sP, start_q, start_kv, masked, score, t):
    """Add the tile of queries before the n-th to dv, and compute P of the n-th."""
    p, dv = state
    if masked is not None:
        mask, _, live = masked
        queries.keep_rows(n, start_q, mask, live)
        grads.keep_rows(n, start_q, mask, live)
    do = grads.consumer_wait(n - 1)
    dv = mma_packed(p, do, dv, t.v_lo, t.v_hi)
    q, lse_log2 = queries.consumer_wait(n), queries.stats(n)
    s = mma_qk(k, q, t.d_lo, t.d_hi)
    dv = acc_wait(dv, products(t.d_hi), t.v_hi)
    grads.consumer_release(n - 1)
    s = mma_wait(s, 0)
    p = compute_p(n, s, lse_log2, sP, start_q, start_kv, masked, score, do.dtype)
    return p, dv


@gluon.jit
def store_grad(
    descriptors,
    acc,
    factor,
    pipeline,
    at,
    coord,
    scheduler,
    splits,
    seq_kv,
    LO: gl.constexpr,
    HI: gl.constexpr,
):
    """Store dk or dv of this CTA's keys, through a tile of shared memory that nobody reads again.

    It is the one at a place of a pipeline, of LO + HI columns or more.
    """
    x, x_high = descriptors
    block, batch, split_head = coord
    start_kv = block * BLOCK
    if splits.count is None:
        store_acc(acc, factor, pipeline.tile(at), LO, HI)
        fence_async_shared()
        store_tile(x, [batch, split_head, start_kv, 0], pipeline.tiles.index(at))
        if x_high is not None:
            store_tile(x_high, [batch, split_head, start_kv, LO], pipeline.high.index(at))
        tma.store_wait(0)
    else:
        partial = splits.partial(batch, split_head, scheduler)
        splits.store(x, acc, factor, partial, start_kv, seq_kv, LO, HI)


@gluon.jit
def consumer_dv(dv, keys, queries, grads, sP, scheduler, splits, shape, score, t):
    """Compute P, and dv; the keys are this warpgroup's own."""
    n = 0
    block, batch, split_head = scheduler.tile_coord(gl.program_id(0))
    start_kv = block * BLOCK
    mask = shape.mask_of(batch)
    RUNS: gl.constexpr = 2 if mask.two_sided else 1
    first, full_begin, full_end, end = visited_query_tiles(block, mask)
    live = 0, mask.live_queries()
    masked = mask, mask.query_bounds(start_kv, BLOCK, acc_layout(BLOCK)), live
    own = score.of_head(batch, split_head * shape.group)
    keys.keep_rows(0, start_kv, mask, mask.seen_keys())
    queries.keep_rows(n, first * BLOCK, mask, live)
    grads.keep_rows(n, first * BLOCK, mask, live)
    k = keys.consumer_wait(0)
    q, lse_log2 = queries.consumer_wait(n), queries.stats(n)
    s = mma_wait(mma_qk(k, q, t.d_lo, t.d_hi), 0)
    first_masked = masked if mask.masked else None
    p = compute_p(n, s, lse_log2, sP, first * BLOCK, start_kv, first_masked, own, k.dtype)
    n += 1
    state = p, zero_acc(t.v_lo, t.v_hi)
    for run in range(RUNS * shape.group):  # of a head: masked tiles and those without a mask
        own = score.of_head(batch, split_head * shape.group + run // RUNS)
        begin, masked_end = first + 1 - gl.minimum(run // RUNS, 1), full_begin
        if mask.two_sided:  # ... and then the others, which left masks
            begin = gl.where(run % 2 > 0, gl.maximum(begin, full_end), begin)
            masked_end = gl.where(run % 2 > 0, end, full_begin)
        if mask.masked:
            for i in range(begin, masked_end):
                start_q = i * BLOCK
                state = dv_step(n, state, k, queries, grads, sP, start_q, start_kv, masked, own, t)
                n += 1
        for i in range(gl.maximum(begin, masked_end), full_end):
            start_q = i * BLOCK
            state = dv_step(n, state, k, queries, grads, sP, start_q, start_kv, None, own, t)
            n += 1
    p, acc = state
    acc = mma_packed(p, grads.consumer_wait(n - 1), acc, t.v_lo, t.v_hi)
    acc = acc_wait(acc, 0, t.v_hi)
    coord = block, batch, split_head
    store_grad(dv, acc, LOWER, keys, 0, coord, scheduler, splits, mask.seq_kv, t.v_lo, t.v_hi)


@gluon.jit
def compute_ds(dp, delta, grads, sP, n, DTYPE: gl.constexpr):
    """Take P of the n-th tile of queries, and return dS, packed."""
    # Scaled differences suit fp16, too: 2^14 P (dP - delta) could be more than it can hold.
    layout: gl.constexpr = dp.type.layout
    rows = delta.load(gl.SliceLayout(0, layout)) * LOWER
    p = sP.load(n, layout)
    grads.consumer_release(n)
    return pack(p * (dp * LOWER - rows[None, :]), DTYPE)


@gluon.jit
def dk_step(n, state, v, queries, grads, sP, t):
    """Add the tile of queries before the n-th to dk, and compute dS of the n-th."""
    ds, dk = state
    q = queries.consumer_wait(n - 1)
    dk = mma_packed(ds, q, dk, t.d_lo, t.d_hi)
    do, delta = grads.consumer_wait(n), grads.stats(n)
    dp = mma_qk(v, do, t.v_lo, t.v_hi)
    dk = acc_wait(dk, products(t.v_hi), t.d_hi)
    queries.consumer_release(n - 1)
    dp = mma_wait(dp, 0)
    return compute_ds(dp, delta, grads, sP, n, q.dtype), dk


@gluon.jit
def consumer_dk(dk, values, queries, grads, sP, scheduler, splits, shape, scale, t):
    """Compute dS, and dk; the values are this warpgroup's own."""
    n = 0
    block, batch, split_head = scheduler.tile_coord(gl.program_id(0))
    mask = shape.mask_of(batch)
    first, _, _, end = visited_query_tiles(block, mask)
    live = 0, mask.live_queries()
    values.keep_rows(0, block * BLOCK, mask, mask.seen_keys())
    grads.keep_rows(n, first * BLOCK, mask, live)
    v = values.consumer_wait(0)
    do, delta = grads.consumer_wait(n), grads.stats(n)
    dp = mma_wait(mma_qk(v, do, t.v_lo, t.v_hi), 0)
    ds = compute_ds(dp, delta, grads, sP, n, v.dtype)
    n += 1
    state = ds, zero_acc(t.d_lo, t.d_hi)
    for _ in range(1, shape.group * (end - first)):
        grads.keep_rows(n, (first + n % (end - first)) * BLOCK, mask, live)
        state = dk_step(n, state, v, queries, grads, sP, t)
        n += 1
    ds, acc = state
    acc = mma_packed(ds, queries.consumer_wait(n - 1), acc, t.d_lo, t.d_hi)
    acc = acc_wait(acc, 0, t.d_hi)
    # dv has read the last queries: their P came from it. The tile of values may be too narrow.
    at, coord = (n - 1) % queries.stages, (block, batch, split_head)
    store_grad(dk, acc, scale, queries, at, coord, scheduler, splits, mask.seq_kv, t.d_lo, t.d_hi)


@gluon.jit(do_not_specialize=SIZES)
def flashattn_hopper_bwd_d256_dkdv(
    q,
    k,
    v,
    grad_o,
    lse_log2,
    delta,
    dk,
    dv,
    q_high,
    k_high,
    v_high,
    grad_o_high,
    dk_high,
    dv_high,
    key_bounds,
    query_bounds,
    slopes,
    tiles,
    blocks,
    split_heads,
    gqa_splits,
    head_dim,
    strides,
    section_heads,
    group,
    seq_q,
    seq_kv,
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
    """Compute dk and dv.

    All tensors but bounds and slopes are descriptors, and dk and dv are none where heads are split.
    Tiles are as in ``flashattn_hopper_fwd``, and bounds as in ``flashattn_hopper_bwd``.
    """
    mask = Mask(seq_q, seq_kv, left, right, key_bounds, query_bounds)
    shape = Shape(group, mask, keys_stride, queries_stride)
    score = Score(scale_log2, cap, q.dtype == gl.float16, slopes, slopes_stride, query_offset)
    ORDER: gl.constexpr = ASCENDING if mask.masked else LINEAR
    scheduler = TileScheduler(tiles, blocks, split_heads, section_heads, ORDER)
    splits = new_gqa_splits(gqa_splits, head_dim, strides)
    keys = new_pipeline(k, 1, 1, high=k_high)
    values = new_pipeline(v, 1, 1, high=v_high)
    # dk releases q after P was computed.
    queries = new_pipeline(q, t.stages, 1, row_stats=lse_log2, high=q_high)
    grads = new_pipeline(grad_o, t.stages, 2, row_stats=delta, high=grad_o_high)
    sP = new_shared_p(gl.float16, t.stages, BLOCK, BLOCK)
    dv_out, dk_out = (dv, dv_high), (dk, dk_high)
    q_in, grad_in = (q, lse_log2, k, q_high, k_high), (grad_o, delta, v, grad_o_high, v_high)
    fence_async_shared()
    gl.warp_specialize(
        [
            (consumer_dv, (dv_out, keys, queries, grads, sP, scheduler, splits, shape, score, t)),
            (consumer_dk, (dk_out, values, queries, grads, sP, scheduler, splits, shape, scale, t)),
            (producer_dkdv, (q_in, queries, keys, scheduler, splits, shape)),
            (producer_dkdv, (grad_in, grads, values, scheduler, splits, shape)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )
