"""Softcap, ALiBi, biases and sinks: time against that of plain scores."""

from __future__ import annotations

import re

from flashattn.report import plot
from flashattn.report.rows import attempted, best, gain, groups, known, label, timed, values
from flashattn.report.runs import Row, Run
from flashattn.report.study import RATIO, Table, filled, shared, sides
from flashattn.report.units import ms, times

NAME = "scores"
TITLE = "Scores"
QUESTION = "What do softcap, ALiBi, biases and sinks cost?"
PLAIN = "plain"
LEARNED = " and its gradient"
PROBLEM = re.compile(  # the end of a problem's name describes its scores
    r"(?P<shape>.*?)(?:-cap(?P<cap>[^-]+))?(?P<alibi>-alibi)?(?:-bias(?P<bias>\w+))?(?P<sink>-sink)?"
)


def _named(row: Row) -> Row:
    """Return a row with the shape of its problem, and its kind of scores in words."""
    found = PROBLEM.fullmatch(str(row["problem"]))
    made = found.groupdict() if found else {"shape": row["problem"]}
    words = {
        f"softcap {made.get('cap')}": made.get("cap"),
        "ALiBi": made.get("alibi"),
        "relative bias" if str(made.get("bias")).endswith("r") else "bias": made.get("bias"),
        "sink": made.get("sink"),
    }
    said = ", ".join(name for name, there in words.items() if there) or PLAIN
    learned = LEARNED if row.get("learned") else ""
    return {**row, "shape": made["shape"], "scores": said + learned}


def _rows(run: Run) -> list[Row]:
    return [_named(row) for row in attempted(known(run.study(NAME), "impl", "problem", "pass"))]


def _over_plain(rows: list[Row], cases: list[Row], *, ours: bool = True) -> float | None:
    """Return the best time of ours or of the peers over our best time for plain scores."""
    plain = best((row for row in rows if row["scores"] == PLAIN), ours=True)
    return gain(best(cases, ours=ours), plain)


def tables(run: Run) -> list[Table]:
    """Return a table for each shape and pass: a line per kind of scores."""
    return filled(*map(_table, groups(_rows(run), "shape", "pass").values()))


def _table(rows: list[Row]) -> Table:
    columns = shared("scores") | sides(timed(rows), "impl", ms)
    columns["time / plain"] = lambda cases: times(_over_plain(rows, cases))
    caption = f"{label(rows[0], 'shape', 'pass')}: ms"
    return Table.of(caption, rows, columns | RATIO, groups(rows, "scores").values())


def findings(run: Run) -> list[str]:
    """Return, for each shape and pass, our time over that of plain scores."""
    said = []
    for (shape, name), own in groups(_rows(run), "shape", "pass").items():
        each = [
            f"{times(ratio)} ({scores})"
            for (scores,), cases in groups(own, "scores").items()
            if scores != PLAIN and (ratio := _over_plain(own, cases))
        ]
        if each:
            said.append(f"{shape}, {name}: ours takes {', '.join(each)} the time of plain scores.")
    return said


def pictures(run: Run) -> dict[str, plot.Picture]:
    """Plot times over ours for plain scores, for the shape with the most kinds of scores."""
    shapes = groups(timed(_rows(run)), "shape")
    own = max(shapes.values(), key=lambda rows: len(values(rows, "scores")), default=[])
    if len(values(own, "scores")) <= 1:
        return {}
    records = [
        {"panel": name, "place": f"{scores}, {who}", "ours": ours}
        | {"value": plot.exact(ratio), "said": times(ratio)}
        for (name,), rows in groups(own, "pass").items()
        for (scores,), cases in groups(rows, "scores").items()
        for who, ours in (("ours", True), ("best peer", False))
        if (ratio := _over_plain(rows, cases, ours=ours))
    ]
    made = plot.bars("Time over that of our kernels for plain scores", records, columns=2)
    return plot.shown("scores-times", made)
