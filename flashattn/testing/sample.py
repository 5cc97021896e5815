"""Test inputs: a sample, the case drawn from it, and runs of an implementation on the case."""

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
LEARNED = ("bias", "sink")  # inputs of scores that have gradients
POOL = 4096
POOL_SCORES = 1 << 22  # at most so many scores in further draws


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A problem, and how its inputs are drawn."""

    problem: Problem  # shapes, mask and dtype
    seed: int = 0
    device: torch.device | str = "cpu"
    values: str = "normal"  # a key of ``values.VALUES``
    layout: str = "contiguous"  # a key of ``layouts.LAYOUTS``
    grad_layout: str = "contiguous"  # of the gradients of o and lse, a key of ``GRAD_LAYOUTS``
    scale: float | None = None  # factor on the scores; None is D ** -0.5
    grad: bool = True  # whether gradients are computed, too
    lse: bool = True  # whether the logsumexp is, and with ``grad`` its gradient
    denormals: bool = True  # whether flushing them is an error; on a GPU it never is

    def draw(self) -> Case:
        """Draw the inputs and gradients."""
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
        """Return the same problem with a larger batch, ``POOL`` elements in all."""
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
    """A drawn sample: inputs, the gradients of its outputs, and ``scored``: slopes, bias, sinks."""

    problem: Problem
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    scale: float
    scored: Mapping[str, torch.Tensor] = field(default_factory=dict)
    grad_o: torch.Tensor | None = None
    grad_lse: torch.Tensor | None = None
    lse: bool = True
    denormals: bool = True

    def batches(self, first: int, step: int) -> Case:
        """Return every ``step``-th batch from ``first`` on."""
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

    def with_hidden(self, value: float) -> Case:
        """Return a case with ``value`` in all ``hidden_rows``, also of grad_o."""
        dead, unseen = hidden_rows(self.problem, self.inputs[0].device)
        q, k, v = (x.clone() for x in self.inputs)
        q[:, :, dead], k[:, :, unseen], v[:, :, unseen] = value, value, value
        if self.grad_o is None:
            return replace(self, inputs=(q, k, v))
        return replace(self, inputs=(q, k, v), grad_o=self.grad_o.masked_fill(dead[:, None], value))

    @property
    def bounds(self) -> Bounds | None:
        """Return the bounds of the problem, see ``bounds_of``."""
        return bounds_of(self.problem, self.inputs[0].device)

    @property
    def seen(self) -> torch.Tensor:
        """Return whether a query sees a key, bool [T, S]."""
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


def hidden_rows(p: Problem, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which queries see no key, bool [T], and which keys no query sees, bool [S].

    Raises:
        ValueError: the problem has no bounds of rows.
    """
    bounds = bounds_of(p, device)
    if bounds is None:
        raise ValueError(f"wanted documents or a prefix, got {p}")
    return bounds.fully_masked[0], bounds.unseen_keys[0]


def run(call: Call, case: Case, *, dtype: torch.dtype | None = None) -> Outputs:
    """Run ``call(q, k, v, **scored)``; return o, and lse and gradients if the case wants them.

    Mask and scale are already bound to ``call``. With a ``dtype``, inputs are cast to it first.
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
    """Return the reference's outputs in ``dtype``: fp64 for the exact ones, None for naive's."""
    p, bounds = case.problem, case.bounds

    def call(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **scored: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return reference_attention(
            q, k, v, mask=p.mask, scale=case.scale, softcap=p.softcap, bounds=bounds, **scored
        )

    return run(call, case, dtype=dtype)


def run_checked(call: Call, case: Case) -> Outputs:
    """Run, and check the form of all results (see ``form``)."""

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
    """Run on inputs surrounded by poison; see ``poison.guard`` for the errors it raises."""
    grads = [x for x in (case.grad_o, case.grad_lse) if x is not None]
    with guard(*case.inputs, *case.scored.values(), *grads) as (q, k, v, *others):
        given = iter(others)
        scored = {name: next(given) for name in case.scored}
        grad_o = None if case.grad_o is None else next(given)
        grad_lse = None if case.grad_lse is None else next(given)
        case = replace(case, inputs=(q, k, v), scored=scored, grad_o=grad_o, grad_lse=grad_lse)
        return run_checked(call, case)
