"""flashattn_hopper_bwd_fp32_dkdv, flashattn_hopper_bwd_fp32_dq: gradients of D up to 128 in fp32.

These are the portable passes by bf16 terms, shared by two consumer warpgroups as in
``backward_d256``: one computes P and accumulates dv; the other takes P, computes dS and accumulates
dk or dq. Each has one accumulator of 64 rows in registers, and one tile that stays, whose addresses
it keeps; a single warpgroup would spill. While one waits, the tensor cores have the other's
products.
"""

# Gluon's aggregates need evaluated annotations: no `from __future__ import annotations` here.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from flashattn.kernels.hopper.bf16x3 import bf16_terms, mma_terms, transpose_terms
from flashattn.kernels.hopper.compat import aggregate
from flashattn.kernels.hopper.config import SIZES
from flashattn.kernels.hopper.mask import Mask
from flashattn.kernels.hopper.mma import store_global
from flashattn.kernels.hopper.pipeline import new_pipeline, new_shared_p
from flashattn.kernels.hopper.registers import acc_layout
from flashattn.kernels.hopper.scheduler import ASCENDING, DESCENDING, LINEAR, Shape, one_tile_each

OWNED = gl.constexpr(64)  # rows of a CTA's own tile
STAGES = gl.constexpr(2)


@gluon.constexpr_function
def walked(parts):
    """Return the rows of a visited tile: as many as leave room for a second one."""
    return 64 if parts == 2 else 32


