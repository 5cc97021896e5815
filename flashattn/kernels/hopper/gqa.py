"""GQA splits: query heads that share keys, split among CTAs that own the same keys.

A CTA that owns keys visits the queries of all heads that share them: with few such keys, few CTAs
have much to do each. So a CTA may take the queries of some of these heads only. It stores partial
dk and dv in fp32, and flashattn_bwd_reduce adds them up, always in the same order.
"""

# Gluon's aggregates look at annotations as they are, so they cannot be postponed here.
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashattn.kernels import launch
from flashattn.kernels.hopper.compat import aggregate
from flashattn.kernels.hopper.mma import store_global
from flashattn.kernels.launch import Like
from flashattn.kernels.portable import combine
from flashattn.kernels.portable.combine import Tensors, Written

ONE_PASS = 128  # head dimension, up to which the backward is one
# Of narrow heads and of wide ones: under a mask, how much of what the longest program has to do
# comes after the mean of all is over; and what it costs to add up a share of a tile of keys, in
# queries that a program could have walked over instead. Measured: one H200, torch 2.11, triton 3.6,
# bf16, 8 to 64 heads on 1 to 8 of 512 to 8192 keys, 2026-11-23 (docs/tuning-log.md): over 452
# problems the rule takes 0.2% longer than the best number of shares, 7% at most.
LATE, ADDED = (0.5, 0.3), (3, 6)


@aggregate
class GqaSplits:
    """The query heads of a key head, split among CTAs that own the same keys.

    Split heads are numbered as key heads of which each comes with all of its splits; count is None
    if heads are not split. Partial dk and dv are [count, batches, ...] in fp32.
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
        """Return (batch, head) of a split head among the partial sums."""
        batches = scheduler.batches()
        return split_head % self.count * batches + batch, split_head // self.count

    @gluon.jit
    def store(
        self, x, acc, factor, at, start_kv, seq_kv, D_LO: gl.constexpr, D_HI: gl.constexpr,
    ):  # fmt: skip
        """Multiply an accumulator, and store it in x, one of the partial sums."""
        strides = self.stride_b, self.stride_h, self.stride_t
        batch, head = at
        store_global(x, acc[0] * factor, strides, batch, head, start_kv, seq_kv, self.head_dim)
        if D_HI > 0:
            rest = self.head_dim - D_LO
            store_global(x + D_LO, acc[1] * factor, strides, batch, head, start_kv, seq_kv, rest)


@gluon.jit
def new_gqa_splits(count, head_dim, strides):
    """Return the splits of a launch; all are None if heads are not split."""
    if count is None:
        splits = GqaSplits(None, None, None, None, None)
    else:
        splits = GqaSplits(count, head_dim, strides[0], strides[1], strides[2])
    return splits


def shares_for(q: Like, k: Like, tiles: int, *, causal: bool) -> int:
    """Return into how many shares heads are divided: the fewest that take the least time.

    Args:
        q: [B, H, T, D].
        k: [B, G, S, D].
        tiles: of keys, of all heads.
        causal: whether there is a mask: programs then have half as much to do in the mean.
    """
    programs, group = launch.multiprocessors(k.device), q.shape[1] // k.shape[1]
    late, added = (x[q.shape[3] > ONE_PASS] for x in (LATE, ADDED))

    def time(shares: int) -> float:  # what one head's queries take to be walked over is 1
        longest = group // shares
        rounds = -(-tiles * shares // programs) * longest
        masked = max(longest, tiles * group / (2 * programs) + late * longest)
        adding = added * tiles * shares / q.shape[2] if shares > 1 else 0
        return (masked if causal else rounds) + adding

    return min((n for n in range(1, group + 1) if group % n == 0), key=time)


@dataclass(frozen=True)
class Shares:
    """How dk and dv are filled, whole or in shares.

    Args:
        count: of shares.
        numbers: the kernels' shares, head_dim and strides.
        adding: what adds the shares up, if there is more than one.
    """

    count: int
    numbers: tuple[object, ...]
    adding: Callable[[Tensors, Tensors], None] | None

    def operand(self, tile: Any) -> Any:
        """Return how dk and dv are reached: by a descriptor if they are whole."""
        return tile if self.adding is None else None

    def fill(self, fold: Callable[[Tensors], None], grads: Tensors) -> None:
        """Have dk and dv filled by a launch, or its shares, which are added up."""
        if self.adding is None:
            fold(grads)
        else:
            shares = combine.room(grads, [self.count] * len(grads))
            fold(shares)
            self.adding(shares, grads)


def share(q: Like, k: Like, v: Like, tiles: int, *, causal: bool) -> Shares:
    """Divide query heads into shares.

    Args:
        q: [B, H, T, D].
        k: [B, G, S, D].
        v: [B, G, S, D].
        tiles: of keys, of all heads.
        causal: whether there is a mask.
    """
    count = shares_for(q, k, tiles, causal=causal)
    if count == 1:
        return Shares(1, (None, None, None), None)
    dense = torch.empty(k.shape, device="meta").stride()
    written = [Written(count, x.shape, torch.empty_like(x.meta).stride()) for x in (k, v)]
    return Shares(count, (count, k.shape[3], dense[:3]), combine.adding(written))
