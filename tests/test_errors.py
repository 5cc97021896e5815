"""Errors and budgets in units of the last place: a unit is eps times the largest element."""

import math
from dataclasses import replace

import pytest
import torch

from flashattn.mask import Mask
from flashattn.problem import Problem
from flashattn.reference import reference_attention
from flashattn.registry import Impl
from flashattn.testing import errors as errors_module
from flashattn.testing.accuracy import Expected, Sample
from flashattn.testing.errors import VALUES, errors, results

CPU = torch.device("cpu")
PROBLEM = Problem(heads=2, seq_q=40, head_dim=16, causal=True, dtype="bfloat16")


def exactly(q, k, v, *, causal, scale):
    """Compute o and the logsumexp in fp64, and round once."""
    q, k, v = (x.double() for x in (q, k, v))
    o, lse = reference_attention(q, k, v, mask=Mask.of(causal), scale=scale)
    return o.bfloat16(), lse.float()


def errors_of(call, problem=PROBLEM):
    """Return the errors of a callable."""
    impl = Impl(name="mine", call=call, limits=lambda *_: None, lse=True)
    return errors(results(impl, problem, CPU), problem, CPU)


@pytest.fixture(scope="module")
def rounded():
    """Return the errors of an implementation that only rounds."""
    return errors_of(exactly)


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("name", ["o", "lse", "dq", "dk", "dv"])
def test_rounding_costs_half_a_unit(rounded, values, name):
    """A result that is rounded once is off by at most half a unit, and by more than 0."""
    error = rounded[values][name]
    assert 0 < error["max"] <= 0.5
    assert 0 < error["mean"] <= error["max"]
    assert abs(error["bias"]) <= error["mean"]


def test_units_and_budgets_are_those_of_the_suite(rounded):
    """Budgets in units, times the unit, are the budgets that tests hold errors to."""
    sample = Sample(problem=PROBLEM, values="extreme", lse=False)
    expected = Expected.of(sample.draw(), sample.enlarged().draw())
    unit = 2**-7 * expected.exact["dk"].abs().max().item()
    budgets = expected.budgets("dk", expected.exact["dk"].bfloat16())
    for which in ("max", "mean"):
        budget = rounded["extreme"]["dk"][f"{which}_budget"]
        assert budget == pytest.approx(budgets[which] / unit)
    assert rounded["extreme"]["lse"]["mean_budget"] is None  # 80 rows are too few


def test_unit_is_as_small_as_its_tensor():
    """The unit scales with its tensor; for zeros it is that of the smallest normal number."""
    sample = Sample(problem=PROBLEM, lse=False)
    expected = Expected.of(sample.draw())
    for factor, unit in ((2.0**-40, 2.0**-40), (0.0, 2.0**-126)):
        small = replace(expected, exact={"o": (factor * expected.exact["o"].sign())})
        got = (small.exact["o"] + 4 * 2.0**-7 * unit).bfloat16()
        assert errors_module._in_units(small, "o", got)["max"] == 4


def test_what_is_wrong_shows():
    """A bf16 logsumexp is off by many units, a bias has its sign, and NaN is an infinite error."""

    def wrong(q, k, v, **options):
        o, lse = exactly(q, k, v, **options)
        return o - 0.01, lse.bfloat16()

    found = errors_of(wrong)["normal"]
    assert 1e3 < found["lse"]["max"] <= 2**15  # half a unit of bf16
    assert found["o"]["bias"] == pytest.approx(-found["o"]["mean"], rel=0.05)
    assert found["o"]["bias"] < -0.3

    def poisoned(q, k, v, **options):
        o, lse = exactly(q, k, v, **options)
        return torch.where(o == o.max(), torch.nan, o), lse

    error = errors_of(poisoned)["normal"]["o"]
    assert (error["max"], error["mean"], error["bias"]) == (math.inf, math.inf, None)


def test_nothing_is_no_error():
    """With one key, o is v, and its error is 0."""
    error = errors_of(exactly, Problem(seq_q=5, seq_kv=1, head_dim=16, dtype="bfloat16"))
    assert error["normal"]["o"]["max"] == 0
