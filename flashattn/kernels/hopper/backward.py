"""flashattn_hopper_bwd: dk, dv and dq in one pass over the scores.

A CTA owns 128 keys of a head, 64 for each of two consumer warpgroups, which accumulate dk and dv in
registers while a producer warp loads tiles of queries and dO. S and dP are computed transposed,
[keys, queries], so P and dS are in registers in the layout that the products for dv and dk need.
For dq the warpgroups exchange dS through shared memory; ``backward_dq`` has the product for dq, the
warps that add it to the accumulator, and their order.

The order of products is FlashAttention-4's. The exponentials run under dP's product, the exchange
under dv's, and dq is written to shared memory under dk's.

Where many query heads share few keys, a CTA takes only some of the heads: the GQA split.

Sources: Shah et al., 2024, "FlashAttention-3", for the roles; FlashAttention-4's source for the
order of products; Triton's Gluon.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashattn.kernels.constants import LOG2E
from flashattn.kernels.hopper.backward_dq import (
    DQ_EMPTY,
    LINE,
    dq_semaphore_wait,
    dq_store,
    mma_dq,
    store_sdq,
)
from flashattn.kernels.hopper.backward_storage import KEYS, new_shared_storage
from flashattn.kernels.hopper.backward_tile import BLOCK_KV, visited_tiles
from flashattn.kernels.hopper.bias import new_bias, transposed
from flashattn.kernels.hopper.compat import store_tile, thread_barrier
from flashattn.kernels.hopper.config import SIZES
from flashattn.kernels.hopper.gqa import new_gqa_splits
from flashattn.kernels.hopper.mask import Mask, clear_empty, has_empty
from flashattn.kernels.hopper.mma import (
    acc_wait,
    mma_pv,
    mma_qk,
    mma_wait,
    products,
    store_acc,
    zero_acc,
)
from flashattn.kernels.hopper.named import (
    WARPGROUP_AND_WARP,
    WARPGROUPS,
    WARPGROUPS_AND_WARP,
    barrier_arrive,
    barrier_wait,
)
from flashattn.kernels.hopper.pipeline import new_scalar_pipeline
from flashattn.kernels.hopper.registers import acc_layout, opaque, operand_layout
from flashattn.kernels.hopper.scheduler import ASCENDING, Shape, TileScheduler, shift_schedule
from flashattn.kernels.hopper.score import Score
from flashattn.kernels.hopper.semaphore import DqSemaphore

# Named barriers, after those of ``backward_dq``. There is one EMPTY per stage, at most three.
CONSUMERS, EMPTY = gl.constexpr(12), gl.constexpr(13)


@gluon.jit
def consumer_barrier():
    """Wait for the other consumer warpgroup."""
    barrier_wait(CONSUMERS, WARPGROUPS)


@gluon.jit
def load_keys(kv_n, k, v, keys, values, batch, kv_head, start_kv):
    """Load the keys and values of a tile."""
    keys.load(kv_n, k, batch, kv_head, start_kv)
    values.load(kv_n, v, batch, kv_head, start_kv)


@gluon.jit
def producer(inputs, smem, scheduler, splits, wave, shape, t):
    """Load the first queries and dO of a tile, then its keys and values, then the other queries."""
    q, k, v, grad_o, lse, minus_delta = inputs
    keys, values, queries, grads = smem.keys, smem.values, smem.queries, smem.grads
    n = 0
    kv_n = 0
    for tile in range(gl.program_id(0), scheduler.tiles, gl.num_programs(0)):
        block, batch, split_head = scheduler.tile_coord(tile)
        mask = shape.mask_of(batch)
        schedule = shift_schedule(scheduler, tile, wave, mask.masked)
        start_kv, kv_head = block * BLOCK_KV, splits.kv_head(split_head)
        first, _, _, end = visited_tiles(block, mask, t)
        begin = split_head * shape.group
        if mask.two_sided and first == end:
            load_keys(kv_n, k, v, keys, values, batch, kv_head, start_kv)
            kv_n += 1
        for head in range(begin, begin + shape.group):
            row = batch * (scheduler.heads * shape.group) + head
            for visit in range(end - first):
                start_q = schedule.query_tile(visit, end) * t.block_q
                barrier_wait(EMPTY + n % queries.stages, WARPGROUPS_AND_WARP)
                queries.producer_commit(n, q, batch, head, start_q, lse, row)
                grads.producer_commit(n, grad_o, batch, head, start_q, minus_delta, row)
                n += 1
                if visit == 0 and head == begin:
                    load_keys(kv_n, k, v, keys, values, batch, kv_head, start_kv)
                    kv_n += 1
    for stage in gl.static_range(queries.stages):  # wait as often as consumers arrive
        barrier_wait(EMPTY + stage, WARPGROUPS_AND_WARP)


@gluon.jit
def mma_minus(a, b, ones, terms, t, start=None):
    """Start a product as ``mma_qk`` does, and add the terms [rows, TERMS] of b's rows to it."""
    acc = mma_qk(a, b, t.d_lo, t.d_hi, start)
    return warpgroup_mma(ones, terms.permute((1, 0)), acc, is_async=True)


