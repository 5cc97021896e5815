"""The precision study: exact sums, dtypes under autocast, and where LayerNorm overflows."""

from __future__ import annotations

import math

import pytest

from flashattn.report.runs import Run
from flashattn.report.studies import precision


def total(accumulator, result, **facts):
    """Return the sum of a thousand hundredths, which grows until it is its result."""
    row = {"study": "precision", "name": accumulator, "status": "ok", "part": "accumulation"}
    row |= {"accumulator": accumulator, "addend": "float32", "cast": "implicit"}
    row |= {"value": 0.01, "count": 1000, "result": result}
    return row | {"curve": [[n, min(n * 0.01, result)] for n in range(0, 1001, 100)]} | facts


def norm(dtype, got, error, quantity="variance"):
    """Return a part of a LayerNorm."""
    row = {"study": "precision", "name": f"{dtype}-{quantity}", "status": "ok", "dtype": dtype}
    row |= {"part": "layernorm", "quantity": quantity, "scale": 1000.0}
    return row | {"exact": 1e6, "got": got, "error": error}


def run(*rows):
    """Return a run of these rows."""
    return Run(machine={}, rows=list(rows))


def test_sums_are_told_to_the_last_digit():
    """A result is told in full, for it is reproduced exactly; its error is beside it."""
    (table,) = precision.tables(run(total("float32", 10.000133514404297)))
    line = ["1000 x 0.01", "fp32", "fp32", "implicit", "10.000133514404297", "0.0%"]
    assert table.lines == [line]


@pytest.mark.parametrize(("result", "off", "stop"), [(4.0, "60%", 400), (6.0, "40%", 600)])
def test_worst_sum_follows_the_results(result, off, stop):
    """The sum that is off the most is named, with where it stops, and the closest."""
    (said,) = precision.findings(run(total("bfloat16", result), total("float32", 10.0001)))
    worst = f"bf16 + fp32 gives {result:g}, off by {off} and stops growing by addend {stop}"
    assert said == f"1000 x 0.01: {worst}; fp32 + fp32 is the closest with 10.0001."


def test_autocast_is_a_column_for_each_dtype():
    """Each tensor has a line, with the dtype that each autocast gives it; fp32 ones are said."""
    rows = [
        {
            "study": "precision",
            "name": dtype,
            "status": "ok",
            "part": "autocast",
            "dtype": dtype,
            "tensors": {"logits": dtype, "loss": "float32"},
        }
        for dtype in ("float16", "bfloat16")
    ]
    (table,) = precision.tables(run(*rows))
    assert table.header == ["tensor", "bf16 autocast", "fp16 autocast"]
    assert table.lines == [["logits", "bf16", "fp16"], ["loss", "fp32", "fp32"]]
    assert "Under fp16 autocast loss stay in fp32." in precision.findings(run(*rows))


def test_overflow_is_told_from_error():
    """An infinite result is an overflow; of finite ones the largest error is named."""
    rows = [norm("float16", math.inf, math.inf), norm("float16", 1.0, 0.5, "mean")]
    rows += [norm("bfloat16", 1e6, 0.25), norm("bfloat16", 1.0, 0.125, "mean")]
    assert set(precision.findings(run(*rows))) == {
        "In fp16 LayerNorm has no finite variance at scale 1000.",
        "In fp16 the largest error that stays finite is 0.5, in mean at scale 1000.",
        "In bf16 the largest error that stays finite is 0.25, in variance at scale 1000.",
    }


def test_curves_stand_beside_the_exact_sum():
    """Partial sums are drawn with the exact line, a panel for each sum."""
    rows = [total("bfloat16", 4.0), total("float32", 10.0), total("float16", 9.0, count=2000)]
    (figure,) = precision.pictures(run(*rows)).values()
    lines = {line.get_label(): list(line.get_ydata()) for line in figure.axes[0].get_lines()}
    assert set(lines) == {"exact", "bf16 + fp32, implicit", "fp32 + fp32, implicit"}
    assert lines["exact"] == [0, 10]
    assert lines["bf16 + fp32, implicit"][-1] == 4.0
    assert len(figure.axes) == 2
