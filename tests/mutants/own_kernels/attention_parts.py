"""A right attention in plain PyTorch, in parts that other kernels replace, and the two tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from flashattn import registry
from flashattn.mask import UNBOUNDED, Mask
from flashattn.reference import reference_attention


@dataclass(frozen=True)
class Row:
    """A kernel of the corpus, right or wrong.

    Args:
        name: by which it is registered.
        call: the kernel.
        mimics: the real bug that it has: a project's issue, or empty.
        caught: the test that fails on it; empty for a right one.
        claims: flags of ``flashattn.claims``.
    """

    name: str
    call: Callable
    mimics: str
    caught: str
    claims: dict

    def __str__(self):
        """Return the name, for the test's id."""
        return self.name

    @property
    def impl(self):
        """The kernel as an implementation."""
        return registry.Impl(
            name=self.name, call=self.call, limits=lambda *_: None, origin="corpus", **self.claims
        )


ROWS: list[Row] = []


def kernel(caught="", mimics="", **claims):
    """Add a kernel to the table of wrong ones, or of right ones if no test catches it."""

    def decorate(call):
        every = {"lse": True, "windows": True} | claims
        ROWS.append(Row(call.__name__, call, mimics, caught, every))
        return call

    return decorate


def wide(*tensors):
    """Return tensors in the precision of the sums."""
    return [x if x.dtype == torch.float64 else x.float() for x in tensors]


def right(q, k, v, *, causal, scale, window=UNBOUNDED):
    """Compute attention by its definition."""
    o, lse = reference_attention(*wide(q, k, v), mask=Mask.of(causal, window), scale=scale)
    return o.to(q.dtype), lse


def right_with_scores(q, k, v, *, causal, scale, window=UNBOUNDED, **scored):
    """Compute attention by its definition, with bounds and all score tensors."""
    mask = Mask.of(causal, window)
    o, lse = reference_attention(*wide(q, k, v), mask=mask, scale=scale, **scored)
    return o.to(q.dtype), lse


def seen_by(q, k, causal, window):
    """Return which keys each query sees [T, S]."""
    t, s = (torch.arange(x.shape[2], device=x.device) for x in (q, k))
    seen = Mask.of(causal, window).over(len(t), len(s)).sees(t[:, None], s)
    return seen.expand(len(t), len(s))


def inputs_in_fp32(q, k, v, seen):
    """Return q, k and v for the sums; k and v per query head, zero where no query sees them."""
    group = q.shape[1] // max(k.shape[1], 1)
    unseen = ~seen.any(0)[:, None]
    k, v = (x.masked_fill(unseen, 0).repeat_interleave(group, 1) for x in (k, v))
    return wide(q, k, v)


def masked(hide, q, k, v, *, causal, scale, window=UNBOUNDED):
    """Compute attention with scores masked by ``hide(scores, seen)``; masked rows are right."""
    seen = seen_by(q, k, causal, window)
    a, b, c = inputs_in_fp32(q, k, v, seen)
    dead = ~seen.any(-1, keepdim=True)
    scores = (a @ b.mT) * scale
    scores = torch.where(dead, torch.zeros_like(scores), hide(scores, seen | dead))
    p = scores.softmax(-1).masked_fill(dead, 0)
    lse = scores.logsumexp(-1).masked_fill(dead[:, 0], -torch.inf)
    return (p @ c).to(q.dtype), lse


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, how, change):
        o, lse = right(q, k, v, **how)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.how, ctx.change = how, change
        return o, lse

    @staticmethod
    def backward(ctx, do, dlse):
        q, k, v, o, lse = ctx.saved_tensors
        x = SimpleNamespace(q=q, k=k, v=v, o=o, lse=lse, do=do, dlse=dlse, ctx=ctx, **ctx.how)
        return *ctx.change(x), None, None


def gradients(x):
    """Return dq, dk and dv from what was saved, as algorithm 2 of FlashAttention-2 does."""
    group = x.q.shape[1] // max(x.k.shape[1], 1)
    seen = seen_by(x.q, x.k, x.causal, getattr(x, "window", UNBOUNDED))
    q, k, v = inputs_in_fp32(x.q, x.k, x.v, seen)
    o, do = wide(x.o, x.do)
    scores = ((q @ k.mT) * x.scale).masked_fill(~seen, -torch.inf)
    p = (scores - x.lse.masked_fill(x.lse == -torch.inf, torch.inf)[..., None]).exp()
    delta = (do * o).sum(-1) - x.dlse
    ds = p * (do @ v.mT - delta[..., None]) * x.scale
    dk, dv = (ds.mT @ q, p.mT @ do)
    dk, dv = (y.unflatten(1, (-1, group)).sum(2) if group else y for y in (dk, dv))
    return tuple(y.to(z.dtype) for y, z in zip((ds @ k, dk, dv), (x.q, x.k, x.v), strict=True))


def fused(change=gradients):
    """Return a kernel with a backward of its own."""

    def fused_kernel(q, k, v, **how):
        return _Fused.apply(q, k, v, how, change)

    return fused_kernel


def as_contiguous(x):
    """Read memory as if it were contiguous."""
    dense = torch.empty(x.shape, device="meta").stride()
    room = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    if x.numel() > room:
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    return x.as_strided(x.shape, dense)
