"""What is asked of an implementation: a sample, the case drawn of it, and its run among poison."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch

from flashattn.bounds import Bounds
from flashattn.checks import check_scale
from flashattn.problem import Problem
from flashattn.reference import reference_attention
from flashattn.resolve import bounds_of_lengths
from flashattn.testing.form import check_form
from flashattn.testing.inputs import make_grads, make_inputs, make_scored
from flashattn.testing.poison import guard
from flashattn.testing.values import ALIKE

Call = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
Outputs = dict[str, torch.Tensor]
LEARNED = ("bias", "sink")  # of what scores are made with: has a gradient
POOL = 4096
POOL_SCORES = 1 << 22  # that further draws may have, at the most


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What is drawn: a problem, and how its inputs are made."""

    problem: Problem  # shapes, mask and dtype
    seed: int = 0
    device: torch.device | str = "cpu"
    values: str = "normal"  # a key of ``values.VALUES``
    layout: str = "contiguous"  # a key of ``layouts.LAYOUTS``
    grad_layout: str = "contiguous"  # of the gradients of o and lse, a key of ``GRAD_LAYOUTS``
    scale: float | None = None  # factor on the scores; None is D ** -0.5
    grad: bool = True  # whether the gradients are asked for, too
    lse: bool = True  # whether the logsumexp (and, with ``grad``, its gradient) is
    denormals: bool = True  # whether they must not be flushed; a GPU may

    def draw(self) -> Case:
        """Make the inputs and gradients."""
        inputs = make_inputs(
            self.problem, seed=self.seed, device=self.device, values=self.values, layout=self.layout
        )
        grad_o, grad_lse = make_grads(
            self.problem, seed=self.seed, device=self.device, layout=self.grad_layout
        )
        return Case(
            problem=self.problem,
            inputs=inputs,
            scored=make_scored(self.problem, seed=self.seed, device=self.device),
            scale=check_scale(self.scale, self.problem.head_dim),
            grad_o=grad_o if self.grad else None,
            grad_lse=grad_lse if self.grad and self.lse else None,
            lse=self.lse,
            denormals=self.denormals,
        )

    def enlarged(self) -> Sample:
        """Return the same problem in larger batches, ``POOL`` elements in all."""
        p = self.problem
        rows, scores = min(p.seq_q, p.seq_kv), p.batch * p.heads * p.seq_q * p.seq_kv
        alike = self.values in ALIKE and rows > 0
        elements = p.batch * (p.kv_heads if alike else p.heads * rows) * p.dv
        copies = -(-POOL // elements) if elements else 1
        if alike and elements:
            copies = max(1, min(copies, POOL_SCORES // scores))
        return replace(self, problem=replace(p, batch=p.batch * copies), seed=self.seed + 1)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A drawn sample: inputs, what scores are made with, gradients where they are asked for."""

    problem: Problem
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    scale: float
    scored: Mapping[str, torch.Tensor] = field(default_factory=dict)
    grad_o: torch.Tensor | None = None
    grad_lse: torch.Tensor | None = None
    lse: bool = True
    denormals: bool = True

    def batches(self, first: int, step: int) -> Case:
        """Return each ``step``-th batch: one of the sample's own, many of further draws."""
        own = slice(first, None, step)
        q, k, v = (x[own] for x in self.inputs)
        grads = self.grad_o, self.grad_lse
        grad_o, grad_lse = (None if x is None else x[own] for x in grads)
        return replace(
            self,
            problem=replace(self.problem, batch=len(q)),
            inputs=(q, k, v),
            scored={name: x if len(x) == 1 else x[own] for name, x in self.scored.items()},
            grad_o=grad_o,
            grad_lse=grad_lse,
        )

    @property
    def bounds(self) -> Bounds | None:
        """See ``bounds_of``."""
        return bounds_of(self.problem, self.inputs[0].device)

    @property
    def seen(self) -> torch.Tensor:
        """Whether a query sees a key, bool [T, S]."""
        if (bounds := self.bounds) is not None:
            return bounds.seen[0]
        t, s = (torch.arange(x.shape[2], device=x.device) for x in self.inputs[:2])
        seen: torch.Tensor = self.problem.band.sees(t[:, None], s).expand(len(t), -1)
        return seen


def bounds_of(p: Problem, device: torch.device) -> Bounds | None:
    """Return the bounds of packed documents or of a prefix, None if there are neither."""
    if not p.by_rows or p.documents == "unknown":
        return None
    return bounds_of_lengths(p.documents, p.prefix, p.mask, p.seq_q, p.seq_kv, device)


def run(call: Call, case: Case, *, dtype: torch.dtype | None = None) -> Outputs:
    """Return what ``call(q, k, v, **scored)`` gives: o, lse and gradients as the case asks.

    The call has its mask and scale bound. A ``dtype`` is what the inputs are cast to first.
    """
    q, k, v = (x.detach() if dtype is None else x.detach().to(dtype) for x in case.inputs)
    scored = {name: x.detach() for name, x in case.scored.items()}
    learned = [name for name in LEARNED if name in scored]
    scored |= {name: scored[name].to(dtype) for name in learned if dtype is not None}
    if case.grad_o is not None:
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        scored |= {name: scored[name].requires_grad_() for name in learned}
    with torch.set_grad_enabled(case.grad_o is not None):
        o, lse = call(q, k, v, **scored)
    results = {"o": o}
    if case.lse and lse is not None:
        results["lse"] = lse
    if case.grad_o is None:
        return results
    outputs, grads = [o], [case.grad_o.to(o.dtype)]
    if case.grad_lse is not None and lse is not None:
        outputs, grads = [o, lse], [*grads, case.grad_lse.to(lse.dtype)]
    inputs = q, k, v, *(scored[name] for name in learned)
    gradients = torch.autograd.grad(outputs, inputs, grads)
    names = "dq", "dk", "dv", *(f"d{name}" for name in learned)
    results |= dict(zip(names, gradients, strict=True))
    return {name: x.detach() for name, x in results.items()}


def run_reference(case: Case, dtype: torch.dtype | None = None) -> Outputs:
    """Return the reference's outputs in ``dtype``: fp64 for exact, None for naive."""
    p, bounds = case.problem, case.bounds

    def call(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **scored: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return reference_attention(
            q, k, v, mask=p.mask, scale=case.scale, softcap=p.softcap, bounds=bounds, **scored
        )

    return run(call, case, dtype=dtype)


def run_checked(call: Call, case: Case) -> Outputs:
    """Run, and check that what comes are such tensors as were promised (see ``form``)."""

    def checked(
        *inputs: torch.Tensor, **scored: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        o, lse = call(*inputs, **scored)
        given = {"o": o} if lse is None or not case.lse else {"o": o, "lse": lse}
        check_form(inputs, given, grad=case.grad_o is not None)
        return o, lse

    outputs = run(checked, case)
    check_form(case.inputs, outputs, scored=case.scored)
    return outputs


def run_guarded(call: Call, case: Case) -> Outputs:
    """Run among poison: see ``poison.guard``, which raises when memory outside is written to."""
    grads = [x for x in (case.grad_o, case.grad_lse) if x is not None]
    with guard(*case.inputs, *case.scored.values(), *grads) as (q, k, v, *others):
        given = iter(others)
        scored = {name: next(given) for name in case.scored}
        grad_o = None if case.grad_o is None else next(given)
        grad_lse = None if case.grad_lse is None else next(given)
        case = replace(case, inputs=(q, k, v), scored=scored, grad_o=grad_o, grad_lse=grad_lse)
        return run_checked(call, case)
