"""flashattn_hopper_bwd_d256_dkdv: dk and dv of D = 129 to 256; ``backward_d256_dq`` has dq.

There are two passes with seven products, where one pass would need five. A pass that adds dq to
memory could own only 64 keys at D = 256, because dk and dv of 128 keys fill all registers. It would
add as many bytes to the L2 cache as it loads: 64 KiB for 64 queries. In two passes one CTA writes
each output element, in a fixed order, so gradients are bitwise reproducible.

A CTA owns 64 keys; 64 x 256 sums in fp32 fill half of a warpgroup's registers. So one warpgroup
computes P and accumulates dv, and the other takes P from it, computes dS and accumulates dk: P and
dS stay in the registers that computed them, and no product is computed twice. While one computes
exponentials, the tensor cores have two products of the other. The scores are transposed,
[keys, queries]. P is passed on in fp16, times 2^14, which keeps 11 bits of all that counts.

Clocks of an SM for 64 x 64 scores: a product takes 512 on the tensor cores. Shared memory delivers
128 bytes a clock: a product with both operands there also takes 512, one whose left operand is in
registers takes 256, and an incoming tile takes 256. So this kernel needs 2048 for products and
about 2200 for shared memory, and that of dq 1536 and 1536. At three quarters of that rate, which
the forward reaches, both take 5000 clocks for the 10.5 MFLOP of five products: about 460 TFLOP/s.
One pass would need 2560 and 3650, and 64 KiB of additions in memory. Measured on an H200, N = 4096
without a mask: 460 and 495 in two runs; alone, the kernels reach 626 and 669 on their own products.

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
from flashattn.kernels.hopper.pipeline import clear_tiles, new_pipeline, new_shared_p
from flashattn.kernels.hopper.registers import acc_layout, pack
from flashattn.kernels.hopper.scheduler import ASCENDING, LINEAR, Shape, TileScheduler
from flashattn.kernels.hopper.score import Score

BLOCK = gl.constexpr(64)  # keys of a tile; queries of a tile, or of a warpgroup
LIFT = gl.constexpr(14.0)  # P is stored times 2^14, so small ones are normal numbers in fp16, too
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
    """Load the first queries, then k, then the other queries; or the same for dO and v.

    Each pair has a warp of its own: a query tile is in use for longer than a dO tile, and a warp
    that waited for a stage of one would leave a stage of the other empty.
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
    """Return 2^14 P of the n-th query tile, packed, and store it in sP; masked may be None."""
    rows = lse_log2.load(gl.SliceLayout(0, s.type.layout)) - LIFT
    s = score.capped(s)
    x = s * score.log2 - rows[None, :]
    p = gl.exp2(score.sloped(x, start_q, start_kv, True))
    if masked is not None:
        mask, bounds = masked
        p = mask.apply_transposed(p, start_q, start_kv, bounds, True)
    # This stage of sP is free: dk read its old P before it released the stage of these queries.
    sP.store(n, score.with_slope(p, s))
    return pack(p, DTYPE)


@gluon.jit
def dv_step(n, state, k, queries, grads, sP, start_q, start_kv, masked, score, t):
    """Add the query tile before the n-th to dv, and compute P of the n-th."""
    p, dv = state
    if masked is not None:
        mask, _ = masked
        clear_tiles((queries, grads), n, start_q, mask.keys, mask.seq_q)
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

    The tile is stage ``at`` of a pipeline, and has LO + HI columns or more.
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
    """Compute P and dv; only this warpgroup reads the keys."""
    n = 0
    block, batch, split_head = scheduler.tile_coord(gl.program_id(0))
    start_kv = block * BLOCK
    mask = shape.mask_of(batch)
    RUNS: gl.constexpr = 2 if mask.two_sided else 1
    first, full_begin, full_end, end = visited_query_tiles(block, mask)
    masked = mask, mask.query_bounds(start_kv, BLOCK, acc_layout(BLOCK))
    own = score.of_head(batch, split_head * shape.group)
    clear_tiles((keys,), 0, start_kv, mask.queries, mask.seq_kv)
    clear_tiles((queries, grads), n, first * BLOCK, mask.keys, mask.seq_q)
    k = keys.consumer_wait(0)
    q, lse_log2 = queries.consumer_wait(n), queries.stats(n)
    s = mma_wait(mma_qk(k, q, t.d_lo, t.d_hi), 0)
    first_masked = masked if mask.masked else None
    p = compute_p(n, s, lse_log2, sP, first * BLOCK, start_kv, first_masked, own, k.dtype)
    n += 1
    state = p, zero_acc(t.v_lo, t.v_hi)
    for run in range(RUNS * shape.group):  # first run of a head: masked tiles, then whole ones
        own = score.of_head(batch, split_head * shape.group + run // RUNS)
        begin, masked_end = first + 1 - gl.minimum(run // RUNS, 1), full_begin
        if mask.two_sided:  # second run: tiles that the left bound cuts
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
    """Load P of the n-th query tile from sP, and return dS, packed."""
    # The differences are scaled by 2^-14: 2^14 P (dP - delta) could be too large for fp16.
    layout: gl.constexpr = dp.type.layout
    rows = delta.load(gl.SliceLayout(0, layout)) * LOWER
    p = sP.load(n, layout)
    grads.consumer_release(n)
    return pack(p * (dp * LOWER - rows[None, :]), DTYPE)


@gluon.jit
def dk_step(n, state, v, queries, grads, sP, t):
    """Add the query tile before the n-th to dk, and compute dS of the n-th."""
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
    """Compute dS and dk; only this warpgroup reads the values."""
    n = 0
    block, batch, split_head = scheduler.tile_coord(gl.program_id(0))
    mask = shape.mask_of(batch)
    first, full_begin, full_end, end = visited_query_tiles(block, mask)
    clear_tiles((values,), 0, block * BLOCK, mask.queries, mask.seq_kv)
    clear_tiles((grads,), n, first * BLOCK, mask.keys, mask.seq_q)
    v = values.consumer_wait(0)
    do, delta = grads.consumer_wait(n), grads.stats(n)
    dp = mma_wait(mma_qk(v, do, t.v_lo, t.v_hi), 0)
    ds = compute_ds(dp, delta, grads, sP, n, v.dtype)
    n += 1
    state = ds, zero_acc(t.d_lo, t.d_hi)
    for _ in range(1, shape.group * (end - first)):
        if mask.rows:
            i = first + n % (end - first)
            if (i < full_begin) | (i >= full_end):
                clear_tiles((grads,), n, i * BLOCK, mask.keys, mask.seq_q)
        state = dk_step(n, state, v, queries, grads, sP, t)
        n += 1
    ds, acc = state
    acc = mma_packed(ds, queries.consumer_wait(n - 1), acc, t.d_lo, t.d_hi)
    acc = acc_wait(acc, 0, t.d_hi)
    # dv has read the last queries: it computed their P. The tile of values may be too narrow.
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

    All tensors are descriptors but bounds, slopes and, if heads are split, dk and dv.
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
    # dk releases q after dv has computed P.
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
