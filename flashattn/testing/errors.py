"""How wrong implementations are, in units of the last place, beside what they may be.

One unit is eps * max |exact|, at least eps times the smallest normal number: the last place of the
tensor's largest element. One unit serves a whole tensor, because an element near zero is a sum
whose terms cancel: what is lost in it is of the size of the terms, and in its own last places it
would be any number. A result that is only rounded is off by half a unit at the most. ``eps`` is of
the problem's dtype; of fp32 for the logsumexp, whatever the dtype (fp64 in fp64).

The gradients are those of o alone, so that they are the same task for those who return no
logsumexp. The bias is the mean of the signed errors: half a unit lost in every element shows there,
and cancels where errors are roundings.

Source: Goldberg, 1991, "What every computer scientist should know about floating-point arithmetic",
for the unit; Higham, 2002, "Accuracy and stability of numerical algorithms", section 7.1, for why a
tensor has one.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache, partial

import torch

from flashattn.problem import Problem
from flashattn.registry import Impl
from flashattn.testing.accuracy import Error, Expected
from flashattn.testing.sample import Case, Outputs, Sample, run

# Names of ``values.VALUES``: what is usual, one key that takes all, a logsumexp below -88.7, where
# exp() of it is 0 in fp32, values far larger than weights, and scores that are all alike.
VALUES = ("normal", "extreme", "negative", "huge_v", "ties")
Results = dict[str, Outputs]  # by values
Errors = dict[str, dict[str, dict[str, float | None]]]  # by values, output, and which error


@lru_cache(maxsize=len(VALUES))  # implementations of one problem run next to one another
def _expected(problem: Problem, device: torch.device, values: str) -> tuple[Case, Expected]:
    sample = Sample(problem=problem, device=device, values=values)
    case, enlarged = (replace(asked.draw(), grad_lse=None) for asked in (sample, sample.enlarged()))
    return case, Expected.of(case, enlarged)


def results(impl: Impl, problem: Problem, device: torch.device) -> Results:
    """Return what an implementation makes of a problem, o, lse, dq, dk, dv, by ``VALUES``."""
    cases = {values: _expected(problem, device, values)[0] for values in VALUES}
    return {
        values: run(partial(impl, **problem.keywords, scale=case.scale), case)
        for values, case in cases.items()
    }


def errors(given: Results, problem: Problem, device: torch.device) -> Errors:
    """Return the errors of ``results`` and their budgets, in units of the last place.

    Returns:
        By values and by output ``max``, ``mean`` and ``bias``, and ``max_budget`` and
        ``mean_budget``; a budget is None where the sample is too small for one. An output that is
        not finite where the exact one is has infinite errors and no bias.
    """
    return {
        values: {
            name: _in_units(_expected(problem, device, values)[1], name, got)
            for name, got in outputs.items()
        }
        for values, outputs in given.items()
    }


def _in_units(expected: Expected, name: str, got: torch.Tensor) -> dict[str, float | None]:
    exact, dtype = expected.exact[name], got.dtype
    if name == "lse":
        dtype = torch.promote_types(dtype, torch.float32)
    finite = exact.isfinite()
    largest = exact[finite].abs().max().item() if finite.any() else 0.0
    unit = torch.finfo(dtype).eps * max(largest, torch.finfo(dtype).smallest_normal)
    error, budgets = Error.of(got, exact), expected.budgets(name, got)
    found: dict[str, float | None] = {"max": math.inf, "mean": math.inf, "bias": None}
    if got[finite].isfinite().all():
        found = {"max": error.max / unit, "mean": error.mean / unit, "bias": error.bias / unit}
    for which in ("max", "mean"):
        found[f"{which}_budget"] = budgets[which] / unit if which in budgets else None
    return found
