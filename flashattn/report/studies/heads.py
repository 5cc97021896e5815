"""Grouped heads and decoding: times for the shapes of language models."""

from __future__ import annotations

from functools import partial

from flashattn.report import plot
from flashattn.report.rows import attempted, best, groups, known, over_peer, timed
from flashattn.report.runs import Row, Run
from flashattn.report.study import RATIO, Table, filled, shared, sides
from flashattn.report.units import microseconds, of_roof, times

NAME = "heads"
TITLE = "Grouped heads and decoding"
QUESTION = "How fast are the shapes of language models?"


def _rows(run: Run) -> list[Row]:
    found = attempted(known(run.study(NAME), "impl", "problem", "pass", "seq_q", "bytes"))
    return [
        {**row, "what": "decoding" if row["seq_q"] == 1 else f"grouped heads, {row['pass']}"}
        for row in found
    ]


def of_copy(run: Run, rows: list[Row]) -> str:
    """Return our bandwidth as a share of a copy's; each byte of the tensors counts once."""
    ours = best(rows, ours=True)
    roof = run.roof(ours, "copy") if ours else None
    return of_roof(ours["bytes"] / ours["seconds"] / roof) if ours and roof else ""


def tables(run: Run) -> list[Table]:
    """Return a table for each pass, and one for decoding: a line per problem."""
    found = []
    for (what,), own in groups(_rows(run), "what").items():
        columns = shared("problem") | sides(timed(own), "impl", microseconds) | RATIO
        if what == "decoding":
            columns["of the copy's bandwidth"] = partial(of_copy, run)
        lines = groups(own, "problem").values()
        found.append(Table.of(f"{what}: µs", own, columns, lines))
    return filled(*found)


def findings(run: Run) -> list[str]:
    """Return, for each table, the range of our speeds over the fastest peer's."""
    said = []
    for (what,), own in groups(_rows(run), "what").items():
        each = (over_peer(cases) for cases in groups(own, "problem").values())
        ratios = [x for x in each if x]
        if ratios:
            span = f"{times(min(ratios))} to {times(max(ratios))}"
            said.append(f"{what}: {span} the speed of the fastest peer, {len(ratios)} problems.")
    return said


def pictures(run: Run) -> dict[str, plot.Picture]:
    """Plot our speed over the fastest peer's."""
    records = [
        {"panel": "", "place": f"{what}: {problem}", "ours": True}
        | {"value": plot.exact(ratio), "said": times(ratio)}
        for (what,), own in groups(_rows(run), "what").items()
        for (problem,), cases in groups(own, "problem").items()
        if (ratio := over_peer(cases))
    ]
    return plot.shown("heads-speeds", plot.bars("Speed over that of the fastest peer", records))
