"""Warm-up: the cost of the first steps, and how many are needed for reliable times."""

from __future__ import annotations

from functools import partial

from flashattn.report import plot
from flashattn.report.rows import attempted, groups, known, label, ordered, timed
from flashattn.report.runs import Run
from flashattn.report.study import Cell, Table, facts, filled
from flashattn.report.units import ms, or_mark, percent, spread, times

NAME = "warmup"
TITLE = "Warm-up"
QUESTION = "After how many steps does a measured one predict what the next thousand will take?"
CASE = ("size", "context", "batch", "precision", "impl")
MOST = 6  # panels in the plot


def tables(run: Run) -> list[Table]:
    """Return a table with a line for each case and number of warm-up steps."""
    columns: dict[str, Cell] = {
        "case": lambda row: label(row, *CASE),
        **facts(**{"warm-up steps": "warm_steps"}),
        "first": lambda row: ms(row.get("first")),
        "second": lambda row: ms(row.get("second")),
        "mean ± std": spread,
        "median": partial(or_mark, unit=ms),
    }
    rows = ordered(attempted(run.study(NAME)), *CASE, "warm_steps")
    return filled(Table.of("Steps in ms, by the number of warm-up steps", rows, columns))


def findings(run: Run) -> list[str]:
    """Return the cost of the first step, and the error left after each number of warm-up steps."""
    said = []
    for cases in groups(known(timed(run.study(NAME)), "warm_steps"), *CASE).values():
        steps = [own[0] for own in groups(cases, "warm_steps").values()]
        cold, warm = steps[0], steps[-1]
        if cold is warm or not cold.get("first"):
            continue
        left = [
            f"{_signed(row['mean'] / warm['seconds'] - 1)} ({row['warm_steps']} warm-up steps)"
            for row in known(steps, "mean")
        ]
        off = f" The mean differs from that median by {', '.join(left)}." if left else ""
        said.append(
            f"{label(cold, *CASE)}: after {cold['warm_steps']} warm-up steps the first step takes "
            f"{times(cold['first'] / warm['seconds'])} the median after {warm['warm_steps']}.{off}"
        )
    return said


def _signed(share: float) -> str:
    share = round(share, 3) + 0.0  # not -0.0
    return f"{'+' * (share > 0)}{percent(share)}"


def pictures(run: Run) -> dict[str, plot.Picture]:
    """Plot the measured steps in order, a line for each number of warm-up steps."""
    found = list(groups(known(timed(run.study(NAME)), "in_order"), *CASE).values())[-MOST:]
    records = [
        {"panel": label(row, *CASE), "name": f"{row.get('warm_steps') or 0} warm-up steps"}
        | {"x": i, "y": plot.exact(1e3 * seconds)}
        for cases in found
        for row in ordered(cases, "warm_steps")
        for i, seconds in enumerate(row["in_order"], start=1)
    ]
    x, y = plot.quantity("x", "measured step"), plot.quantity("y", "ms", log=True)
    title = "Measured steps in their order"
    return plot.shown("warmup-steps", plot.lines(title, records, x, y, columns=2, least=280))