@gluon.jit
def mainloop_step(
    WARPGROUP: gl.constexpr,
    n,
    state,
    smem,
    where,
    mask,
    bounds,
    score,
    dbias,
    t,
    MASKED: gl.constexpr,
):
    """Compute the n-th query tile; ``where`` is (batch, head, first query, first key).

    The exchange of dS runs under dV's product. dQ is written out under dK's product, which reads
    shared memory at half the rate of S and dP.
    """
    S: gl.constexpr = acc_layout(t.block_q)
    P: gl.constexpr = operand_layout(t.d_lo)
    queries, grads = smem.queries, smem.grads
    dk, dv = state
    batch, head, start_q, start_kv = where
    at = opaque(0)  # otherwise addresses, equal in all steps, would fill registers
    k, v = smem.keys.term(at), smem.values.term(at)
    score = score.of_rows(start_q, mask.seq_q, t.block_q, KEYS)
    acc = score.initial_acc(start_kv, t.block_q, True)
    bias = score.load_bias(start_kv, mask.seq_kv, KEYS, False)
    own_k = k.slice(WARPGROUP * KEYS, KEYS, dim=0)
    own_v = v.slice(WARPGROUP * KEYS, KEYS, dim=0)
    q, lse = queries.consumer_wait(n), queries.stats(n)
    if score.cap is None:
        s = mma_minus(own_k, q, smem.ones, lse, t, acc)
    else:
        s = mma_qk(own_k, q, t.d_lo, t.d_hi)
    do, minus_delta = grads.consumer_wait(n), grads.stats(n)
    dp = mma_minus(own_v, do, smem.ones, minus_delta, t)
    s = warpgroup_mma_wait(2 if t.d_hi == 0 else 3, deps=[s])
    s = score.capped(s)
    x = s * score.log2
    if score.cap is not None:
        x -= lse.load(gl.SliceLayout(0, S))[None, :]
    if bias is not None:
        own_ds = smem.sdS.index(n & 1).slice(WARPGROUP * KEYS, KEYS, dim=1)
        x += transposed(bias, own_ds) * LOG2E
    p = gl.exp2(score.sloped(score.added_to_capped(x, start_kv, True), start_q, start_kv, True))
    if MASKED:
        p = mask.apply_transposed(p, start_q, start_kv, bounds, False)
    p_operand = gl.convert_layout(p.to(q.dtype), P, assert_trivial=True)
    p = score.with_slope(p, s)
    ds = (p * warpgroup_mma_wait(0, deps=[dp])).to(q.dtype)
    n = opaque(n)  # stages are recomputed, for the same reason
    # The other warpgroup has read the old dS: it did so before it arrived at the last barrier.
    exchanged = smem.sdS.index(n & 1)
    exchanged.slice(WARPGROUP * KEYS, KEYS, dim=1).permute((1, 0)).store(ds)
    dv = mma_pv(p_operand, do, dv, t.d_lo, t.d_hi)
    fence_async_shared()
    if dbias is not None and WARPGROUP == 0:
        tma.store_wait(0)  # the last dbias tile has been read, so the next dS may overwrite it
    consumer_barrier()
    if dbias is not None and WARPGROUP == 0:
        store_tile(dbias, [batch, head, start_q, start_kv], exchanged.reshape(dbias.block_shape))
    dq = mma_dq(WARPGROUP, exchanged, k, t)
    thread_barrier()  # the compiler needs one before the next dS; here the warps are in step
    dk = mma_pv(gl.convert_layout(ds, P, assert_trivial=True), q, dk, t.d_lo, t.d_hi)
    store_sdq(WARPGROUP, mma_wait(dq, products(t.d_hi)), smem.sdQ, n)
    dk, dv = acc_wait(dk, 0, t.d_hi), acc_wait(dv, 0, t.d_hi)
    barrier_arrive(EMPTY + n % queries.stages, WARPGROUPS_AND_WARP)
    return dk, dv


