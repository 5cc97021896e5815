"""The order of values, exponents, numbers with their units, and steady rows."""

import pytest

from flashattn.report import rows, units
from flashattn.report.rows import exponent


@pytest.mark.parametrize(
    ("fact", "given", "wanted"),
    [
        ("size", ["2.7B", "other", "small", "xl"], ["small", "xl", "2.7B", "other"]),
        ("impl", ["sdpa", "flex", "naive", "triton", None], ["triton", "naive", "flex", "sdpa"]),
        ("seq", [16384, 512, 1024], [512, 1024, 16384]),
    ],
)
def test_order_is_by_custom_then_size_then_name(fact, given, wanted):
    """Sizes go small to large, ours comes first, numbers ascend, unknown values come last."""
    assert rows.values([{fact: value} for value in given], fact) == wanted


def test_exponent_is_of_least_squares():
    """The exponent is a least-squares fit of logarithms; one x, or a zero, has no exponent."""
    assert exponent((n, 3 * n**-0.5) for n in (2, 8, 32, 64)) == pytest.approx(-0.5)
    assert exponent([(1, 1), (2, 2), (4, 16)]) == pytest.approx(2.0)
    assert exponent([(2, 1), (2, 5)]) is exponent([(2, 1), (4, 0)]) is exponent([]) is None


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
    """Numbers have three digits and the unit of the column; missing numbers are empty."""
    assert [unit(value) for value in values] == wanted


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
    """A row is steady if its quartiles are within a quarter of the median, or are unknown."""
    assert rows.steady({"seconds": 1.0} | facts) == steady
