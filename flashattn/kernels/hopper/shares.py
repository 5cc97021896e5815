"""Shares: query heads that have keys in common, divided among programs that own the same keys.

A program that owns keys walks over the queries of all heads that share them: with few such keys
few programs have much to do each. So one may have the queries of some of these heads only, its
share. It stores dk and dv of that in fp32, and flashattn_bwd_sum adds up the shares, always in the
same order. Owners are numbered as key heads of which each comes with all of its shares.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashattn.kernels.hopper.columns import store


@gluon.jit
def key_head(owner, shares):
    """Return the head of the keys that an owner has; ``shares`` is None where nothing is shared."""
    if shares is not None:
        owner = owner // shares
    return owner


@gluon.jit
def store_share(
    accs, factor, terms, strides, owner, batch, batches, shares, start_kv, seq_kv, head_dim,
    FIRST: gl.constexpr, REST: gl.constexpr,
):  # fmt: skip
    """Multiply an accumulator, and store it in an owner's part of terms [shares, batches, ...]."""
    place, head = owner % shares * batches + batch, owner // shares
    store(terms, accs[0] * factor, strides, place, head, start_kv, seq_kv, head_dim)
    if REST > 0:
        rest = head_dim - FIRST
        store(terms + FIRST, accs[1] * factor, strides, place, head, start_kv, seq_kv, rest)
