"""flashattn_hopper_fwd_fp32: o for D = 33 to 128 in fp32, from bf16 terms.

Two consumer warpgroups of 64 queries each compute what the portable kernel does, and a producer
warp loads. The softmax of one runs under the products of the other, which are most of the work.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from flashattn.kernels.constants import HALF_BIT, LN2
from flashattn.kernels.hopper.bf16x3 import bf16_terms, mma_terms, transpose_terms
from flashattn.kernels.hopper.config import SIZES
from flashattn.kernels.hopper.mask import Mask
from flashattn.kernels.hopper.mma import ROWS, scale_rows, store_global
from flashattn.kernels.hopper.pipeline import new_pipeline
from flashattn.kernels.hopper.registers import acc_layout
from flashattn.kernels.hopper.scheduler import DESCENDING, LINEAR, Shape, one_tile_each
from flashattn.kernels.hopper.score import Score, with_sink

GROUPS = gl.constexpr(2)
OWNED = gl.constexpr(128)  # queries of a CTA
WALKED = gl.constexpr(64)  # keys of a tile
ROOM = 160 << 10  # bytes of shared memory for keys and values


@gluon.constexpr_function
def stages(columns, parts):
    """Return how many stages of keys, and of values, there is room for."""
    return min(ROOM // (2 * 2 * WALKED.value * columns * parts), 3)


@gluon.jit
def own_tile(heads, shape):
    """Return (first query, batch, head, first key tile, end) of this CTA."""
    mask = shape.mask
    ORDER: gl.constexpr = DESCENDING if mask.masked else LINEAR
    scheduler = one_tile_each(gl.cdiv(mask.seq_q, OWNED), heads, ORDER)
    block, batch, head = scheduler.tile_coord(gl.program_id(0))
    first, _, _, end = mask.key_tiles(block * OWNED, OWNED, WALKED)
    return block * OWNED, batch, head, first, end


@gluon.jit
def producer(inputs, pipelines, heads, shape):
    """Load the queries, then keys and values."""
    q, k, v = inputs
    queries, keys, values = pipelines
    start_q, batch, head, first, end = own_tile(heads, shape)
    kv_head = head // shape.group
    for w in gl.static_range(GROUPS):
        queries.load(w, q, batch, head, start_q + w * ROWS)
    for i in range(first, end):
        keys.load(i - first, k, batch, kv_head, i * WALKED)
        values.load(i - first, v, batch, kv_head, i * WALKED)


@gluon.jit
def consumer(
    WARPGROUP: gl.constexpr,
    out,
    pipelines,
    heads,
    shape,
    score,
    BLOCK_D: gl.constexpr,
    TERMS: gl.constexpr,
):
    """Compute the online softmax of 64 queries over all keys, and write o and lse."""
    o, lse, o_strides, head_dim = out
    queries, keys, values = pipelines
    R: gl.constexpr = gl.SliceLayout(1, acc_layout(WALKED))
    start_q, batch, head, first, end = own_tile(heads, shape)
    start_q += WARPGROUP * ROWS
    sink = score.of_head(batch, head).sink
    acc = gl.zeros([ROWS, BLOCK_D], gl.float32, acc_layout(BLOCK_D))
    m = gl.full([ROWS], float("-inf"), gl.float32, R)
    l = gl.zeros([ROWS], gl.float32, R)
    lost = gl.zeros([ROWS], gl.float32, R)
    queries.consumer_wait(WARPGROUP)
    for i in range(first, end):
        n = i - first
        q, k = queries.tile(WARPGROUP), keys.consumer_wait(n)
        s = mma_terms(q, transpose_terms(k, TERMS), TERMS)
        keys.consumer_release(n)
        s = shape.mask.apply(s, start_q, i * WALKED, (0, 0), float("-inf"))
        m_new = gl.maximum(m, gl.max(s, 1) * score.log2)
        finite = gl.where(m_new == float("-inf"), 0.0, m_new)  # a row that has seen no key yet
        p = gl.exp2(s * score.log2 - finite[:, None])
        alpha = gl.exp2(m - finite)
        term = gl.sum(p, 1) - lost * alpha  # a compensated sum (Kahan, 1965), as in portable
        longer = l * alpha + term
        lost = (longer - l * alpha) - term
        l = longer
        m = m_new
        operands = bf16_terms(p, BLOCK_D, TERMS, HALF_BIT)
        v = values.consumer_wait(n)
        acc = scale_rows(acc, alpha) + mma_terms(operands, v, TERMS)
        values.consumer_release(n)
    rows = start_q + gl.arange(0, ROWS, layout=R)
    if sink is not None:
        m, l, weight = with_sink(m, l, sink)
        acc = scale_rows(acc, weight)
    fully_masked = l == 0.0
    value = gl.where(fully_masked, float("-inf"), (m + gl.log2(l)) * LN2)
    at = lse + (batch * heads + head).to(gl.int64) * shape.mask.seq_q
    gl.store(at + rows, value, mask=rows < shape.mask.seq_q)
    total = gl.where(fully_masked, 1.0, l)
    inverse = 1.0 / total
    inverse += inverse * (1.0 - total * inverse)  # the division is off by 2 ulp
    acc = scale_rows(acc, inverse)
    store_global(o, acc, o_strides, batch, head, start_q, shape.mask.seq_q, head_dim)


@gluon.jit(do_not_specialize=SIZES)
def flashattn_hopper_fwd_fp32(
    q,
    k,
    v,
    o,
    lse,
    sink,
    o_strides,
    heads,
    group,
    seq_q,
    seq_kv,
    left,
    right,
    sink_stride,
    scale_log2,
    head_dim,
    BLOCK_D: gl.constexpr,
    TERMS: gl.constexpr,
):
    """Compute o and lse, as ``flashattn_fwd``; q, k and v are descriptors of bf16 terms."""
    STAGES: gl.constexpr = stages(BLOCK_D, TERMS)
    shape = Shape(group, Mask(seq_q, seq_kv, left, right))
    score = Score(scale_log2, None, False, sink=sink, sink_stride=sink_stride)
    queries = new_pipeline(q, GROUPS, 1, TERMS)
    keys = new_pipeline(k, STAGES, GROUPS, TERMS)
    values = new_pipeline(v, STAGES, GROUPS, TERMS)
    out, pipelines = (o, lse, o_strides, head_dim), (queries, keys, values)
    fence_async_shared()
    gl.warp_specialize(
        [
            (consumer, (0, out, pipelines, heads, shape, score, BLOCK_D, TERMS)),
            (consumer, (1, out, pipelines, heads, shape, score, BLOCK_D, TERMS)),
            (producer, ((q, k, v), pipelines, heads, shape)),
        ],
        [4, 1],
        [240, 24],
    )
