"""Rows chosen and held against one another, numbers as people read them, and what many say."""

from __future__ import annotations

import pytest

from flashattn.report import rows as rows_
from flashattn.report import units
from flashattn.report.fit import exponent, geometric_mean, in_words


def row(seconds=1.0, **facts):
    """Return a timed row."""
    return {"status": "ok", "seconds": seconds, **facts}


def test_order_is_by_custom_then_size_then_name():
    """Sizes go small to large, steps in their order, ours first, what is unknown last by name."""
    sizes = [row(size=size) for size in ("2.7B", "other", "small", "xl")]
    assert rows_.values(sizes, "size") == ["small", "xl", "2.7B", "other"]
    impls = [row(impl=impl) for impl in ("sdpa", "flex", "naive", "triton", None)]
    assert rows_.values(impls, "impl") == ["triton", "naive", "flex", "sdpa"]
    counts = [row(seq=n) for n in (16384, 512, 1024)]
    assert rows_.values(counts, "seq") == [512, 1024, 16384]


def test_pairs_differ_in_one_fact():
    """Two rows are a pair if they differ in the axis alone and both have a time."""
    found = rows_.pairs(
        [
            row(4.0, size="small", precision="fp32"),
            row(1.0, size="small", precision="bf16"),
            row(9.0, size="large", precision="fp32"),
            row(1.0, size="xl", precision="bf16"),
            row(1.0, size="large", precision="bf16") | {"status": "oom"},
        ],
        *("precision", "fp32", "bf16", "size"),
    )
    assert [rows_.speedup(pair) for pair in found] == [4.0]


def test_label_says_values():
    """A case in words names lengths, says whether it is compiled, and shortens dtypes."""
    facts = {"size": "small", "context": 512, "seq": 8, "compiled": True, "dtype": "bfloat16"}
    assert rows_.label(facts, *facts, "batch") == "small, context 512, N = 8, compiled, bf16"
    assert rows_.label({"compiled": False, "impl": None}, "compiled", "impl") == "eager"


@pytest.mark.parametrize("power", [-1.0, 0.0, 1.0, 1.98])
def test_exponent_of_a_power_is_found(power):
    """The exponent of exact powers comes out, whatever the factor."""
    assert exponent((n, 3 * n**power) for n in (2, 8, 32, 64)) == pytest.approx(power)


def test_exponent_needs_two_places():
    """One x has no slope, nor have points without a logarithm."""
    assert exponent([(2, 1), (2, 5)]) is None
    assert exponent([(2, 1), (4, 0)]) is None
    assert exponent([]) is None


def test_least_squares_on_logarithms():
    """One point that is off moves the exponent as least squares on logarithms does."""
    assert exponent([(1, 1), (2, 2), (4, 16)]) == pytest.approx(2.0)


def test_geometric_mean_of_opposites_is_one():
    """Twice as fast and half as fast are as fast, on average."""
    assert geometric_mean([2, 0.5]) == pytest.approx(1)
    assert geometric_mean([8, 2]) == pytest.approx(4)


def test_ratios_in_words():
    """The mean and both ends are said with the names of their cases; a single one is just said."""
    assert in_words({"a": 2.0}) == "2.00x (a)"
    assert in_words({"a": 2.0, "b": 8.0, "c": 4.0}) == (
        "4.00x in the geometric mean of 3 cases, from 2.00x (a) to 8.00x (b)"
    )


@pytest.mark.parametrize(
    ("made", "wanted"),
    [
        (units.digits(1234.4), "1234"),
        (units.digits(12.34), "12.3"),
        (units.digits(0.012345), "0.0123"),
        (units.digits(0), "0"),
        (units.ms(0.00123456), "1.23"),
        (units.microseconds(2.85e-5), "28.5"),
        (units.gib(3 * 2**30), "3"),
        (units.binary(20 * 2**20), "20 MiB"),
        (units.binary(2**30), "1 GiB"),
        (units.binary(100), "100 B"),
        (units.tera(4.5e14), "450"),
        (units.percent(0.567), "57%"),
        (units.percent(0.0123), "1.2%"),
        (units.percent(-0.6), "-60%"),
        (units.times(0.97), "0.97x"),
        (units.times(12.34), "12.3x"),
        (units.times(1234), "1234x"),
        (units.spread({"mean": 0.01, "std": 0.001}), "10 ± 1"),
        (units.spread({"mean": 0.01}), ""),
        (units.seconds_or_mark({"status": "oom"}), "OOM"),
        (units.seconds_or_mark(None), ""),
    ],
)
def test_three_digits_and_a_unit(made, wanted):
    """Numbers have three digits and the unit of the column; what is missing is empty."""
    assert made == wanted


@pytest.mark.parametrize("unit", [units.digits, units.ms, units.gib, units.tera, units.percent])
def test_nothing_is_nothing(unit):
    """What was not measured is an empty cell, not a zero."""
    assert unit(None) == ""


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
    assert rows_.steady(row() | facts) == steady