@gluon.jit
def clean_keys(WARPGROUP: gl.constexpr, k, v, start_kv, mask):
    """Under bounds of rows, zero this warpgroup's unseen keys and values, which may be NaN.

    Only dq's product reads the other warpgroup's keys, after a barrier of its own.
    """
    if mask.rows:  # noqa: SIM102 - when compiled; the next, when run
        if has_empty(mask.queries, mask.seq_kv, start_kv, KEYS):
            own_k = k.slice(WARPGROUP * KEYS, KEYS, dim=0)
            clear_empty(own_k, mask.queries, mask.seq_kv, start_kv)
            own_v = v.slice(WARPGROUP * KEYS, KEYS, dim=0)
            clear_empty(own_v, mask.queries, mask.seq_kv, start_kv)


@gluon.jit
def clean_queries(WARPGROUP: gl.constexpr, queries, grads, n, start_q, mask, t):
    """Likewise zero this warpgroup's half of the n-th queries and dO, all of which both read."""
    if mask.rows:  # noqa: SIM102 - when compiled; the next, when run
        if has_empty(mask.keys, mask.seq_q, start_q, t.block_q):
            HALF: gl.constexpr = t.block_q // 2
            start_q += WARPGROUP * HALF
            q, do = queries.consumer_wait(n), grads.consumer_wait(n)
            own_q = q.slice(WARPGROUP * HALF, HALF, dim=0)
            clear_empty(own_q, mask.keys, mask.seq_q, start_q)
            own_do = do.slice(WARPGROUP * HALF, HALF, dim=0)
            clear_empty(own_do, mask.keys, mask.seq_q, start_q)
            consumer_barrier()


@gluon.jit
def store_gradients(
    WARPGROUP: gl.constexpr, dk, dv, state, smem, kv_n, of, splits, scheduler, mask, scale, t
):
    """Store dk and dv, or partial sums; ``of`` is (batch, head, this warpgroup's first key)."""
    dk_acc, dv_acc = state
    batch, head, start_kv = of
    if splits.count is None:
        consumer_barrier()  # both have read all keys, so gradients may overwrite them
        k, v = smem.keys.tile(kv_n), smem.values.tile(kv_n)
        store_acc(dk_acc, scale, k.slice(WARPGROUP * KEYS, KEYS, dim=0), t.d_lo, t.d_hi)
        store_acc(dv_acc, 1.0, v.slice(WARPGROUP * KEYS, KEYS, dim=0), t.d_lo, t.d_hi)
        fence_async_shared()
        consumer_barrier()  # both have stored their half
        start_kv -= WARPGROUP * KEYS
        if WARPGROUP == 0:
            store_tile(dk, [batch, head, start_kv, 0], smem.keys.tiles.index(0))
        else:
            store_tile(dv, [batch, head, start_kv, 0], smem.values.tiles.index(0))
        tma.store_wait(0)
    else:
        at = splits.partial(batch, head, scheduler)
        splits.store(dk, dk_acc, scale, at, start_kv, mask.seq_kv, t.d_lo, t.d_hi)
        splits.store(dv, dv_acc, 1.0, at, start_kv, mask.seq_kv, t.d_lo, t.d_hi)


@gluon.jit
def first_query(i, end, schedule, score, t):
    """Return the first query of the tile that a consumer visits at index i of its loop.

    Without a mask, only ALiBi and a bias need it, and the shift schedule gives the tile.
    """
    if score.slope is not None or score.bias is not None:
        i = schedule.query_tile(end - 1 - i, end)
    return i * t.block_q


