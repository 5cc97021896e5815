"""Windows, documents and prefixes: time against the number of unmasked query-key pairs."""

from __future__ import annotations

from flashattn.report import plot
from flashattn.report.rows import attempted, best, groups, known, ordered, timed, values
from flashattn.report.runs import Row, Run
from flashattn.report.study import RATIO, Cells, Table, filled, sides
from flashattn.report.units import digits, ms, percent

NAME = "masks"
TITLE = "Masks"
QUESTION = "Does time follow the pairs that a mask leaves?"
SHAPE = ("dtype", "batch", "heads", "kv_heads", "seq_q", "head_dim", "pass")


def _rows(run: Run) -> list[Row]:
    return attempted(known(run.study(NAME), "impl", "problem", "pass", "pairs"))


def tables(run: Run) -> list[Table]:
    """Return a table for each shape and pass: a line per mask, a column per implementation."""
    found = []
    for (*_, name), own in groups(_rows(run), *SHAPE).items():
        columns: dict[str, Cells] = {
            "problem": lambda cases: str(cases[0]["problem"]),
            "million pairs": lambda cases: digits(cases[0]["pairs"] / 1e6),
        }
        columns |= sides(timed(own), "impl", ms) | RATIO
        lines = groups(own, "pairs", "problem").values()
        found.append(Table.of(f"{name}: ms", own, columns, lines))
    return filled(*found)


def findings(run: Run) -> list[str]:
    """Return, for each shape and pass, our time for the fewest pairs relative to the most."""
    said = []
    for (*_, name), own in groups(_rows(run), *SHAPE).items():
        each = [best(cases, ours=True) for cases in groups(own, "problem").values()]
        ours = sorted((row for row in each if row), key=lambda row: int(row["pairs"]))
        if len(ours) > 1 and ours[0]["pairs"]:
            few, most = ours[0], ours[-1]
            share = percent(few["pairs"] / most["pairs"])
            said.append(
                f"{name}: {share} of the pairs take {percent(few['seconds'] / most['seconds'])} of"
                f" the time ({few['problem']} against {most['problem']})."
            )
    return said


def pictures(run: Run) -> dict[str, plot.Picture]:
    """Plot time over pairs for the shape that has the most masks, with a panel for each pass."""
    shapes = groups(timed(_rows(run)), *SHAPE[:-1])
    own = max(shapes.values(), key=lambda rows: len(values(rows, "problem")), default=[])
    if len(values(own, "pairs")) <= 1:
        return {}
    records = [
        {"panel": row["pass"], "name": row["impl"], "problem": row["problem"]}
        | {"x": plot.exact(row["pairs"] / 1e6), "y": plot.exact(1e3 * row["seconds"])}
        for row in ordered(own, "pass", "pairs")
    ]
    x, y = plot.quantity("x", "million pairs", log=True), plot.quantity("y", "ms", log=True)
    title = "Time over the pairs that are seen"
    made = plot.lines(title, records, x, y, columns=3, least=240, tell=("problem",))
    return {"masks-pairs": made}
