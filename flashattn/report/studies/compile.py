"""torch.compile: steady-state gain, compilation time, and the calls until it pays off."""

from __future__ import annotations

import math

from flashattn.report import plot
from flashattn.report.rows import KERNELS, attempted, groups, in_words, known, label, ordered, timed
from flashattn.report.runs import Row, Run
from flashattn.report.study import Cell, Table, facts, filled
from flashattn.report.units import digits, ms, or_mark, times

NAME = "compile"
TITLE = "torch.compile"
QUESTION = "What does the compiler gain, what does it cost first, and when has it paid off?"
CASE = ("size", "impl", "context", "seq", "head_dim", "precision", "dtype")
DOING = ("step", "pass")  # a step of a model, or a pass of attention
MOST = 40  # most bars for each subject


def gain(row: Row) -> float | None:
    """Return the speed-up of the compiled call."""
    return row["eager_seconds"] / row["seconds"] if known(timed([row]), "eager_seconds") else None


def break_even(row: Row) -> str:
    """Return the number of calls after which compilation pays off, or "never"."""
    if gain(row) is None or row.get("compile_seconds") is None:
        return ""
    won = row["eager_seconds"] - row["seconds"]
    return str(math.ceil(row["compile_seconds"] / won)) if won > 0 else "never"


def tables(run: Run) -> list[Table]:
    """Return a table for each subject."""
    columns: dict[str, Cell] = {
        "case": lambda row: label(row, *CASE),
        "pass or step": lambda row: label(row, *DOING),
        "eager": lambda row: ms(row.get("eager_seconds")),
        "compiled": lambda row: or_mark(row, ms),
        "speed-up": lambda row: times(gain(row)),
        "compiling": lambda row: digits(row.get("compile_seconds")),
        **facts("graphs", "graph_breaks", "recompiles"),
        "pays off after calls": break_even,
    }
    rows = ordered(attempted(run.study(NAME)), *CASE, *DOING)
    return filled(
        *(
            Table.of(f"{subject or 'compiled'}: a call in ms, compiling in s", own, columns)
            for (subject,), own in groups(rows, "subject").items()
        )
    )


def findings(run: Run) -> list[str]:
    """Return the gain for each subject, when compilation pays off, and the graph breaks."""
    said = []
    for (subject,), own in groups(timed(run.study(NAME)), "subject").items():
        of = f" of {subject}" if subject else ""
        gains = {_named(row): x for row in own if (x := gain(row)) is not None}
        if gains:
            said.append(f"Speed{of}, compiled / eager: {in_words(gains)}.")
        calls = {_named(row): int(count) for row in own if (count := break_even(row)).isdigit()}
        if calls:
            soon, late = min(calls, key=calls.__getitem__), max(calls, key=calls.__getitem__)
            end = f" ({soon}) to {calls[late]} ({late})" if calls[late] > calls[soon] else ""
            said.append(f"Compilation{of} pays off after {calls[soon]}{end} calls.")
        broken = sum(bool(row.get("graph_breaks")) for row in own)
        if broken:
            said.append(f"{broken} of {len(own)} cases{of} have graph breaks.")
    return said


def _named(row: Row) -> str:
    return label(row, *CASE, *DOING)


def pictures(run: Run) -> dict[str, plot.Picture]:
    """Plot the speed-up of each case."""
    rows = [row for row in timed(run.study(NAME)) if gain(row) is not None]
    records = [
        {"panel": "", "place": _named(row), "value": plot.exact(gain(row) or 0)}
        | {"said": times(gain(row)), "ours": row.get("impl") in KERNELS}
        for own in groups(rows, "subject").values()
        for row in ordered(own, *CASE, *DOING)[:MOST]
    ]
    return plot.shown("compile-speedups", plot.bars("Speed over eager's by torch.compile", records))
