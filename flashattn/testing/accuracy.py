"""Error budgets, derived and never typed: how wrong may an implementation be?

Everything is judged against the reference in fp64 on the same quantised inputs, beside naive: the
reference in the implementation's own dtype. Writing e(x) for |x - exact|, for each of o, lse, dq,
dk, dv::

    max e(got)  <=  2.0 * max e(naive)  + eps * max |exact|  + max stored
    mean e(got) <=  1.1 * mean e(naive) + eps * mean |exact| + mean stored

``eps`` belongs to the dtype of ``got`` and stands for one rounding of the result. ``stored`` is for
gradients of q and k only: a fused backward finds dS = P * (dP - delta) from delta = rowsum(dO * O)
with the O that forward stored in its own dtype, so delta is off by up to eps * rowsum(|dO * O|) where
naive, which keeps P, is not. Propagated, that is scale * eps * rowsum(|dO * O|) * (P @ |K|) for dq and
its transpose for dk. It matters where the exact gradient cancels: with one key, dS is exactly 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from flashattn.problem import Problem
from flashattn.reference import reference_attention

Call = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
Outputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """Inputs, and the gradients of o and lse when the backward is judged, too."""

    problem: Problem
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    scale: float
    grad_o: torch.Tensor | None = None
    grad_lse: torch.Tensor | None = None


def run(call: Call, case: Case, *, dtype: torch.dtype | None = None) -> Outputs:
    """Return what ``call(q, k, v)`` gives: o, lse (if any) and, if the case has grad_o, dq, dk, dv.

    Args:
        call: the implementation, with its mask and scale bound.
        case: inputs and gradients.
        dtype: cast them first; None leaves them as they are.
    """
    q, k, v = (x.detach() if dtype is None else x.detach().to(dtype) for x in case.inputs)
    if case.grad_o is None:
        with torch.no_grad():
            o, lse = call(q, k, v)
        return {"o": o} | ({} if lse is None else {"lse": lse})
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    o, lse = call(q, k, v)
    results = {"o": o} | ({} if lse is None else {"lse": lse})
    outputs, grads = [o], [case.grad_o.to(o.dtype)]
    if lse is not None and case.grad_lse is not None:
        outputs, grads = [o, lse], [*grads, case.grad_lse.to(lse.dtype)]
    dq, dk, dv = torch.autograd.grad(outputs, (q, k, v), grads)
    return {name: x.detach() for name, x in results.items()} | {"dq": dq, "dk": dk, "dv": dv}


def run_reference(case: Case, dtype: torch.dtype | None = None, *, lse: bool = True) -> Outputs:
    """Return the reference's outputs in ``dtype``: fp64 for exact, None for naive.

    Args:
        case: inputs and gradients.
        dtype: computed in; None for the inputs' own.
        lse: False leaves the logsumexp and its gradient out.
    """

    def call(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        o, l = reference_attention(q, k, v, diagonal=case.problem.diagonal, scale=case.scale)  # noqa: E741
        return o, l if lse else None

    return run(call, case, dtype=dtype)


@dataclass(frozen=True)
class Error:
    """Error of one output: max, mean and signed mean of the elements' errors."""

    max: float
    mean: float
    bias: float

    @classmethod
    def of(cls, got: torch.Tensor, exact: torch.Tensor) -> Error:
        """Compare where ``exact`` is finite."""
        finite = exact.isfinite()
        errors = (got.double() - exact)[finite]
        if errors.numel() == 0:
            return cls(0.0, 0.0, 0.0)
        return cls(errors.abs().max().item(), errors.abs().mean().item(), errors.mean().item())


def stored_output_term(case: Case, exact: Outputs) -> Outputs:
    """Return what rounding the stored o does to dq and dk, for eps = 1 (see the module)."""
    if case.grad_o is None:
        return {}
    q, k, _ = (x.double() for x in case.inputs)
    shaken = (case.grad_o.double() * exact["o"]).abs().sum(dim=-1, keepdim=True) * abs(case.scale)
    keys = k.abs().requires_grad_()  # in v's place, so that o is P @ |K| and v's gradient P.T @ (shaken * |Q|)
    o, _ = reference_attention(q, k, keys, diagonal=case.problem.diagonal, scale=case.scale)
    (dk,) = torch.autograd.grad(o, keys, shaken * q.abs())
    return {"dq": shaken * o.detach(), "dk": dk}


def check_accuracy(got: Outputs, exact: Outputs, naive: Outputs, stored: Outputs) -> list[str]:
    """Return a sentence for each budget that is broken."""
    broken = []
    for name, x in got.items():
        truth = exact[name]
        if x.shape != truth.shape:
            broken.append(f"{name}: shape {list(x.shape)}, wanted {list(truth.shape)}")
            continue
        infinite = ~truth.isfinite()
        if not torch.equal(x.double()[infinite], truth[infinite]) or x[~infinite].isfinite().all().logical_not():
            broken.append(f"{name}: infinities or NaN where the exact result has none, or the reverse")
            continue
        eps = torch.finfo(x.dtype).eps
        mine, theirs = Error.of(x, truth), Error.of(naive[name], truth)
        size = truth[~infinite].abs()
        extra = stored.get(name, size.new_zeros(1))
        if size.numel() == 0:
            continue
        budgets = {
            "max": (mine.max, 2.0 * theirs.max + eps * (size.max() + extra.max()).item()),
            "mean": (mine.mean, 1.1 * theirs.mean + eps * (size.mean() + extra.mean()).item()),
        }
        broken += [
            f"{name}: {which} error {error:.3g} above its budget {budget:.3g} (naive: {theirs})"
            for which, (error, budget) in budgets.items()
            if not error <= budget
        ]
    return broken


def assert_accurate(call: Call, case: Case) -> None:
    """Run ``call`` on the case and hold every output to its budget.

    Raises:
        AssertionError: which outputs are off, by how much, and what was allowed.
    """
    got = run(call, case)
    lse = "lse" in got
    exact = run_reference(case, torch.float64, lse=lse)
    naive = run_reference(case, lse=lse)
    broken = check_accuracy(got, exact, naive, stored_output_term(case, exact))
    assert not broken, f"{case.problem}: " + "; ".join(broken)
