"""Attention over rows that other ranks share: keys are fetched, parts merged by their logsumexp.

Two operators, which ``torch.compile`` keeps whole, with their collectives and streams. The backward
needs o and lse of whole rows only: a part's weights are exp(S - lse), and gradients of parts add up
(Liu et al., 2023, "Ring Attention with Blockwise Transformers").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import flashattn.ops  # noqa: F401 - defines the operators
from flashattn.mask import Mask
from flashattn.parallel.exchange import beside, fetch, give_back, heads_first, join, rows_first
from flashattn.parallel.placement import Placement
from flashattn.parallel.plan import Plan, Task, plan, size
from flashattn.tiled import tiled_backward, tiled_forward

Outputs = tuple[torch.Tensor, torch.Tensor]
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
TILED = "tiled"

# What both operators take beside tensors: where (group, rank and placement), what (lengths of the
# whole and mask), how (see Kernels), and whether the fetched keys are kept for the backward.
_OPTIONS = (
    "str group, int rank, int world, str placement, SymInt seq_q, SymInt seq_kv, SymInt? left,"
    " SymInt? right, str corner, str family, float scale, float? softcap, str precision,"
    " bool deterministic, bool keep"
)


class Kernels(NamedTuple):
    """What computes a part.

    Args:
        family: of our kernels, see ``plan.spec``, or "tiled", the algorithm in PyTorch.
        scale: factor on the scores.
        softcap: bound on the scores; None is none.
        precision: see ``attention``.
        deterministic: see ``attention``.
    """

    family: str
    scale: float
    softcap: float | None
    precision: str
    deterministic: bool

    def _options(self, mask: Mask, q: torch.Tensor, k: torch.Tensor) -> tuple[Any, ...]:
        band = mask.over(q.shape[2], k.shape[2])
        how = self.scale, self.softcap, self.precision, self.family, self.deterministic
        return band.left, band.right, *how

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask) -> Outputs:
        """Return o [B, H, T, D] and lse [B, H, T]."""
        if self.family != TILED:
            o, lse = torch.ops.flashattn.forward(q, k, v, *self._options(mask, q, k))
            return o, lse
        grouped = q.unflatten(1, (k.shape[1], -1))
        how: Any = {"mask": mask, "scale": self.scale, "softcap": self.softcap}
        o, lse = tiled_forward(grouped, k[:, :, None], v[:, :, None], **how)
        return o.flatten(1, 2), lse.flatten(1, 2)

    def backward(self, grads: Any, saved: tuple[torch.Tensor, ...], mask: Mask) -> Gradients:
        """Return the gradients of q, k and v.

        Args:
            grads: of o, and of lse or None.
            saved: q, k and v of the part, o and lse of whole rows.
            mask: of the part.
        """
        q, k, v, o, lse = saved
        if self.family != TILED:
            options = self._options(mask, q, k)
            gradients: Gradients = torch.ops.flashattn.backward(*grads, *saved, *options)
            return gradients
        grouped: Any = [
            None if x is None else x.unflatten(1, (k.shape[1], -1)) for x in (*grads, q, o, lse)
        ]
        saved = grouped[2], k[:, :, None], v[:, :, None], *grouped[3:]
        how: Any = {"mask": mask, "scale": self.scale, "softcap": self.softcap}
        dq, dk, dv = tiled_backward((grouped[0], grouped[1]), saved, **how)
        return dq.flatten(1, 2), dk[:, :, 0], dv[:, :, 0]


def _given(options: tuple[Any, ...]) -> tuple[str, Plan, Kernels, bool]:
    """Return the group, this rank's plan, the kernels, and whether keys are kept."""
    group, rank, world, kind, seq_q, seq_kv, left, right, corner, *how, keep = options
    task = Task(Mask(left, right, corner), seq_q, seq_kv, Placement(kind, world))
    return group, plan(task, rank), Kernels(*how), keep


def _merge(o: torch.Tensor, lse: torch.Tensor, part: Outputs) -> None:
    """Add a part's keys to o [B, H, T, D] and lse [B, H, T], in place."""
    total = torch.logaddexp(lse, part[1])
    finite = total.masked_fill(total == -torch.inf, 0)  # of a row that sees no key
    before, added = ((x - finite).exp()[..., None] for x in (lse, part[1]))
    o.mul_(before).addcmul_(part[0], added)
    lse.copy_(total)


def _like(x: torch.Tensor, pattern: torch.Tensor) -> torch.Tensor:
    """Return x laid out as ``torch.empty_like(pattern)``, as the fake operators promise."""
    there = torch.empty_like(pattern, dtype=x.dtype)
    return x if x.stride() == there.stride() else there.copy_(x)


def _lse_like(q: torch.Tensor) -> torch.Tensor:
    return q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))


