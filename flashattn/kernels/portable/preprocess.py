"""flashattn_bwd_preprocess: the two numbers per row that the backward needs.

lse_log2 = lse * log2(e); it is +inf for fully masked rows and for padding rows, so their P is 0.
delta = rowsum(dO * O) - dlse; it is 0 where lse_log2 is +inf.

In bf16, the outputs are -lse / scale and -delta in three terms each, which a product adds to scores
and to dP. Where lse_log2 is +inf, the first term is the least finite number, as -inf is not a sum
of terms.

The kernel also clears counters that a later kernel needs at 0, which saves a launch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashattn.kernels.constants import LOG2E, SIZES
from flashattn.kernels.portable.memory import load_by_pointers, load_rows, store_rows
from flashattn.kernels.portable.scheduler import tile_coord
from flashattn.plan import portable

LEAST = tl.constexpr(-3.3895313892515355e38)  # the least finite bf16
TERMS_COLUMNS = tl.constexpr(portable.TERMS_COLUMNS)
BLOCK, WARPS = portable.STATS_BLOCK, 4


@triton.jit
def load_lse(lse, row, start, seq_q, BLOCK: tl.constexpr):
    """Load lse of a tile's rows; it is -inf for padding rows."""
    rows = start + tl.arange(0, BLOCK)
    offsets = row.to(tl.int64) * seq_q + rows
    return tl.load(lse + offsets, mask=rows < seq_q, other=float("-inf"))


@triton.jit
def lse_log2_of(lse, row, start, seq_q, BLOCK: tl.constexpr):
    """Return lse_log2 of a tile's rows from lse."""
    lse_rows = load_lse(lse, row, start, seq_q, BLOCK)
    fully_masked = lse_rows == float("-inf")
    return tl.where(fully_masked, float("inf"), lse_rows * LOG2E)


@triton.jit
def delta_of(o_tile, do_tile, grad_lse, lse_log2_rows, row, start, seq_q):
    """Return delta of a tile's rows; grad_lse may be None."""
    BLOCK: tl.constexpr = o_tile.shape[0]
    delta_rows = tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1)
    if grad_lse is not None:
        rows = start + tl.arange(0, BLOCK)
        offsets = row.to(tl.int64) * seq_q + rows
        delta_rows -= tl.load(grad_lse + offsets, mask=rows < seq_q, other=0.0)
    return tl.where(lse_log2_rows == float("inf"), 0.0, delta_rows)


@triton.jit
def store_terms(x, row, rows, start, values, COLUMNS: tl.constexpr):
    """Store values [BLOCK] as three bf16 terms each, in rows [COLUMNS] that are 0 elsewhere."""
    high = values.to(tl.bfloat16)
    rest = tl.where(tl.abs(values) == float("inf"), 0.0, values - high.to(tl.float32))
    middle = rest.to(tl.bfloat16)
    low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    at = row.to(tl.int64) * rows + start + tl.arange(0, values.shape[0])
    columns = tl.arange(0, COLUMNS)[None, :]
    terms = tl.where(columns == 1, middle[:, None], tl.where(columns == 2, low[:, None], 0.0))
    terms = tl.where(columns == 0, high[:, None], terms)
    tl.store(x + at[:, None] * COLUMNS + columns, terms.to(tl.bfloat16))


@triton.jit(do_not_specialize=SIZES)
def flashattn_bwd_preprocess(
    o,
    grad_o,
    lse,
    grad_lse,
    lse_log2,
    delta,
    counters,
    sinks,
    o_strides,
    grad_o_strides,
    heads,
    seq_q,
    seq_q_rounded,
    num_counters,
    scale_log2,
    head_dim,
    sink_stride,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    COUNTERS: tl.constexpr,
):
    """Write lse_log2 and delta of BLOCK rows of one head, and clear COUNTERS of all counters.

    ``sinks`` is (sinks, partial gradients of sinks, one for each program), or (None, None);
    ``sink_stride`` is the batch stride of the sinks.
    """
    block, batch, head = tile_coord(
        tl.program_id(0), None, seq_q_rounded // BLOCK, heads, False, False
    )
    start, row = block * BLOCK, batch * heads + head
    at = batch, head, start
    do_tile = load_by_pointers(
        grad_o, grad_o_strides, at, seq_q, head_dim, PADDED, BLOCK, BLOCK_D, False
    )
    lse_log2_rows = lse_log2_of(lse, row, start, seq_q, BLOCK)
    o_tile = load_by_pointers(o, o_strides, at, seq_q, head_dim, PADDED, BLOCK, BLOCK_D, False)
    if sinks[0] is not None:  # lse of rows that see no key is finite; their dO may be NaN
        do_tile = tl.where(o_tile == 0.0, 0.0, do_tile)
    delta_rows = delta_of(o_tile, do_tile, grad_lse, lse_log2_rows, row, start, seq_q)
    if lse_log2.dtype.element_ty == tl.float32:
        store_rows(lse_log2, row, seq_q_rounded, start, seq_q_rounded, lse_log2_rows)
    else:
        unseen = load_lse(lse, row, start, seq_q, BLOCK) == float("-inf")
        x = tl.where(unseen, LEAST, -lse_log2_rows / scale_log2)
        store_terms(lse_log2, row, seq_q_rounded, start, x, TERMS_COLUMNS)
    if delta.dtype.element_ty == tl.float32:
        store_rows(delta, row, seq_q_rounded, start, seq_q_rounded, delta_rows)
    else:
        store_terms(delta, row, seq_q_rounded, start, -delta_rows, TERMS_COLUMNS)
    if sinks[0] is not None:
        logit = tl.load(sinks[0] + batch * sink_stride + head) * LOG2E
        given = tl.sum(tl.exp2(logit - lse_log2_rows) * delta_rows)
        tl.store(sinks[1] + row.to(tl.int64) * (seq_q_rounded // BLOCK) + block, -given)
    if COUNTERS > 0:
        own = tl.program_id(0) * COUNTERS + tl.arange(0, COUNTERS)
        tl.store(counters + own, 0, mask=own < num_counters)


@triton.jit
def load_lse_log2(stats, stride, row, start, seq_q, BLOCK: tl.constexpr):
    """Load lse_log2 of a tile's rows.

    ``stats`` is (lse_log2, delta, None), with head stride ``stride``; or, without a preprocess,
    (lse, its gradient or None, o).
    """
    lse, _, o = stats
    if o is None:
        lse_log2_rows = load_rows(lse, row, stride, start, BLOCK)
    else:
        lse_log2_rows = lse_log2_of(lse, row, start, seq_q, BLOCK)
    return lse_log2_rows


@triton.jit
def load_delta(stats, layout, at, do_tile, lse_log2_rows, row, seq_q, CONFIG: tl.constexpr):
    """Load delta of a tile's rows likewise; ``at`` is (batch, head, row) of the tile."""
    BLOCK: tl.constexpr = CONFIG.BLOCK_Q
    _, delta, o = stats
    if o is None:
        delta_rows = load_rows(delta, row, layout.stats, at[2], BLOCK)
    else:
        o_tile = load_by_pointers(
            o, layout.o, at, seq_q, layout.head_dim, CONFIG.PADDED, BLOCK, CONFIG.BLOCK_D, False
        )
        delta_rows = delta_of(o_tile, do_tile, delta, lse_log2_rows, row, at[2], seq_q)
    return delta_rows
