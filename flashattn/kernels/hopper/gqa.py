"""GQA splits: the query heads of a key head, split among CTAs that own the same keys.

Without a split, a CTA visits the queries of all heads that share its keys, so few key heads give
few CTAs with much work each. With a split, a CTA takes only some of these heads. It stores partial
dk and dv in fp32, and flashattn_bwd_reduce adds them in a fixed order.
"""

# Gluon's aggregates need evaluated annotations: no `from __future__ import annotations` here.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashattn.kernels.hopper.compat import aggregate
from flashattn.kernels.hopper.mma import store_global


@aggregate
class GqaSplits:
    """The query heads of a key head, split among CTAs that own the same keys.

    Split head i is split i % count of key head i // count; count is None if heads are not split.
    Partial dk and dv are [count, batches, ...] in fp32.
    """

    count: gl.tensor | gl.constexpr
    head_dim: gl.tensor | gl.constexpr
    stride_b: gl.tensor | gl.constexpr
    stride_h: gl.tensor | gl.constexpr
    stride_t: gl.tensor | gl.constexpr

    @gluon.constexpr_function
    def __init__(self, count, head_dim, stride_b, stride_h, stride_t):
        """Store the fields."""
        none: gl.constexpr = gl.constexpr(None)
        self.count = none if count is None else count
        self.head_dim = none if head_dim is None else head_dim
        self.stride_b = none if stride_b is None else stride_b
        self.stride_h = none if stride_h is None else stride_h
        self.stride_t = none if stride_t is None else stride_t

    @gluon.jit
    def kv_head(self, split_head):
        """Return the key head of a split head."""
        if self.count is not None:
            split_head = split_head // self.count
        return split_head

    @gluon.jit
    def partial(self, batch, split_head, scheduler):
        """Return (batch, head) of a split head in the partial gradients."""
        batches = scheduler.batches()
        return split_head % self.count * batches + batch, split_head // self.count

    @gluon.jit
    def store(self, x, acc, factor, at, start_kv, seq_kv, D_LO: gl.constexpr, D_HI: gl.constexpr):
        """Scale an accumulator, and store it in x, the partial dk or dv."""
        strides = self.stride_b, self.stride_h, self.stride_t
        batch, head = at
        store_global(x, acc[0] * factor, strides, batch, head, start_kv, seq_kv, self.head_dim)
        if D_HI > 0:
            rest = self.head_dim - D_LO
            store_global(x + D_LO, acc[1] * factor, strides, batch, head, start_kv, seq_kv, rest)


@gluon.jit
def new_gqa_splits(count, head_dim, strides):
    """Return the splits of a launch; all fields are None if heads are not split."""
    if count is None:
        splits = GqaSplits(None, None, None, None, None)
    else:
        splits = GqaSplits(count, head_dim, strides[0], strides[1], strides[2])
    return splits
