"""Launching: the host's time for a call of attention, eager, compiled and in a CUDA graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashattn.report.plot import bars, heading, legend, panels
from flashattn.report.rows import OURS, by, groups, known, label, timed, values
from flashattn.report.runs import Row, Run
from flashattn.report.study import Study, Table
from flashattn.report.units import MARKS, microseconds, times, word

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "launch"
FACTS = ("impl", "mode", "pass")
CASE = ("impl", "pass", "problem", "dtype")
FLOORS = {  # both ways
    "floor": "an autograd function that only allocates",
    "floor, launching": "one that launches an empty kernel each way besides",
}


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
    rows = timed(known(run.study(NAME), *FACTS))
    for own in groups(rows, "dtype", "pass", "mode").values():
        costs = {row["impl"]: row["seconds"] for row in own}
        floors = {said: costs.pop(name, None) for name, said in FLOORS.items()}
        if OURS in costs and len(costs) > 1:
            least = min(costs, key=costs.__getitem__)
            both = "backward" in own[0]["pass"]
            below = [f"{x}, {microseconds(cost)} µs" for x, cost in floors.items() if cost and both]
            said.append(
                f"{label(own[0], 'dtype', 'pass', 'mode')}: a call of {OURS} costs the host "
                f"{microseconds(costs[OURS])} µs, {times(costs[OURS] / costs[least])} the least "
                f"({least}, {microseconds(costs[least])} µs){''.join(f'; {x}' for x in below)}."
            )
    return said


def pictures(run: Run) -> dict[str, Figure]:
    """Draw a bar for each mode, by implementation: a row for each dtype, a panel for each pass."""
    rows = timed(known(run.study(NAME), *FACTS))
    if not rows:
        return {}
    dtypes = [dtype for (dtype,) in groups(rows, "dtype")]
    passes, modes = values(rows, "pass"), values(rows, "mode")
    figure, axes = panels("The host's time for a call", len(dtypes), len(passes), height=2.8)
    for (dtype, name), own in groups(rows, "dtype", "pass").items():
        axis = axes[dtypes.index(dtype)][passes.index(name)]
        impls = values(own, "impl")
        sides = {(row["impl"], row["mode"]): 1e6 * row["seconds"] for row in own}
        places = [impl.replace(", ", ",\n") for impl in impls]
        bars(axis, places, {mode: [sides.get((impl, mode)) for impl in impls] for mode in modes})
        heading(axis, label(own[0], "dtype", "pass"))
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
