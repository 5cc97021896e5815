"""The launch study: microseconds of the host, by implementation and mode."""

from __future__ import annotations

import pytest

from flashattn.report.runs import Run
from flashattn.report.studies import launch


def row(impl, mode, seconds, status="ok", dtype="bfloat16"):
    """Return the host's time for a call."""
    made = {"study": "launch", "name": f"{impl}-{mode}-{dtype}", "impl": impl, "mode": mode}
    made |= {"pass": "forward", "problem": "p", "dtype": dtype, "reason": None}
    return made | {"status": status, "seconds": seconds}


def run(*rows):
    """Return a run of these rows."""
    return Run(machine={}, rows=list(rows))


def test_modes_are_columns():
    """An implementation's modes stand side by side in µs, ours first."""
    rows = [row("sdpa", "graph", 1e-6), row("sdpa", "eager", 2e-5), row("triton", "eager", 3e-5)]
    (table,) = launch.tables(run(*rows, row("triton", "graph", None, "failed")))
    assert table.header == ["impl", "pass", "problem", "eager", "graph"]
    assert table.lines == [
        ["triton", "forward", "p", "30", "FAILED"],
        ["sdpa", "forward", "p", "20", "1"],
    ]


@pytest.mark.parametrize(
    ("sdpa", "times", "least"), [(2e-5, "1.50x", "sdpa, 20"), (6e-5, "1.00x", "triton, 30")]
)
def test_least_follows_the_times(sdpa, times, least):
    """Who costs the host least, and how far ours is from it, is said."""
    (said,) = launch.findings(run(row("triton", "eager", 3e-5), row("sdpa", "eager", sdpa)))
    wanted = f"a call of triton costs the host 30 µs, {times} the least ({least} µs)."
    assert said == f"bf16, forward, eager: {wanted}"


def test_the_floor_is_nobody():
    """What launches nothing is told beside the others, both ways, and is not the least of them."""
    rows = [row("triton", "eager", 3e-5), row("sdpa", "eager", 2e-5), row("floor", "eager", 1e-5)]
    (forward,) = launch.findings(run(*rows))
    assert forward.endswith("1.50x the least (sdpa, 20 µs).")  # which needs no autograd function
    rows = [made | {"pass": "forward+backward"} for made in rows]
    (said,) = launch.findings(run(*rows))
    assert "1.50x the least (sdpa, 20 µs); " in said
    assert said.endswith("only allocates, 10 µs.")
    other = row("floor, launching", "eager", 1.5e-5) | {"pass": "forward+backward"}
    (said,) = launch.findings(run(*rows, other))
    assert "only allocates, 10 µs; one that launches" in said
    assert said.endswith("besides, 15 µs.")
    assert launch.findings(run(rows[-1], other)) == []


def test_bars_are_microseconds():
    """Each mode has a bar for every implementation, in µs."""
    rows = [row("sdpa", "eager", 2e-5), row("triton", "eager", 3e-5), row("sdpa", "graph", 1e-6)]
    (figure,) = launch.pictures(run(*rows)).values()
    heights = [[bar.get_height() for bar in group] for group in figure.axes[0].containers]
    assert heights == [pytest.approx([30, 20]), pytest.approx([1])]


def test_dtypes_are_told_apart():
    """Each dtype has sentences and a panel of its own: no time hides behind another's."""
    rows = [row("sdpa", "eager", 1e-5), row("triton", "eager", 2e-5)]
    rows += [
        row("sdpa", "eager", 3e-5, dtype="float32"),
        row("triton", "eager", 9e-5, dtype="float32"),
    ]
    half, single = launch.findings(run(*rows))
    assert half.startswith("bf16, forward, eager: a call of triton costs the host 20 µs, 2.00x")
    assert single.startswith("fp32, forward, eager: a call of triton costs the host 90 µs, 3.00x")
    (figure,) = launch.pictures(run(*rows)).values()
    assert [axis.get_title() for axis in figure.axes] == ["bf16, forward", "fp32, forward"]
    heights = [[bar.get_height() for bar in axis.containers[0]] for axis in figure.axes]
    assert heights == [pytest.approx([20, 10]), pytest.approx([90, 30])]
