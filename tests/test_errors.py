"""Errors in units of the last place: 1 is eps times the largest element, and budgets are beside."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from flashattn.problem import Problem
from flashattn.reference import reference_attention
from flashattn.registry import Impl
from flashattn.testing import errors as errors_module
from flashattn.testing.accuracy import Question, Truth
from flashattn.testing.errors import VALUES, answers, errors
from flashattn.testing.values import VALUES as MADE

PROBLEM = Problem(heads=2, seq_q=40, head_dim=16, causal=True, dtype="bfloat16")


def exactly(q, k, v, *, causal, scale):
    """Answer in fp64, rounded once: o and the logsumexp."""
    q, k, v = (x.double() for x in (q, k, v))
    o, lse = reference_attention(q, k, v, diagonal=0 if causal else None, scale=scale)
    return o.bfloat16(), lse.float()


def errors_of(call, problem=PROBLEM, *, lse=True, device="cpu"):
    """Return the errors of a callable."""
    impl = Impl(name="mine", call=call, limits=lambda *_: None, lse=lse)
    where = torch.device(device)
    return errors(answers(impl, problem, where), problem, where)


@pytest.fixture(scope="module")
def rounded():
    """The errors of whoever only rounds."""
    return errors_of(exactly)


def test_values_can_be_made():
    """Every kind of values that is asked is one that inputs can be made of."""
    assert set(VALUES) <= set(MADE)


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("name", ["o", "lse", "dq", "dk", "dv"])
def test_rounding_costs_half_a_unit(rounded, values, name):
    """A result that is rounded once is off by no more than half a unit, and not by nothing."""
    error = rounded[values][name]
    assert 0 < error["max"] <= 0.5
    assert 0 < error["mean"] <= error["max"]
    assert abs(error["bias"]) <= error["mean"]


def test_units_and_budgets_are_those_of_the_suite(rounded):
    """An error in units times its unit is the error; budgets are the ones that tests hold it to."""
    question = Question(problem=PROBLEM, values="extreme", lse=False)
    truth = Truth.of(question.draw(), question.enlarged().draw())
    unit = 2**-7 * truth.exact["dk"].abs().max().item()
    budgets = truth.budgets("dk", truth.exact["dk"].bfloat16())
    assert rounded["extreme"]["dk"]["max_budget"] == pytest.approx(budgets["max"] / unit)
    assert rounded["extreme"]["dk"]["mean_budget"] == pytest.approx(budgets["mean"] / unit)
    assert rounded["extreme"]["lse"]["mean_budget"] is None  # 80 rows are no sample


def test_logsumexp_is_told_in_fp32():
    """A logsumexp that comes in bf16 is off by the many units of fp32 that it lost."""

    def narrow(q, k, v, **options):
        o, lse = exactly(q, k, v, **options)
        return o, lse.bfloat16()

    assert 1e3 < errors_of(narrow)["normal"]["lse"]["max"] <= 2**15  # half a unit of bf16


def test_unit_is_as_small_as_its_tensor():
    """Of a tensor of small numbers the unit is small; of zeros it is the smallest there is."""
    question = Question(problem=PROBLEM, lse=False)
    truth = Truth.of(question.draw())
    for factor, unit in ((2.0**-40, 2.0**-40), (0.0, 2.0**-126)):
        small = replace(truth, exact={"o": (factor * truth.exact["o"].sign())})
        got = (small.exact["o"] + 4 * 2.0**-7 * unit).bfloat16()
        assert errors_module._in_units(small, "o", got)["max"] == 4


def test_bias_has_a_sign():
    """What is lost in every element alike is a bias of its size, and of its sign."""

    def low(q, k, v, **options):
        o, _ = exactly(q, k, v, **options)
        return o - 0.01

    error = errors_of(low, lse=False)["normal"]["o"]
    assert error["bias"] == pytest.approx(-error["mean"], rel=0.05)
    assert error["bias"] < -0.3


def test_not_finite_is_infinitely_wrong():
    """NaN where the exact result is finite is an infinite error, and no bias."""

    def poisoned(q, k, v, **options):
        o, lse = exactly(q, k, v, **options)
        return torch.where(o == o.max(), torch.nan, o), lse

    error = errors_of(poisoned)["normal"]["o"]
    assert (error["max"], error["mean"], error["bias"]) == (math.inf, math.inf, None)


def test_nothing_is_no_error():
    """Where exact and got are all zero the error is 0, though the unit is nearly nothing."""
    error = errors_of(exactly, Problem(seq_q=5, seq_kv=1, head_dim=16, dtype="bfloat16"))
    assert error["normal"]["o"]["max"] == 0