@torch.library.custom_op(
    "flashattn::parallel_forward",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
)
def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return o, lse, and the fetched keys, of which there are none unless they are kept."""
    group, planned, kernels, keep = _given(options)
    with beside(q.device):
        kv = fetch(rows_first(k, v), planned, group)
    own = planned.own is not None
    o, lse = torch.empty_like(q), _lse_like(q)
    if planned.own is not None:
        o, lse = kernels.forward(q, k, v, planned.own)
    join(q.device)
    for rows, keys, mask in planned.parts:
        found = kernels.forward(q[:, :, rows], *heads_first(kv[keys]), mask)
        if own:
            _merge(o[:, :, rows], lse[:, :, rows], found)
        elif len(planned.parts) == 1:
            o, lse = found
        else:
            o[:, :, rows], lse[:, :, rows] = found
    return _like(o, q), lse.contiguous(), kv if keep else kv.new_empty(0)


@_forward.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _, planned, _, keep = _given(options)
    batch, heads, _, width = k.shape
    kept = (planned.keys, batch, heads, 2 * width) if keep else (0,)
    del v
    return torch.empty_like(q), _lse_like(q), k.new_empty(kept)


@torch.library.custom_op(
    "flashattn::parallel_backward",
    mutates_args=(),
    schema="(Tensor grad_o, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse,"
    f" Tensor kept, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
)
def _backward(
    grad_o: torch.Tensor,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    kept: torch.Tensor,
    *options: Any,
) -> Gradients:
    """Return the gradients of q, k and v.

    Own keys are computed while the others are fetched; where these were kept, while their gradients
    are given back.
    """
    group, planned, kernels, keep = _given(options)

    def differentiate(rows: slice, k: torch.Tensor, v: torch.Tensor, mask: Mask) -> Gradients:
        of_o, of_lse = (None if x is None else x[:, :, rows] for x in (grad_o, grad_lse))
        of_lse = None if of_lse is None else of_lse.contiguous()
        saved = q[:, :, rows], k, v, o[:, :, rows], lse[:, :, rows].contiguous()
        return kernels.backward((of_o, of_lse), saved, mask)

    own, every = None, slice(0, q.shape[2])
    with beside(q.device):
        kv = kept if keep else fetch(rows_first(k, v), planned, group)
    if planned.own is not None and not keep:
        own = differentiate(every, k, v, planned.own)
    join(q.device)
    dkv, dqs = _through(planned, kv, differentiate)
    with beside(q.device):
        total = give_back(dkv, planned, group)
    if planned.own is not None and keep:
        own = differentiate(every, k, v, planned.own)
    join(q.device)
    dq = torch.empty_like(q) if own is None else own[0]
    for rows, x in dqs:
        dq[:, :, rows] = x if own is None else dq[:, :, rows] + x
    dk, dv = heads_first(total)
    if own is not None:
        dk, dv = dk.add_(own[1]), dv.add_(own[2])
    return _like(dq, q), torch.empty_like(k).copy_(dk), torch.empty_like(v).copy_(dv)


def _through(
    planned: Plan, kv: torch.Tensor, differentiate: Callable[..., Gradients]
) -> tuple[torch.Tensor, list[tuple[slice, torch.Tensor]]]:
    """Return the gradients of the buffer [keys, B, G, 2 D], and of q for each part's rows."""
    whole = bool(planned.parts) and size(planned.parts[0].keys) == planned.keys
    dkv, dqs = torch.empty_like(kv) if whole else torch.zeros_like(kv), []
    for i, (rows, keys, mask) in enumerate(planned.parts):
        dq, *gradients = differentiate(rows, *heads_first(kv[keys]), mask)
        for x, there in zip(gradients, heads_first(dkv[keys]), strict=True):
            _ = there.copy_(x) if whole and i == 0 else there.add_(x)
        dqs.append((rows, dq))
    return dkv, dqs


@_backward.register_fake
def _(grad_o: object, grad_lse: object, *inputs: Any) -> Gradients:
    del grad_o, grad_lse
    q, k, v, *_ = inputs
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    q, k, v, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, grad_o: torch.Tensor | None, grad_lse: torch.Tensor | None, _: object
) -> tuple[torch.Tensor | None, ...]:
    q, k, v, o, lse, kept = ctx.saved_tensors
    grad_o = torch.zeros_like(o) if grad_o is None else grad_o
    gradients = torch.ops.flashattn.parallel_backward(
        grad_o, grad_lse, q, k, v, o, lse, kept, *ctx.options
    )
    return *gradients, *[None] * len(ctx.options)


def _once(ctx: Any, *grads: torch.Tensor) -> None:
    del ctx, grads
    raise NotImplementedError("parallel attention has no second derivative")


_forward.register_autograd(_differentiate, setup_context=_save)
_backward.register_autograd(_once)
