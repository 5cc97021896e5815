"""Rows chosen and compared, numbers as people read them, and what many say in one."""

from __future__ import annotations

import pytest

from flashattn.report import rows, units
from flashattn.report.fit import exponent, geometric_mean, in_words


@pytest.mark.parametrize(
    ("fact", "given", "wanted"),
    [
        ("size", ["2.7B", "other", "small", "xl"], ["small", "xl", "2.7B", "other"]),
        ("impl", ["sdpa", "flex", "naive", "triton", None], ["triton", "naive", "flex", "sdpa"]),
        ("seq", [16384, 512, 1024], [512, 1024, 16384]),
    ],
)
def test_order_is_by_custom_then_size_then_name(fact, given, wanted):
    """Sizes go small to large, ours comes first, numbers ascend, the unknown is last by name."""
    assert rows.values([{fact: value} for value in given], fact) == wanted


def test_pairs_differ_in_one_fact():
    """Two rows are a pair if they differ in the axis alone."""
    cases = [("small", "fp32"), ("small", "bf16"), ("large", "fp32"), ("xl", "bf16")]
    made = [{"size": size, "precision": kind} for size, kind in cases]
    assert rows.pairs(made, "precision", "fp32", "bf16", "size") == [(made[0], made[1])]


def test_label_says_values():
    """A case in words names lengths, says whether it is compiled, and shortens dtypes."""
    facts = {"size": "small", "context": 512, "seq": 8, "compiled": True, "dtype": "bfloat16"}
    assert rows.label(facts, *facts, "batch") == "small, context 512, N = 8, compiled, bf16"
    assert rows.label({"compiled": False, "impl": None}, "compiled", "impl") == "eager"


@pytest.mark.parametrize("power", [-1.0, 0.0, 1.0, 1.98])
def test_exponent_of_a_power_is_found(power):
    """The exponent of exact powers comes out, whatever the factor."""
    assert exponent((n, 3 * n**power) for n in (2, 8, 32, 64)) == pytest.approx(power)


def test_exponent_is_of_least_squares():
    """It is fitted to logarithms, and one x, or points without a logarithm, have none."""
    assert exponent([(1, 1), (2, 2), (4, 16)]) == pytest.approx(2.0)
    assert exponent([(2, 1), (2, 5)]) is exponent([(2, 1), (4, 0)]) is exponent([]) is None


def test_ratios_in_words():
    """The geometric mean and both ends are said with their cases; a single one is just said."""
    assert geometric_mean([8, 2]) == pytest.approx(4)
    assert in_words({"a": 2.0}) == "2.00x (a)"
    assert in_words({"a": 2.0, "b": 8.0, "c": 4.0}) == (
        "4.00x in the geometric mean of 3 cases, from 2.00x (a) to 8.00x (b)"
    )


@pytest.mark.parametrize(
    ("unit", "values", "wanted"),
    [
        (units.digits, [1234.4, 12.34, 0.012345, 0, None], ["1234", "12.3", "0.0123", "0", ""]),
        (units.ms, [0.00123456, None], ["1.23", ""]),
        (units.microseconds, [2.85e-5], ["28.5"]),
        (units.gib, [3 * 2**30, None], ["3", ""]),
        (units.tera, [4.5e14, None], ["450", ""]),
        (units.binary, [20 * 2**20, 2**30, 100], ["20 MiB", "1 GiB", "100 B"]),
        (units.percent, [0.567, 0.0123, -0.6, None], ["57%", "1.2%", "-60%", ""]),
        (units.times, [0.97, 12.34, 1234], ["0.97x", "12.3x", "1234x"]),
        (units.of_roof, [0.5, 1.5, None], ["50%", "150%*", ""]),
        (units.spread, [{"mean": 0.01, "std": 0.001}, {"mean": 0.01}], ["10 ± 1", ""]),
    ],
)
def test_three_digits_and_a_unit(unit, values, wanted):
    """Numbers have three digits and the unit of the column; what is missing is empty."""
    assert [unit(value) for value in values] == wanted


def test_a_mark_stands_for_a_time():
    """A row that was not measured has the mark of its status; no row has none."""
    rows_ = [{"status": "oom"}, {"status": "ok", "seconds": 0.01}, None]
    assert [units.or_mark(row, units.ms) for row in rows_] == ["OOM", "10", ""]


@pytest.mark.parametrize(
    ("facts", "steady"),
    [
        ({"q1": 0.9, "q3": 1.1}, True),
        ({"q1": 0.9, "q3": 1.2}, False),
        ({"q1": 0.9}, True),
        ({"q1": 0.9, "q3": 1.2, "seconds": None}, True),
    ],
)
def test_steady_is_what_has_its_quartiles_together(facts, steady):
    """Quartiles within a quarter of the median are steady, and so are unknown ones."""
    assert rows.steady({"seconds": 1.0} | facts) == steady
