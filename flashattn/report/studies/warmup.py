"""Warm-up: what the first steps cost, and how many it takes until a time can be trusted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashattn.report.plot import CYCLE, heading, legend, logarithmic, panels
from flashattn.report.rows import groups, label, timed
from flashattn.report.runs import Row, Run
from flashattn.report.study import Study, Table
from flashattn.report.units import ms, percent, seconds_or_mark, spread, times, word

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "warmup"
CASE = ("size", "context", "batch", "precision", "impl")
MOST = 6  # panels in the picture


def tables(run: Run) -> list[Table]:
    """Return one table: a line for each case and number of warm-up steps."""
    rows = [row for own in groups(run.study(NAME), *CASE, "warm_steps").values() for row in own]
    told = [row for row in rows if row["status"] != "unsupported"]
    lines = [
        [
            label(row, *CASE),
            word("warm_steps", row.get("warm_steps")),
            ms(row.get("first")),
            ms(row.get("second")),
            spread(row),
            seconds_or_mark(row),
        ]
        for row in told
    ]
    header = ["case", "warm-up steps", "first", "second", "mean ± std", "median"]
    table = Table(caption="Steps in ms by warm-up", header=header, lines=lines, rows=told)
    return [table] if lines else []


def findings(run: Run) -> list[str]:
    """Say what the very first step costs and what each number of warm-up steps leaves of it."""
    said = []
    for cases in groups(timed(run.study(NAME)), *CASE).values():
        steps = groups(cases, "warm_steps")
        cold, warm = next(iter(steps.values()))[0], list(steps.values())[-1][0]
        if cold is warm or not cold.get("first"):
            continue
        first = times(cold["first"] / warm["seconds"])
        left = [
            f"{percent(abs(row['mean'] / warm['seconds'] - 1))} after {row['warm_steps']}"
            for row in (own[0] for own in steps.values())
            if row.get("mean")
        ]
        off = f" The mean is off that median by {', '.join(left)}." if left else ""
        said.append(
            f"{label(cold, *CASE)}: the first step after {cold['warm_steps']} warm-up steps takes "
            f"{first} the median after {warm['warm_steps']}.{off}"
        )
    return said


def pictures(run: Run) -> dict[str, Figure]:
    """Draw the measured steps in their order, a line for each number of warm-up steps."""
    rows = [row for row in timed(run.study(NAME)) if row.get("in_order")]
    found = list(groups(rows, *CASE).values())[-MOST:]
    if not found:
        return {}
    columns = min(2, len(found))
    figure, axes = panels(
        "Measured steps in their order", -(-len(found) // columns), columns, height=2.7
    )
    places = [axis for line in axes for axis in line]
    for axis, cases in zip(places, found, strict=False):
        for row in cases:
            _line(axis, row)
        heading(axis, label(cases[0], *CASE))
        logarithmic(axis)
        axis.set_ylabel("ms")
        axis.set_xlabel("measured step")
    for axis in places[len(found) :]:
        axis.set_visible(False)
    legend(figure, axes)
    return {"warmup-steps": figure}


def _line(axis: Axes, row: Row) -> None:
    samples = [1e3 * sample for sample in row["in_order"]]
    steps = row.get("warm_steps") or 0
    axis.plot(
        range(1, len(samples) + 1),
        samples,
        marker="o",
        color=CYCLE[steps % len(CYCLE)],
        label=f"{steps} warm-up steps",
    )


STUDY = Study(
    name=NAME,
    title="Warm-up",
    question="How many steps pass before a measured one says what the next thousand will take?",
    tables=tables,
    pictures=pictures,
    findings=findings,
)