@aggregate
class Splits:
    """Splits of the rows that a CTA visits: ``length`` rows each, or all if not ``several``."""

    batches: gl.tensor
    length: gl.tensor
    several: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, batches, length, several):
        """Store the fields."""
        self.batches = batches
        self.length = length
        self.several = gl.constexpr(several)

    @gluon.jit
    def tiles(self, split_batch, first, end, WALKED: gl.constexpr):
        """Return (batch, first, end) of a split: its part of tiles first ... end - 1."""
        batch = split_batch
        if self.several:
            batch = split_batch % self.batches
            begin = split_batch // self.batches * (self.length // WALKED)
            first = gl.maximum(first, begin)
            end = gl.minimum(end, begin + self.length // WALKED)
        return batch, first, end


@gluon.jit
def own_keys(kv_heads, splits, shape, TERMS: gl.constexpr):
    """Return (first key, batch, split_batch, head, first query tile, end) of this CTA."""
    WALKED: gl.constexpr = walked(TERMS)
    ORDER: gl.constexpr = ASCENDING if shape.mask.masked else LINEAR
    scheduler = one_tile_each(gl.cdiv(shape.mask.seq_kv, OWNED), kv_heads, ORDER)
    block, split_batch, kv_head = scheduler.tile_coord(gl.program_id(0))
    start_kv = block * OWNED
    first, _, _, end = shape.mask.query_tiles(start_kv, WALKED, OWNED)
    batch, first, end = splits.tiles(split_batch, first, end, WALKED)
    return start_kv, batch, split_batch, kv_head, first, end


@gluon.jit
def producer_dkdv(x, own, pipeline, own_pipeline, kv_heads, splits, shape, TERMS: gl.constexpr):
    """Load k and the queries, or v and dO."""
    WALKED: gl.constexpr = walked(TERMS)
    start_kv, batch, _, kv_head, first, end = own_keys(kv_heads, splits, shape, TERMS)
    own_pipeline.load(0, own, batch, kv_head, start_kv)
    n = 0
    for head in range(kv_head * shape.group, kv_head * shape.group + shape.group):
        for i in range(first, end):
            pipeline.load(n, x, batch, head, i * WALKED)
            n += 1


@gluon.jit
def consumer_dv(out, inputs, kv_heads, splits, shape, scale_log2, TERMS: gl.constexpr):
    """Compute P and dv."""
    WALKED: gl.constexpr = walked(TERMS)
    S: gl.constexpr = acc_layout(WALKED)
    dv, strides, head_dim = out
    lse_log2, lse_rows, keys, queries, grads, sP = inputs
    start_kv, batch, split_batch, kv_head, first, end = own_keys(kv_heads, splits, shape, TERMS)
    rows = gl.arange(0, WALKED, layout=gl.SliceLayout(0, S))
    k = keys.consumer_wait(0)
    COLUMNS: gl.constexpr = k[0].shape[1]
    acc = gl.zeros([OWNED, COLUMNS], gl.float32, acc_layout(COLUMNS))
    n = 0
    for head in range(kv_head * shape.group, kv_head * shape.group + shape.group):
        at = lse_log2 + (batch * kv_heads * shape.group + head).to(gl.int64) * lse_rows
        for i in range(first, end):
            lse_log2_rows = gl.load(at + i * WALKED + rows)
            q = queries.consumer_wait(n)
            s = mma_terms(k, transpose_terms(q, TERMS), TERMS)
            p = gl.exp2(s * scale_log2 - lse_log2_rows[None, :])
            if shape.mask.masked:
                p = shape.mask.apply_transposed(p, i * WALKED, start_kv, (0, 0), True)
            # This stage of sP is free: dk read its old P before it released the stage of these
            # queries.
            sP.store(n, p)
            do = grads.consumer_wait(n)
            acc += mma_terms(bf16_terms(p, COLUMNS, TERMS), do, TERMS)
            grads.consumer_release(n)
            n += 1
    store_global(dv, acc, strides, split_batch, kv_head, start_kv, shape.mask.seq_kv, head_dim)


@gluon.jit
def consumer_dk(out, inputs, kv_heads, splits, shape, scale, TERMS: gl.constexpr):
    """Compute dS and dk."""
    WALKED: gl.constexpr = walked(TERMS)
    S: gl.constexpr = acc_layout(WALKED)
    dk, strides, head_dim = out
    delta, lse_rows, values, queries, grads, sP = inputs
    start_kv, batch, split_batch, kv_head, first, end = own_keys(kv_heads, splits, shape, TERMS)
    rows = gl.arange(0, WALKED, layout=gl.SliceLayout(0, S))
    v = values.consumer_wait(0)
    COLUMNS: gl.constexpr = v[0].shape[1]
    acc = gl.zeros([OWNED, COLUMNS], gl.float32, acc_layout(COLUMNS))
    n = 0
    for head in range(kv_head * shape.group, kv_head * shape.group + shape.group):
        at = delta + (batch * kv_heads * shape.group + head).to(gl.int64) * lse_rows
        for i in range(first, end):
            delta_rows = gl.load(at + i * WALKED + rows)
            do = grads.consumer_wait(n)
            dp = mma_terms(v, transpose_terms(do, TERMS), TERMS)
            grads.consumer_release(n)
            p = sP.load(n, S)
            ds = bf16_terms(p * (dp - delta_rows[None, :]), COLUMNS, TERMS)
            q = queries.consumer_wait(n)
            acc += mma_terms(ds, q, TERMS)
            queries.consumer_release(n)
            n += 1
    store_global(
        dk, acc * scale, strides, split_batch, kv_head, start_kv, shape.mask.seq_kv, head_dim
    )


@gluon.jit(do_not_specialize=SIZES)
def flashattn_hopper_bwd_fp32_dkdv(
    q,
    k,
    v,
    grad_o,
    lse_log2,
    delta,
    dk,
    dv,
    dk_strides,
    dv_strides,
    heads,
    group,
    seq_q,
    seq_kv,
    lse_rows,
    left,
    right,
    batches,
    split_len,
    scale,
    scale_log2,
    head_dim,
    SPLIT: gl.constexpr,
    TERMS: gl.constexpr,
):
    """Compute dk and dv, as ``flashattn_bwd_dkdv``; q, k, v, grad_o are descriptors of terms."""
    kv_heads = heads // group
    shape = Shape(group, Mask(seq_q, seq_kv, left, right))
    splits = Splits(batches, split_len, SPLIT)
    keys = new_pipeline(k, 1, 1, TERMS)
    values = new_pipeline(v, 1, 1, TERMS)
    queries = new_pipeline(q, STAGES, 1, TERMS)  # dk releases q after dv has computed P
    grads = new_pipeline(grad_o, STAGES, 2, TERMS)
    sP = new_shared_p(gl.float32, STAGES, OWNED, walked(TERMS))
    dv_out, dk_out = (dv, dv_strides, head_dim), (dk, dk_strides, head_dim)
    p_in = lse_log2, lse_rows, keys, queries, grads, sP
    ds_in = delta, lse_rows, values, queries, grads, sP
    fence_async_shared()
    gl.warp_specialize(
        [
            (consumer_dv, (dv_out, p_in, kv_heads, splits, shape, scale_log2, TERMS)),
            (consumer_dk, (dk_out, ds_in, kv_heads, splits, shape, scale, TERMS)),
            (producer_dkdv, (q, k, queries, keys, kv_heads, splits, shape, TERMS)),
            (producer_dkdv, (grad_o, v, grads, values, kv_heads, splits, shape, TERMS)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )


@gluon.jit
def own_queries(heads, splits, shape, TERMS: gl.constexpr):
    """Return (first query, batch, split_batch, head, first key tile, end) of this CTA."""
    WALKED: gl.constexpr = walked(TERMS)
    ORDER: gl.constexpr = DESCENDING if shape.mask.masked else LINEAR
    scheduler = one_tile_each(gl.cdiv(shape.mask.seq_q, OWNED), heads, ORDER)
    block, split_batch, head = scheduler.tile_coord(gl.program_id(0))
    start_q = block * OWNED
    first, _, _, end = shape.mask.key_tiles(start_q, OWNED, WALKED)
    batch, first, end = splits.tiles(split_batch, first, end, WALKED)
    return start_q, batch, split_batch, head, first, end


@gluon.jit
def producer_dq(x, own, pipeline, own_pipeline, heads, splits, shape, TERMS: gl.constexpr):
    """Load q and the keys, or dO and the values."""
    WALKED: gl.constexpr = walked(TERMS)
    start_q, batch, _, head, first, end = own_queries(heads, splits, shape, TERMS)
    own_pipeline.load(0, own, batch, head, start_q)
    n = 0
    for i in range(first, end):
        pipeline.load(n, x, batch, head // shape.group, i * WALKED)
        n += 1


@gluon.jit
def consumer_p(inputs, heads, splits, shape, scale_log2, TERMS: gl.constexpr):
    """Compute P."""
    WALKED: gl.constexpr = walked(TERMS)
    S: gl.constexpr = acc_layout(WALKED)
    lse_log2, lse_rows, queries, keys, sP = inputs
    start_q, batch, _, head, first, end = own_queries(heads, splits, shape, TERMS)
    rows = start_q + gl.arange(0, OWNED, layout=gl.SliceLayout(1, S))
    lse_log2_rows = gl.load(lse_log2 + (batch * heads + head).to(gl.int64) * lse_rows + rows)
    q = queries.consumer_wait(0)
    n = 0
    for i in range(first, end):
        k = keys.consumer_wait(n)
        s = mma_terms(q, transpose_terms(k, TERMS), TERMS)
        p = gl.exp2(s * scale_log2 - lse_log2_rows[:, None])
        # P of a key that pads a tile could be inf, and inf * 0 is NaN.
        p = shape.mask.apply(p, start_q, i * WALKED, (0, 0), 0.0)
        sP.store(n, p)  # as in ``consumer_dv``, with keys in place of queries
        n += 1


@gluon.jit
def consumer_dq(out, inputs, heads, splits, shape, scale, TERMS: gl.constexpr):
    """Compute dS and dq."""
    WALKED: gl.constexpr = walked(TERMS)
    S: gl.constexpr = acc_layout(WALKED)
    dq, strides, head_dim = out
    delta, lse_rows, grads, keys, values, sP = inputs
    start_q, batch, split_batch, head, first, end = own_queries(heads, splits, shape, TERMS)
    rows = start_q + gl.arange(0, OWNED, layout=gl.SliceLayout(1, S))
    delta_rows = gl.load(delta + (batch * heads + head).to(gl.int64) * lse_rows + rows)
    do = grads.consumer_wait(0)
    COLUMNS: gl.constexpr = do[0].shape[1]
    acc = gl.zeros([OWNED, COLUMNS], gl.float32, acc_layout(COLUMNS))
    for n in range(end - first):
        v = values.consumer_wait(n)
        dp = mma_terms(do, transpose_terms(v, TERMS), TERMS)
        values.consumer_release(n)
        p = sP.load(n, S)
        ds = bf16_terms(p * (dp - delta_rows[:, None]), COLUMNS, TERMS)
        k = keys.consumer_wait(n)
        acc += mma_terms(ds, k, TERMS)
        keys.consumer_release(n)
    store_global(dq, acc * scale, strides, split_batch, head, start_q, shape.mask.seq_q, head_dim)


@gluon.jit(do_not_specialize=SIZES)
def flashattn_hopper_bwd_fp32_dq(
    q,
    k,
    v,
    grad_o,
    lse_log2,
    delta,
    dq,
    dq_strides,
    heads,
    group,
    seq_q,
    seq_kv,
    lse_rows,
    left,
    right,
    batches,
    split_len,
    scale,
    scale_log2,
    head_dim,
    SPLIT: gl.constexpr,
    TERMS: gl.constexpr,
):
    """Compute dq, as ``flashattn_bwd_dq``; q, k, v and grad_o are descriptors of terms."""
    shape = Shape(group, Mask(seq_q, seq_kv, left, right))
    splits = Splits(batches, split_len, SPLIT)
    queries = new_pipeline(q, 1, 1, TERMS)
    grads = new_pipeline(grad_o, 1, 1, TERMS)
    keys = new_pipeline(k, STAGES, 1, TERMS)  # dq releases k after P has been computed
    values = new_pipeline(v, STAGES, 1, TERMS)
    sP = new_shared_p(gl.float32, STAGES, OWNED, walked(TERMS))
    dq_out, p_in = (dq, dq_strides, head_dim), (lse_log2, lse_rows, queries, keys, sP)
    ds_in = delta, lse_rows, grads, keys, values, sP
    fence_async_shared()
    gl.warp_specialize(
        [
            (consumer_p, (p_in, heads, splits, shape, scale_log2, TERMS)),
            (consumer_dq, (dq_out, ds_in, heads, splits, shape, scale, TERMS)),
            (producer_dq, (k, q, keys, queries, heads, splits, shape, TERMS)),
            (producer_dq, (v, grad_o, values, grads, heads, splits, shape, TERMS)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )
