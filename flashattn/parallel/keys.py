"""Context-parallel attention that fetches keys, and merges partial results by their logsumexp.

It has two operators, which ``torch.compile`` keeps whole, with their collectives and streams. The
backward needs only o and lse of whole rows: the weights of a part are exp(S - lse), and gradients
of parts add up (Liu et al., 2023, "Ring Attention with Blockwise Transformers").
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import flashattn.ops  # noqa: F401 - defines the operators
from flashattn.bounds import Bounds, Intervals
from flashattn.mask import Mask
from flashattn.parallel.exchange import (
    beside,
    copy_rows,
    fetch,
    give_back,
    heads_first,
    join,
    rows_first,
)
from flashattn.parallel.placement import Placement
from flashattn.parallel.plan import Plan, Task, plan, size
from flashattn.plan.spec import Extras
from flashattn.tiled import tiled_backward, tiled_forward

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName

Outputs = tuple[torch.Tensor, torch.Tensor]
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Seen = Mask | Bounds
TILED = "tiled"
ALL = slice(None)

# Arguments of both operators besides rows: bounds over own keys and the buffer, or none; where
# (group, rank, placement); what (whole lengths, mask); how (see Kernels); whether to keep keys.
_OPTIONS = (
    "Tensor[] bounds, str group, int rank, int world, str placement, SymInt seq_q, SymInt seq_kv,"
    " SymInt? left, SymInt? right, str corner, str family, float scale, float? softcap,"
    " str precision, bool deterministic, bool keep"
)


class Kernels(NamedTuple):
    """The kernels that compute a part, and their options."""

    family: str  # of our kernels, see ``plan.spec``, or "tiled", the algorithm in PyTorch
    scale: float  # factor on the scores
    softcap: float | None  # bound on the scores; None means no bound
    precision: str  # see ``attention``
    deterministic: bool  # see ``attention``

    def _options(self, seen: Seen, q: torch.Tensor, k: torch.Tensor) -> tuple[Any, ...]:
        how = 0, self.scale, self.softcap, self.precision, self.family, self.deterministic
        if isinstance(seen, Bounds):
            return *Extras(*seen), None, None, *how
        band = seen.over(q.shape[2], k.shape[2])
        return *Extras(), band.left, band.right, *how

    def _of_tiled(self, seen: Seen) -> dict[str, Any]:
        mask = Intervals(seen, dims=2) if isinstance(seen, Bounds) else seen
        return {"mask": mask, "scale": self.scale, "softcap": self.softcap}

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: Seen) -> Outputs:
        """Return o [B, H, T, D] and lse [B, H, T]."""
        if self.family != TILED:
            o, lse = torch.ops.flashattn.forward(q, k, v, *self._options(seen, q, k))
            return o, lse
        q, k, v = _finite(q, k, v, seen)
        grouped = q.unflatten(1, (k.shape[1], -1))
        o, lse = tiled_forward(grouped, k[:, :, None], v[:, :, None], **self._of_tiled(seen))
        o = o.flatten(1, 2)
        o = seen.without_fully_masked(o) if isinstance(seen, Bounds) else o
        return o, lse.flatten(1, 2)

    def merge(self, o: torch.Tensor, lse: torch.Tensor, part: Outputs) -> None:
        """Merge the result of a part into o [B, H, T, D] and lse [B, H, T], in place."""
        if self.family != TILED:
            from flashattn.kernels.portable import merge  # noqa: PLC0415 - it imports Triton

            merge.launch(o, lse, *part)
            return
        total = torch.logaddexp(lse, part[1])
        finite = total.masked_fill(total == -torch.inf, 0)  # of a row that sees no key
        before, added = ((x - finite).exp()[..., None] for x in (lse, part[1]))
        o.mul_(before).addcmul_(part[0], added)
        lse.copy_(total)

    def backward(self, grads: Any, saved: tuple[torch.Tensor, ...], seen: Seen) -> Gradients:
        """Return the gradients of q, k and v.

        Args:
            grads: the gradients of o and lse; that of lse may be None.
            saved: q, k and v of the part, o and lse of whole rows.
            seen: which keys of the part these rows see.
        """
        q, k, v, o, lse = saved
        if self.family != TILED:
            options = self._options(seen, q, k)
            dq, dk, dv, *_ = torch.ops.flashattn.backward(*grads, *saved, *options, False)  # noqa: FBT003
            return dq, dk, dv
        q, k, v = _finite(q, k, v, seen)
        grouped: Any = [
            None if x is None else x.unflatten(1, (k.shape[1], -1)) for x in (*grads, q, o, lse)
        ]
        saved = grouped[2], k[:, :, None], v[:, :, None], *grouped[3:]
        with torch.autocast(q.device.type, enabled=False):
            dq, dk, dv, *_ = tiled_backward((grouped[0], grouped[1]), saved, **self._of_tiled(seen))
        return dq.flatten(1, 2), dk[:, :, 0], dv[:, :, 0]


def _finite(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: Seen
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return seen.without_unseen(q, k, v) if isinstance(seen, Bounds) else (q, k, v)


class Given(NamedTuple):
    """The arguments of an operator besides rows."""

    group: GroupName  # name of the process group
    plan: Plan  # of this rank
    kernels: Kernels  # for all parts
    own: Bounds | None  # which own keys this rank's rows see, if bounds say it
    rest: Bounds | None  # which keys of the buffer they see, likewise
    keep: bool  # whether fetched keys are kept

    @classmethod
    def of(cls, options: tuple[Any, ...]) -> Given:
        """Read the operators' arguments."""
        bounds, group, rank, world, kind, seq_q, seq_kv, left, right, corner, *how, keep = options
        mask, placement = Mask(left, right, corner), Placement(kind, world)
        ours = plan(Task(mask, seq_q, seq_kv, placement, bool(bounds)), rank)
        own, rest = (Bounds(*bounds[:2]), Bounds(*bounds[2:])) if bounds else (None, None)
        return cls(group, ours, Kernels(*how), own, rest, keep)


def _like(x: torch.Tensor, pattern: torch.Tensor) -> torch.Tensor:
    """Return x laid out as ``torch.empty_like(pattern)``, as the fake operators promise."""
    there = torch.empty_like(pattern, dtype=x.dtype)
    return x if x.stride() == there.stride() else there.copy_(x)


def _lse_like(q: torch.Tensor) -> torch.Tensor:
    return q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))


# Not ``torch.library.custom_op``, whose first call imports the compiler: a second or two.
_LIBRARY = torch.library.Library("flashattn", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag,)
_LIBRARY.define(
    f"parallel_forward(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    tags=_TAGS,
)
_LIBRARY.define(
    "parallel_backward(Tensor grad_o, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor o,"
    f" Tensor lse, Tensor kept, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    tags=_TAGS,
)


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return o, lse, and the fetched keys, which are empty unless they are kept."""
    group, ours, kernels, own, rest, keep = Given.of(options)
    with beside(q.device):
        kv = fetch(rows_first(k, v), ours, group)
    o, lse = torch.empty_like(q), _lse_like(q)

    def set_rows(rows: slice, found: Outputs) -> None:
        nonlocal o, lse
        if size(rows) == q.shape[2]:
            o, lse = found
        else:
            o[:, :, rows], lse[:, :, rows] = found

    for rows, keys, mask in ours.own:
        set_rows(rows, kernels.forward(q[:, :, rows], k[:, :, keys], v[:, :, keys], own or mask))
    join(q.device)
    for rows, keys, mask in ours.parts:
        found = kernels.forward(q[:, :, rows], *heads_first(kv[keys]), rest or mask)
        if ours.own:
            kernels.merge(o[:, :, rows], lse[:, :, rows], found)
        else:
            set_rows(rows, found)
    return _like(o, q), lse.contiguous(), kv if keep else kv.new_empty(0)


@torch.library.register_fake("flashattn::parallel_forward", lib=_LIBRARY)
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    given, (batch, heads, _, width) = Given.of(options), k.shape
    kept = (given.plan.keys, batch, heads, 2 * width) if given.keep else (0,)
    del v
    return torch.empty_like(q), _lse_like(q), k.new_empty(kept)


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

    Own keys are computed during both exchanges: half of the heads while keys are fetched, and half
    while gradients are returned. If keys were kept, all heads run during the second exchange; else
    a single head runs during the first.
    """
    name, ours, kernels, own, rest, keep = Given.of(options)

    def differentiate(
        rows: slice, k: torch.Tensor, v: torch.Tensor, seen: Any, heads: slice = ALL
    ) -> Gradients:
        of_o, of_lse = (None if x is None else x[:, heads, rows] for x in (grad_o, grad_lse))
        of_lse = None if of_lse is None else of_lse.contiguous()
        saved = q[:, heads, rows], k, v, o[:, heads, rows], lse[:, heads, rows].contiguous()
        return kernels.backward((of_o, of_lse), saved, seen)

    def of_own(shares: list[slice]) -> None:
        group = q.shape[1] // k.shape[1]
        for x, (rows, keys, mask) in product(shares, ours.own):
            heads = slice(x.start * group, x.stop * group)
            seen = own or mask
            own_q, *own_kv = differentiate(rows, k[:, x, keys], v[:, x, keys], seen, heads)
            dq[:, heads, rows] = own_q
            for total, found in zip(totals, own_kv, strict=True):
                total[:, x, keys] = found

    made = torch.empty_like if ours.own else torch.zeros_like
    # If each element is added to once, the sum rounds as it would in fp32.
    wide = k.dtype if ours.once else torch.promote_types(k.dtype, torch.float32)
    dq = torch.empty_like(q)
    totals = [made(k, dtype=wide) for _ in range(2)]
    early, late = _shares(k.shape[1] if ours.own else 0, keep=keep)
    with beside(q.device):
        kv = kept if keep else fetch(rows_first(k, v), ours, name)
    of_own(early)
    join(q.device)
    dkv, dqs = _through(ours, kv, rest, differentiate)
    with beside(q.device):
        arrived = give_back(dkv, ours, name)
    of_own(late)
    join(q.device)
    for rows, x in dqs:
        there = dq[:, :, rows]
        _ = there.add_(x) if ours.own else there.copy_(x)
    for rows, x in arrived:
        for total, found in zip(totals, heads_first(x), strict=True):
            total[:, :, rows] += found
    dk, dv = (total.to(k.dtype) for total in totals)
    return dq, dk, dv


