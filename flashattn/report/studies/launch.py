"""Launch overhead: host time of an attention call, eager, compiled and in a CUDA graph."""

from __future__ import annotations

from flashattn.report import plot
from flashattn.report.rows import KERNELS, OURS, attempted, groups, known, label, ordered, timed
from flashattn.report.runs import Row, Run
from flashattn.report.study import Table, filled, shared, sides
from flashattn.report.units import microseconds, times

NAME = "launch"
TITLE = "Launching"
QUESTION = "How long is the host busy for one call, before the device does anything?"
CASE = ("impl", "pass", "problem")
FLOORS = {  # lower bounds of forward and backward
    "floor": "an autograd function that only allocates",
    "floor, launching": "one that launches an empty kernel each way besides",
}


def _rows(run: Run) -> list[Row]:
    return timed(known(run.study(NAME), "impl", "mode", "pass"))


def tables(run: Run) -> list[Table]:
    """Return a table with a line for each implementation and pass, and a column for each mode."""
    rows = attempted(known(run.study(NAME), "impl", "mode"))
    columns = shared(*CASE) | sides(rows, "mode", microseconds)
    lines = groups(rows, *CASE, "dtype").values()
    return filled(Table.of("The host's time for a call, in µs", rows, columns, lines))


def findings(run: Run) -> list[str]:
    """Return, for each pass, the host time of ours, of the fastest peer, and of the floors."""
    said = []
    for own in groups(_rows(run), "dtype", "pass", "mode").values():
        costs = {row["impl"]: row["seconds"] for row in own}
        floors = {name: costs.pop(name) for name in FLOORS if name in costs}
        ours = costs.pop(OURS, None)
        if ours is None or not costs:
            continue
        least = min(costs, key=costs.__getitem__)
        told = {least: costs[least]}
        if "backward" in own[0]["pass"]:  # forward alone needs no autograd function
            told |= {FLOORS[name]: cost for name, cost in floors.items()}
        beside = "; ".join(f"{name}, {microseconds(cost)} µs" for name, cost in told.items())
        said.append(
            f"{label(own[0], 'dtype', 'pass', 'mode')}: a call of {OURS} costs the host "
            f"{microseconds(ours)} µs, {times(ours / costs[least])} the least of the others "
            f"({beside})."
        )
    return said


def pictures(run: Run) -> dict[str, plot.Picture]:
    """Plot a bar for each implementation, with a panel for each dtype, pass and mode."""
    records = [
        {"panel": label(row, "dtype", "pass", "mode"), "place": row["impl"]}
        | {"value": 1e6 * row["seconds"], "said": f"{microseconds(row['seconds'])} µs"}
        | {"ours": row["impl"] in KERNELS}
        for row in ordered(_rows(run), "dtype", "pass", "mode", "impl")
    ]
    return plot.shown("launch-host", plot.bars("The host's time for a call", records, columns=3))
