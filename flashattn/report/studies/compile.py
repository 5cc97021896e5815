"""torch.compile: its gain in the steady state, its cost ahead of it, and when that is paid off."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from flashattn.report.fit import in_words
from flashattn.report.plot import heading, panels, ranked
from flashattn.report.rows import groups, label, ordered, timed
from flashattn.report.runs import Row, Run
from flashattn.report.study import Study, Table
from flashattn.report.units import MARKS, digits, ms, times

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "compile"
CASE = ("subject", "size", "impl", "context", "seq", "head_dim", "precision", "dtype")
DOING = ("step", "pass")  # a model takes a step, attention a pass
COUNTS = ("graphs", "graph_breaks", "recompiles")
MOST = 40  # bars in one panel of the picture


def _gain(row: Row) -> float | None:
    """Return how many times as fast the compiled call is."""
    if not timed([row]) or not row.get("eager_seconds"):
        return None
    return float(row["eager_seconds"] / row["seconds"])


def pays_after(row: Row) -> int | None:
    """Return the calls after which the time to compile is won back; None if it never is."""
    if not row.get("eager_seconds") or not row.get("seconds") or row.get("compile_seconds") is None:
        return None
    won = row["eager_seconds"] - row["seconds"]
    return math.ceil(row["compile_seconds"] / won) if won > 0 else None


def _doing(row: Row) -> str:
    return str(next((row[fact] for fact in DOING if row.get(fact)), ""))


def _case(row: Row) -> str:
    return label(row, *CASE[1:])


def tables(run: Run) -> list[Table]:
    """Return a table for each subject."""
    rows = [row for row in run.study(NAME) if row["status"] != "unsupported"]
    found = groups(rows, "subject")
    return [_table(subject, ordered(own, *CASE, *DOING)) for (subject,), own in found.items()]


def _table(subject: str | None, rows: list[Row]) -> Table:
    return Table(
        caption=f"{subject or 'compiled'}: eager and compiled in ms, compiling in s",
        header=[
            *("case", "pass or step", "eager", "compiled", "speed-up", "compiling"),
            *("graphs", "graph breaks", "recompiles", "pays off after calls"),
        ],
        lines=[
            [
                _case(row),
                _doing(row),
                ms(row.get("eager_seconds")),
                MARKS.get(row["status"], ms(row.get("seconds"))),
                times(_gain(row)),
                digits(row.get("compile_seconds")),
                *("" if row.get(fact) is None else str(row[fact]) for fact in COUNTS),
                _paid(row),
            ]
            for row in rows
        ],
        rows=rows,
    )


def _paid(row: Row) -> str:
    if _gain(row) is None or row.get("compile_seconds") is None:
        return ""
    calls = pays_after(row)
    return "never" if calls is None else str(calls)


def findings(run: Run) -> list[str]:
    """Say what compiling gains for each subject, when it pays off, and where graphs break."""
    said = []
    for (subject,), own in groups(timed(run.study(NAME)), "subject").items():
        ratios = {
            f"{_case(row)}, {_doing(row)}": ratio
            for row in own
            if (ratio := _gain(row)) is not None
        }
        if ratios:
            said.append(f"Speed of {subject or 'all'}, compiled / eager: {in_words(ratios)}.")
        paid = {name: pays_after(row) for row in own for name in [f"{_case(row)}, {_doing(row)}"]}
        counts = {name: calls for name, calls in paid.items() if calls is not None}
        if counts:
            soon, late = min(counts, key=counts.__getitem__), max(counts, key=counts.__getitem__)
            calls = f"{counts[soon]}"
            if counts[late] > counts[soon]:
                calls += f" ({soon}) to {counts[late]} ({late})"
            said.append(f"Compiling {subject or 'it'} pays off after {calls} calls.")
        broken = [row for row in own if row.get("graph_breaks")]
        if broken:
            said.append(f"{len(broken)} of {len(own)} cases of {subject or 'it'} break the graph.")
    return said


def pictures(run: Run) -> dict[str, Figure]:
    """Draw the speed-up of each case, a panel for each subject."""
    rows = [row for row in timed(run.study(NAME)) if _gain(row) is not None]
    found = groups(rows, "subject")
    if not found:
        return {}
    figure, axes = panels("How many times as fast is it compiled?", 1, len(found), height=6.5)
    for axis, ((subject,), own) in zip(axes[0], found.items(), strict=True):
        shown = ordered(own, *CASE, *DOING)[:MOST]
        names = [f"{_case(row)}, {_doing(row)}" for row in shown]
        ranked(axis, names, [_gain(row) or 0 for row in shown])
        axis.axvline(1, color="0.4", linewidth=1)
        heading(axis, str(subject))
        axis.set_xlabel("times as fast")
    return {"compile-speedups": figure}


STUDY = Study(
    name=NAME,
    title="torch.compile",
    question="What does the compiler gain, what does it cost first, and when has it paid off?",
    tables=tables,
    pictures=pictures,
    findings=findings,
)