def _shares(heads: int, *, keep: bool) -> tuple[list[slice], list[slice]]:
    """Return the key heads that are computed during the first exchange, and during the second."""
    first = 0 if keep else (heads + 1) // 2
    early, late = slice(0, first), slice(first, heads)
    return [early] * (first > 0), [late] * (first < heads)


def _through(
    ours: Plan, kv: torch.Tensor, rest: Bounds | None, differentiate: Callable[..., Gradients]
) -> tuple[torch.Tensor, list[tuple[slice, torch.Tensor]]]:
    """Return the gradients of the buffer [keys, B, G, 2 D], and of q for each part's rows."""
    whole = bool(ours.parts) and size(ours.parts[0].keys) == ours.keys
    dkv, dqs = torch.empty_like(kv) if whole else torch.zeros_like(kv), []
    for i, (rows, keys, mask) in enumerate(ours.parts):
        dq, *gradients = differentiate(rows, *heads_first(kv[keys]), rest or mask)
        for x, there in zip(gradients, heads_first(dkv[keys]), strict=True):
            if whole and i == 0:
                copy_rows(there, x)
            else:
                there.add_(x)
        dqs.append((rows, dq))
    return dkv, dqs


@torch.library.register_fake("flashattn::parallel_backward", lib=_LIBRARY)
def _(grad_o: object, grad_lse: object, *inputs: Any) -> Gradients:
    del grad_o, grad_lse
    q, k, v, *_ = inputs
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    q, k, v, bounds, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output, *bounds)
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, grad_o: torch.Tensor | None, grad_lse: torch.Tensor | None, _: object
) -> tuple[Any, ...]:
    q, k, v, o, lse, kept, *bounds = ctx.saved_tensors
    grad_o = torch.zeros_like(o) if grad_o is None else grad_o
    gradients = torch.ops.flashattn.parallel_backward(
        grad_o, grad_lse, q, k, v, o, lse, kept, bounds, *ctx.options
    )
    return *gradients, [None] * len(bounds), *[None] * len(ctx.options)


def _once(ctx: Any, *grads: torch.Tensor) -> None:
    del ctx, grads
    raise NotImplementedError("parallel attention has no second derivative")


_LIBRARY.impl("parallel_forward", _forward, "CompositeExplicitAutograd")
_LIBRARY.impl("parallel_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_autograd(
    "flashattn::parallel_forward", _differentiate, setup_context=_save, lib=_LIBRARY
)
torch.library.register_autograd("flashattn::parallel_backward", _once, lib=_LIBRARY)
