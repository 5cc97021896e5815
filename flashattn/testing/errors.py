"""Errors of implementations and their budgets, in units of the last place.

A unit is eps * max |exact|, but at least eps times the smallest normal number: the last place of
the tensor's largest element. A tensor has a single unit, because an element near zero is a sum
whose terms cancel: its error is proportional to the terms, and could be any number of its own last
places. A correctly rounded result is off by at most half a unit. ``eps`` is that of the problem's
dtype; for the logsumexp it is that of fp32 (of fp64 in fp64).

The gradients are those of o alone, so that implementations that return no logsumexp have the same
task. The bias is the mean of the signed errors: a loss of half a unit in every element shows there,
while rounding errors cancel.

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

# Keys of ``values.VALUES``: ordinary values, one key with all the weight, a logsumexp below -88.7,
# where its exp() is 0 in fp32, values far larger than the weights, and scores with many ties.
VALUES = ("normal", "extreme", "negative", "huge_v", "ties")
Results = dict[str, Outputs]  # by values
Errors = dict[str, dict[str, dict[str, float | None]]]  # by values, output, and which error


@lru_cache(maxsize=len(VALUES))  # one implementation after another runs a problem
def _expected(problem: Problem, device: torch.device, values: str) -> tuple[Case, Expected]:
    sample = Sample(problem=problem, device=device, values=values)
    case, enlarged = (replace(asked.draw(), grad_lse=None) for asked in (sample, sample.enlarged()))
    return case, Expected.of(case, enlarged)


def results(impl: Impl, problem: Problem, device: torch.device) -> Results:
    """Return an implementation's o, lse, dq, dk and dv for a problem, by ``VALUES``."""
    cases = {values: _expected(problem, device, values)[0] for values in VALUES}
    return {
        values: run(partial(impl, **problem.keywords, scale=case.scale), case)
        for values, case in cases.items()
    }


def errors(given: Results, problem: Problem, device: torch.device) -> Errors:
    """Return the errors of ``results`` and their budgets, in units of the last place.

    Returns:
        For each of ``VALUES`` and each output: ``max``, ``mean``, ``bias``, ``max_budget`` and
        ``mean_budget``. A budget is None if the sample is too small for one. An output that is not
        finite where the exact one is finite has infinite errors and no bias.
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
