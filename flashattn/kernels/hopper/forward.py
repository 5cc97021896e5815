"""flashattn_hopper_fwd: a producer warp loads, two or three consumer warpgroups compute.

Each consumer computes 64 queries. While the tensor cores multiply P of one key tile with V, the
other units compute the softmax of the next tile. Keys are visited from last to first: tiles that
the right bound cuts, then whole tiles in a loop without a mask, then tiles that the left bound
cuts; or all tiles in one loop. The producer loads the next queries meanwhile.

Sources: Shah et al., 2024, "FlashAttention-3", for the roles and the two overlaps;
FlashAttention-4's code for conditional rescaling; Triton's Gluon.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
)

from flashattn.kernels.constants import LN2
from flashattn.kernels.hopper.bias import as_scores, new_bias
from flashattn.kernels.hopper.compat import store_tile
from flashattn.kernels.hopper.config import SIZES
from flashattn.kernels.hopper.mask import Mask, descending_run, has_empty, ordered_runs
from flashattn.kernels.hopper.mma import (
    ROWS,
    acc_wait,
    mma_packed,
    mma_pv,
    mma_qk,
    mma_wait,
    products,
    rescale_acc,
    scale_acc,
    store_acc,
    zero_acc,
)
from flashattn.kernels.hopper.pipeline import (
    clear_tiles,
    new_pipeline,
    new_scalar_pipeline,
    new_shared_tiles,
)
from flashattn.kernels.hopper.registers import acc_layout, pack, unpack
from flashattn.kernels.hopper.scheduler import DESCENDING, LINEAR, Shape, TileScheduler
from flashattn.kernels.hopper.score import Score, with_sink

# Columns of values beyond which o is rescaled one step later (docs/tuning-log.md).
RESCALE_LATER_ABOVE_D = gl.constexpr(128)
# Up to this growth (base 2), a row maximum is kept and o is not rescaled: P is 256 at most.
RESCALE_THRESHOLD = gl.constexpr(8.0)


@gluon.jit
def visited_tiles(block, mask, t):
    """Return (first, full_begin, full_end, end) of key tiles; there is at least one."""
    first, full_begin, full_end, end = mask.key_tiles(block * t.block_q, t.block_q, t.block_kv)
    end = gl.maximum(end, first + 1)
    if mask.two_sided:
        first, full_begin, full_end, end = ordered_runs(first, full_begin, full_end, end)
    return first, full_begin, full_end, end


@gluon.jit
def producer(inputs, high, pipelines, next_tile, tile_counter, scheduler, shape, t):
    """Load the queries of each tile, then its keys and values from last to first.

    Consumers release a stage of keys and the values of the step before together, through ``keys``,
    because a release synchronizes the threads of a warpgroup. The next tile is drawn with the last
    values: a CTA with a long tile leaves the next one to CTAs that finish earlier.
    """
    q, k, v = inputs
    q_high, k_high, v_high = high
    queries, keys, values = pipelines
    n = 0
    tile_n = 0
    tile = gl.program_id(0)
    while tile < scheduler.tiles:
        block, batch, head = scheduler.tile_coord(tile)
        kv_head = head // shape.group
        first, _, _, end = visited_tiles(block, shape.mask_of(batch), t)
        for w in gl.static_range(t.groups):
            start_q = block * t.block_q + w * ROWS
            queries.load(tile_n * t.groups + w, q, batch, head, start_q, high=q_high)
        keys.producer_commit(n, k, batch, kv_head, (end - 1) * t.block_kv, high=k_high)
        for i in range(1, end - first):
            keys.producer_acquire(n + 1)
            start_kv = (end - i) * t.block_kv
            keys.producer_commit(n + 1, k, batch, kv_head, start_kv - t.block_kv, high=k_high)
            values.producer_commit(n, v, batch, kv_head, start_kv, high=v_high)
            n += 1
        if next_tile is not None:
            tile = gl.num_programs(0) + gl.atomic_add(tile_counter, 1)
        else:
            tile += gl.num_programs(0)
        keys.producer_acquire(n + 1)
        values.producer_commit(n, v, batch, kv_head, first * t.block_kv, high=v_high)
        n += 1
        if next_tile is not None:
            next_tile.write(tile_n, tile)
            last = gl.num_programs(0) + scheduler.tiles - 1  # a CTA draws once per tile
            gl.store(tile_counter, 0, mask=tile == last)
        tile_n += 1


@gluon.jit
def thread_row_sums(p):
    """Return [ROWS, 4]: the row sums of each thread's elements, without a shuffle."""
    return gl.sum(gl.sum(gl.reshape(p, [ROWS, p.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def softmax_first(s, log2, far, score, DTYPE: gl.constexpr):
    """Return P of the first tile of keys, the row maxima, and the row sums."""
    m = score.nearer(gl.max(s, 1) * log2, far)
    finite = gl.where(m == float("-inf"), 0.0, m)
    p = gl.exp2(s * log2 - score.farther(finite, far)[:, None])
    return pack(p, DTYPE), m, thread_row_sums(p)


@gluon.constexpr_function
def one_loop(mask, t):
    """Return whether one loop visits all key tiles, where several loops would be long code."""
    wide = t.v_lo + t.v_hi > RESCALE_LATER_ABOVE_D
    return bool(mask.masked) and (t.groups == 3 or bool(wide and mask.two_sided))


@gluon.constexpr_function
def conditional(mask, t):
    """Return whether o is rescaled only where it must be; other configs gain nothing by that."""
    return one_loop(mask, t) or t.v_lo + t.v_hi > RESCALE_LATER_ABOVE_D


@gluon.jit
def new_maxima(of_tile, m, mask, t):
    """Return the row maxima including those of a tile; if conditional, small growth is ignored."""
    if conditional(mask, t):
        m_new = gl.where(of_tile - m > RESCALE_THRESHOLD, of_tile, m)
    else:
        m_new = gl.maximum(m, of_tile)
    return m_new


@gluon.jit
def rescale(acc, alpha, mask, t, LATER: gl.constexpr):
    """Return o times alpha if it is rescaled here: with wide values, LATER in the next step."""
    if (t.v_lo + t.v_hi > RESCALE_LATER_ABOVE_D) == LATER:
        if conditional(mask, t):
            acc = rescale_acc(acc, alpha, t.v_hi)
        else:
            acc = scale_acc(acc, alpha, t.v_hi)
    return acc


@gluon.jit
def mainloop_step(
    n, state, q, kv, start_q, start_kv, mask, bounds, score, t, MASKED: gl.constexpr, whole
):
    """Add the n-th P V, and under it compute P of the next tile, unmasked if ``whole``."""
    keys, values = kv
    acc, alpha, p, m, l = state
    s = score.initial_acc(start_kv, t.block_kv, False)
    s = mma_qk(q, keys.consumer_wait(n + 1), t.d_lo, t.d_hi, s)
    bias = score.load_bias(start_kv, mask.seq_kv, t.block_kv, not MASKED)
    acc = rescale(acc, alpha, mask, t, LATER=True)
    p = unpack(p, q.dtype, t.v_lo)
    acc = mma_pv(p, values.consumer_wait(n), acc, t.v_lo, t.v_hi)
    unclean = False
    if MASKED and mask.rows:  # noqa: SIM102 - when compiled; the next, when run
        if not whole:
            unclean = has_empty(mask.queries, mask.seq_kv, start_kv, t.block_kv)
    if bias is not None:
        bias = as_scores(bias)
    s = score.capped(mma_wait(s, products(t.v_hi)))
    s, log2, far = score.in_base_2(s, start_q, start_kv, bias)
    if MASKED:  # noqa: SIM102 - when compiled; the next, when run
        if not whole:
            s = mask.apply(s, start_q, start_kv, bounds, float("-inf"))
    m_new = new_maxima(score.nearer(gl.max(s, 1) * log2, far), m, mask, t)
    finite = m_new
    if MASKED or score.bias is not None:
        finite = gl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = gl.exp2(m - finite)
    p_fp32 = gl.exp2(s * log2 - score.farther(finite, far)[:, None])
    sums = thread_row_sums(p_fp32)
    rows: gl.constexpr = gl.SliceLayout(1, sums.type.layout)
    l = l * gl.convert_layout(alpha, rows, assert_trivial=True)[:, None] + sums
    p = pack(p_fp32, q.dtype)
    acc = acc_wait(acc, 0, t.v_hi)
    keys.consumer_release(n + 1)
    if MASKED and mask.rows:  # noqa: SIM102 - when compiled; the next, when run
        if unclean:
            values.clear_empty(n + 1, mask.queries, mask.seq_kv, start_kv)
    return rescale(acc, alpha, mask, t, LATER=False), alpha, p, m_new, l


@gluon.jit
def mainloop(n, state, q, kv, start_q, tiles, mask, bounds, score, t):
    """Visit all key tiles but the last, whose P is known; return the state and n."""
    first, full_begin, full_end, end = tiles
    clear_tiles((kv[1],), n, end * t.block_kv, mask.queries, mask.seq_kv)
    if one_loop(mask, t):
        for i in range(end - 1, first - 1, -1):
            start_kv = i * t.block_kv
            whole = (i >= full_begin) & (i < full_end)
            state = mainloop_step(
                n, state, q, kv, start_q, start_kv, mask, bounds, score, t, True, whole
            )
            n += 1
    else:
        for run in range(2 if mask.two_sided else 1):  # the second: tiles that the left bound cuts
            start, stop, low = descending_run(run, first, full_begin, full_end, end, mask.two_sided)
            if mask.masked:
                for i in range(start - 1, stop - 1, -1):
                    start_kv = i * t.block_kv
                    state = mainloop_step(
                        n, state, q, kv, start_q, start_kv, mask, bounds, score, t, True, False
                    )
                    n += 1
            for i in range(stop - 1, low - 1, -1):
                start_kv = i * t.block_kv
                state = mainloop_step(
                    n, state, q, kv, start_q, start_kv, mask, bounds, score, t, False, True
                )
                n += 1
    return state, n


@gluon.jit
def consumer(WARPGROUP: gl.constexpr, o, lse, pipelines, sO, next_tile, scheduler, shape, score, t):
    """Compute o and lse of ROWS queries of every tile."""
    queries, keys, values = pipelines
    S: gl.constexpr = acc_layout(t.block_kv)
    n = 0
    q_n = WARPGROUP
    tile_n = 0
    tile = gl.program_id(0)
    while tile < scheduler.tiles:
        block, batch, head = scheduler.tile_coord(tile)
        start_q = block * t.block_q + WARPGROUP * ROWS
        mask = shape.mask_of(batch)
        first, full_begin, full_end, end = visited_tiles(block, mask, t)
        bounds = mask.key_bounds(start_q, ROWS, S)
        own = score.of_head(batch, head).of_rows(start_q, mask.seq_q, ROWS, t.block_kv)
        start_kv = (end - 1) * t.block_kv
        bias = own.load_bias(start_kv, mask.seq_kv, t.block_kv, False)
        q = queries.consumer_wait(q_n)
        s = own.initial_acc(start_kv, t.block_kv, False)
        s = mma_wait(mma_qk(q, keys.consumer_wait(n), t.d_lo, t.d_hi, s), 0)
        keys.consumer_release(n)
        s, log2, far = own.in_base_2(own.capped(s), start_q, start_kv, bias)
        if mask.masked or full_end < end:
            s = mask.apply(s, start_q, start_kv, bounds, float("-inf"))
        p, m, l = softmax_first(s, log2, far, own, q.dtype)
        tiles = first, full_begin, gl.minimum(full_end, end - 1), end - 1
        state, n = mainloop(
            n,
            (
                zero_acc(t.v_lo, t.v_hi),
                gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(1, S)),
                p,
                m,
                l,
            ),
            q,
            (keys, values),
            start_q,
            tiles,
            mask,
            bounds,
            own,
            t,
        )
        acc, alpha, p, m, l = state
        acc = rescale(acc, alpha, mask, t, LATER=True)
        acc = mma_packed(p, values.consumer_wait(n), acc, t.v_lo, t.v_hi)
        if next_tile is not None:
            tile = next_tile.read(tile_n)
            tile_n += 1
        else:
            tile += gl.num_programs(0)
        n += 1
        if t.own_so:
            queries.consumer_release(q_n)
            at = WARPGROUP
        else:
            at = q_n % t.groups
        acc = acc_wait(acc, 0, t.v_hi)
        inverse = store_lse(
            m, l, own.sink, lse, batch, head, scheduler.heads, start_q, mask.seq_q, S
        )
        acc = scale_acc(acc, inverse, t.v_hi)
        store_o(acc, o, sO, at, batch, head, start_q, t)
        if not t.own_so:
            tma.store_wait(0)
            queries.consumer_release(q_n)
        q_n += t.groups
    tma.store_wait(0)


@gluon.jit
def store_o(acc, descriptors, sO, at, batch, head, start_q, t):
    """Store o through shared memory."""
    tma.store_wait(0)  # o of the previous tile has been read
    store_acc(acc, 1.0, sO.tile(at), t.v_lo, t.v_hi)
    fence_async_shared()
    o, o_high = descriptors
    store_tile(o, [batch, head, start_q, 0], sO.tiles.index(at))
    if o_high is not None:
        store_tile(o_high, [batch, head, start_q, t.v_lo], sO.high.index(at))


@gluon.jit
def store_lse(m, l, sink, lse, batch, head, heads, start_q, seq_q, LAYOUT: gl.constexpr):
    """Store lse, and return the factors of o.

    A fully masked row has o = 0 and lse = -inf, or lse = sink if there is one.
    """
    total = gl.convert_layout(gl.sum(l, 1), gl.SliceLayout(1, LAYOUT))
    weight = 1.0
    if sink is not None:
        m, total, weight = with_sink(m, total, sink)
    rows = start_q + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    value = gl.where(total == 0.0, float("-inf"), (m + gl.log2(total)) * LN2)
    row = (batch * heads + head).to(gl.int64) * seq_q
    gl.store(lse + row + rows, value, mask=rows < seq_q)
    return gl.where(total == 0.0, 0.0, weight / total)


@gluon.jit(do_not_specialize=SIZES)
def flashattn_hopper_fwd(
    q,
    k,
    v,
    o,
    q_high,
    k_high,
    v_high,
    o_high,
    lse,
    tile_counter,
    key_bounds,
    query_bounds,
    slopes,
    bias,
    sink,
    tiles,
    blocks,
    heads,
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
    bias_strides,
    sink_stride,
    scale_log2,
    cap,
    t: gl.constexpr,
):
    """Compute o and lse; q, k, v and o are descriptors of [B, H, T, D] or [B, H, T, Dv].

    If tiles are in two pieces, ``high`` descriptors have the columns from D_LO or V_LO on. If
    bounds are not None, they are the whole mask. Strides, but for bias_strides, are of batches.
    """
    mask = Mask(seq_q, seq_kv, left, right, key_bounds, query_bounds)
    shape = Shape(group, mask, keys_stride, queries_stride)
    score = Score(
        *(scale_log2, cap, q.dtype == gl.float16, slopes, slopes_stride, query_offset, t.before),
        *(sink, sink_stride),
        new_bias(bias, bias_strides, t.vector),
    )
    ORDER: gl.constexpr = DESCENDING if mask.masked else LINEAR
    scheduler = TileScheduler(tiles, blocks, heads, section_heads, ORDER)
    queries = new_pipeline(q, 2 * t.groups if t.own_so else t.groups, 1, high=q_high)
    keys = new_pipeline(k, t.stages, t.groups, high=k_high)
    values = new_pipeline(v, t.stages, 0, high=v_high)
    inputs, high, pipelines = (q, k, v), (q_high, k_high, v_high), (queries, keys, values)
    out = o, o_high
    if tile_counter is not None:
        next_tile = new_scalar_pipeline(t.groups)
    else:  # roles take None only as a constexpr
        next_tile: gl.constexpr = None  # type: ignore[no-redef]
    sO = new_shared_tiles(o, t.groups, o_high) if t.own_so else queries
    fence_async_shared()
    if t.groups == 2:
        gl.warp_specialize(
            [
                (consumer, (0, out, lse, pipelines, sO, next_tile, scheduler, shape, score, t)),
                (consumer, (1, out, lse, pipelines, sO, next_tile, scheduler, shape, score, t)),
                (producer, (inputs, high, pipelines, next_tile, tile_counter, scheduler, shape, t)),
            ],
            [4, 1],
            [t.registers, 24],
        )
    else:
        gl.warp_specialize(
            [
                (consumer, (0, out, lse, pipelines, sO, next_tile, scheduler, shape, score, t)),
                (consumer, (1, out, lse, pipelines, sO, next_tile, scheduler, shape, score, t)),
                (consumer, (2, out, lse, pipelines, sO, next_tile, scheduler, shape, score, t)),
                (producer, (inputs, high, pipelines, next_tile, tile_counter, scheduler, shape, t)),
            ],
            [4, 4, 1],
            [t.registers, t.registers, 24],
        )
