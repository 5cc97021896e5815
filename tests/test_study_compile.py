"""The compile study: gain, cost, and after how many calls the one has paid for the other."""

from __future__ import annotations

import pytest

from flashattn.report.runs import Run
from flashattn.report.studies import compile as study


def row(eager, compiled, n=1024, **facts):
    """Return attention, eager and compiled, that took 9 seconds to compile."""
    made = {"study": "compile", "name": f"{n}", "status": "ok", "reason": None, "seq": n}
    made |= {"subject": "attention", "impl": "naive", "pass": "forward", "dtype": "float32"}
    made |= {"eager_seconds": eager, "seconds": compiled, "compile_seconds": 9.0}
    return made | {"graphs": 1, "graph_breaks": 0, "recompiles": 2} | facts


def run(*rows):
    """Return a run of these rows."""
    return Run(machine={}, rows=list(rows))


@pytest.mark.parametrize(
    ("compiled", "gain", "calls"),
    [(0.5, "2.00x", "18"), (0.3, "3.33x", "13"), (1.25, "0.80x", "never")],
)
def test_compiling_pays_off_when_its_time_is_won_back(compiled, gain, calls):
    """Calls until it pays are the time to compile over what a call wins; a loss never pays."""
    (table,) = study.tables(run(row(1.0, compiled)))
    ms = f"{1000 * compiled:.0f}"
    numbers = ["1000", ms, gain, "9", "1", "0", "2", calls]
    assert table.lines == [["naive, N = 1024, fp32", "forward", *numbers]]


def test_a_model_takes_a_step():
    """A model's row says its step where attention's says its pass."""
    model = row(1.0, 0.5, subject="model", size="xl", step="train", **{"pass": None, "seq": None})
    attention, steps = study.tables(run(row(1.0, 0.5), model))
    assert [t.caption.split(":")[0] for t in (attention, steps)] == ["attention", "model"]
    assert steps.lines[0][:2] == ["xl, naive, fp32", "train"]


@pytest.mark.parametrize("fast", [0.25, 0.5])
def test_gain_follows_the_times(fast):
    """Who gains least and most, and when it pays off soonest and latest, is said."""
    said = study.findings(run(row(1.0, fast), row(1.0, 0.75, n=4096)))
    low, high = "naive, N = 4096, fp32, forward", "naive, N = 1024, fp32, forward"
    assert f"from 1.33x ({low}) to {1 / fast:.2f}x ({high})" in said[0]
    soon = -(-9 // (1 - fast))
    assert said[1] == f"Compiling attention pays off after {soon:.0f} ({high}) to 36 ({low}) calls."
    assert len(said) == 2


def test_graph_breaks_are_counted():
    """How many cases break the graph is said if any does."""
    said = study.findings(run(row(1.0, 0.5, graph_breaks=3), row(1.0, 0.5, n=4096)))
    assert said[-1] == "1 of 2 cases of attention break the graph."


def test_bars_are_gains():
    """Each case has a bar as long as its gain."""
    (figure,) = study.pictures(run(row(1.0, 0.5), row(1.0, 0.25, n=4096))).values()
    (bars,) = figure.axes[0].containers
    assert [bar.get_width() for bar in bars] == [2.0, 4.0]
