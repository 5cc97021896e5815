"""Launching: the host's time for a call of attention, eager, compiled and in a CUDA graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashattn.report.plot import bars, heading, legend, panels
from flashattn.report.rows import OURS, by, groups, known, timed, values
from flashattn.report.runs import Row, Run
from flashattn.report.study import Study, Table
from flashattn.report.units import MARKS, microseconds, times, word

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "launch"
CASE = ("impl", "pass", "problem", "dtype")


def tables(run: Run) -> list[Table]:
    """Return one table: a line for each implementation and pass, a column for each mode."""
    rows = [row for row in known(run.study(NAME), "impl", "mode") if row["status"] != "unsupported"]
    modes = values(rows, "mode")
    lines = []
    for (impl, name, problem, _), own in groups(rows, *CASE).items():
        sides = by(own, "mode")
        lines.append(
            [
                *(word("", fact) for fact in (impl, name, problem)),
                *(_cell(sides.get(m)) for m in modes),
            ]
        )
    header = ["impl", "pass", "problem", *modes]
    caption = "The host's time for a call, in µs"
    return [Table(caption=caption, header=header, lines=lines, rows=rows)] if lines else []


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    return MARKS.get(row["status"], microseconds(row.get("seconds")))


def findings(run: Run) -> list[str]:
    """Say who costs the host least in each pass, and what a mode saves of ours."""
    said = []
    for (name, mode), own in groups(
        timed(known(run.study(NAME), "impl", "mode")), "pass", "mode"
    ).items():
        costs = {row["impl"]: row["seconds"] for row in own}
        least = min(costs, key=costs.__getitem__)
        if OURS in costs and len(costs) > 1:
            said.append(
                f"{name}, {mode}: a call of {OURS} costs the host {microseconds(costs[OURS])} µs, "
                f"{times(costs[OURS] / costs[least])} the least ({least}, "
                f"{microseconds(costs[least])} µs)."
            )
    return said


def pictures(run: Run) -> dict[str, Figure]:
    """Draw a bar for each mode, by implementation, a panel for each pass."""
    rows = timed(known(run.study(NAME), "impl", "mode"))
    found = groups(rows, "pass")
    if not found:
        return {}
    figure, axes = panels("The host's time for a call", 1, len(found), height=3.2)
    modes = values(rows, "mode")
    for axis, ((name,), own) in zip(axes[0], found.items(), strict=True):
        impls = values(own, "impl")
        sides = {(row["impl"], row["mode"]): 1e6 * row["seconds"] for row in own}
        bars(axis, impls, {mode: [sides.get((impl, mode)) for impl in impls] for mode in modes})
        heading(axis, word("pass", name))
        axis.set_ylabel("µs")
    legend(figure, axes)
    return {"launch-host": figure}


STUDY = Study(
    name=NAME,
    title="Launching",
    question="How long is the host busy for one call, before the device does anything?",
    tables=tables,
    pictures=pictures,
    findings=findings,
)