@gluon.jit
def consumer(
    WARPGROUP: gl.constexpr, dk, dv, dbias, smem, scheduler, splits, wave, shape, scale, score, t
):
    """Compute dk and dv of this warpgroup's keys, and its parts of dq."""
    keys, values, queries, grads = smem.keys, smem.values, smem.queries, smem.grads
    for stage in gl.static_range(queries.stages):
        barrier_arrive(EMPTY + stage, WARPGROUPS_AND_WARP)
    n = 0
    kv_n = 0
    for tile in range(gl.program_id(0), scheduler.tiles, gl.num_programs(0)):
        block, batch, split_head = scheduler.tile_coord(tile)
        mask = shape.mask_of(batch)
        schedule = shift_schedule(scheduler, tile, wave, mask.masked)
        first, full_begin, full_end, end = visited_tiles(block, mask, t)
        start_kv = block * BLOCK_KV + WARPGROUP * KEYS
        bounds = mask.query_bounds(start_kv, KEYS, acc_layout(t.block_q))
        state = zero_acc(t.d_lo, t.d_hi), zero_acc(t.d_lo, t.d_hi)
        keys.consumer_wait(kv_n)
        values.consumer_wait(kv_n)
        clean_keys(WARPGROUP, keys.tile(kv_n), values.tile(kv_n), start_kv, mask)
        if not mask.two_sided:  # the last tile is always masked
            full_end = end - 1
        full_begin = gl.minimum(full_begin, full_end)
        for half in range(2 * shape.group):  # first half: masked last tiles, then whole tiles
            second = half % 2 > 0  # second half: the first tiles, masked
            head = split_head * shape.group + half // 2
            own = score.of_head(batch, head)
            start = gl.where(second, full_begin, end)
            stop = gl.where(second, first, full_end)
            for i in range(start - 1, stop - 1, -1):
                clean_queries(WARPGROUP, queries, grads, n, i * t.block_q, mask, t)
                where = batch, head, first_query(i, end, schedule, own, t), start_kv
                state = mainloop_step(
                    WARPGROUP, n, state, smem, where, mask, bounds, own, dbias, t, True
                )
                n += 1
            for i in range(gl.where(second, full_begin, full_end) - 1, full_begin - 1, -1):
                where = batch, head, first_query(i, end, schedule, own, t), start_kv
                state = mainloop_step(
                    WARPGROUP, n, state, smem, where, mask, bounds, own, dbias, t, False
                )
                n += 1
        of = batch, split_head, start_kv
        store_gradients(WARPGROUP, dk, dv, state, smem, kv_n, of, splits, scheduler, mask, scale, t)
        keys.consumer_release(kv_n)
        values.consumer_release(kv_n)
        kv_n += 1
    if dbias is not None and WARPGROUP == 0:
        tma.store_wait(0)  # dbias must be read before the CTA frees its shared memory
    barrier_wait(DQ_EMPTY + WARPGROUP, WARPGROUP_AND_WARP)  # wait as often as dq_store arrives


@gluon.jit(do_not_specialize=SIZES)
def flashattn_hopper_bwd(
    q,
    k,
    v,
    grad_o,
    lse,
    minus_delta,
    dq,
    dk,
    dv,
    dbias,
    dq_semaphore,
    key_bounds,
    query_bounds,
    slopes,
    bias,
    tiles,
    blocks,
    split_heads,
    gqa_splits,
    head_dim,
    strides,
    section_heads,
    wave_size,
    stagger,
    ordered,
    num_accums,
    group,
    seq_q,
    seq_kv,
    left,
    right,
    keys_stride,
    queries_stride,
    slopes_stride,
    query_offset,
    bias_strides,
    scale,
    scale_log2,
    cap,
    t: gl.constexpr,
):
    """Compute dk and dv, and add dq / scale to ``num_accums`` accumulators.

    The key tiles of a head take the accumulators in rotation. The first ``ordered`` of an
    accumulator add in order, and the others after these. lse is -lse / scale in terms, or lse_log2
    if scores are capped. All tensors but dq_semaphore, bounds, slopes and bias are descriptors; if
    heads are split, dk and dv are partial sums in fp32, [gqa_splits, batches, ...]. Bounds that are
    not None are the whole mask; their strides, and that of slopes, are between batches.
    """
    gl.static_assert(t.lines > LINE)
    gl.static_assert(t.lines <= 2 * LINE)
    mask = Mask(seq_q, seq_kv, left, right, key_bounds, query_bounds)
    shape = Shape(group, mask, keys_stride, queries_stride)
    score = Score(
        *(scale_log2, cap, q.dtype == gl.float16, slopes, slopes_stride, query_offset),
        bias=new_bias(bias, bias_strides, t.vector),
    )
    scheduler = TileScheduler(tiles, blocks, split_heads, section_heads, ASCENDING)
    splits = new_gqa_splits(gqa_splits, head_dim, strides)
    semaphore = DqSemaphore(dq_semaphore, num_accums, ordered)
    inputs = q, k, v, grad_o, lse, minus_delta
    smem = new_shared_storage(inputs, dq, t.stages)
    wave = wave_size, stagger
    arrivals = new_scalar_pipeline(1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (consumer, (0, dk, dv, dbias, smem, scheduler, splits, wave, shape, scale, score, t)),
            (consumer, (1, dk, dv, dbias, smem, scheduler, splits, wave, shape, scale, score, t)),
            (producer, (inputs, smem, scheduler, splits, wave, shape, t)),
            (dq_store, (0, dq, smem.sdQ, semaphore, arrivals, scheduler, wave, shape, t)),
            (dq_store, (1, dq, smem.sdQ, semaphore, arrivals, scheduler, wave, shape, t)),
            (dq_semaphore_wait, (semaphore, arrivals, scheduler, wave, shape, t)),
        ],
        [4, 1, 1, 1, 1],
        [240, 24, 24, 24, 24],
    )
