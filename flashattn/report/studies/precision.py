"""Precision: errors of sums in 16 bits, dtypes under autocast, and LayerNorm in 16 bits."""

from __future__ import annotations

import math
from typing import Any

from flashattn.report import plot
from flashattn.report.rows import groups, ok, ordered
from flashattn.report.runs import Row, Run
from flashattn.report.study import Cell, Table, facts, filled
from flashattn.report.units import percent, word

NAME = "precision"
TITLE = "Precision"
QUESTION = "What does a sum lose in 16 bits, and what does autocast therefore leave in 32?"
FACTS = {
    "accumulation": ("accumulator", "addend", "value", "count", "result"),
    "autocast": ("dtype", "tensors"),
    "layernorm": ("dtype", "quantity", "scale"),
}


def _part(run: Run, name: str) -> list[Row]:
    rows = [row for row in ok(run.study(NAME), *FACTS[name]) if row.get("part") == name]
    return ordered(rows, "count", "value", "accumulator", "addend", "cast", "dtype")


def tables(run: Run) -> list[Table]:
    """Return the sums, the dtypes under autocast, and the parts of a LayerNorm."""
    sums: dict[str, Cell] = {
        "sum": _sum,
        "accumulator": lambda row: word("dtype", row["accumulator"]),
        "addend": lambda row: word("dtype", row["addend"]),
        **facts("cast"),
        "result": lambda row: f"{row['result']:.17g}",
        "error": lambda row: percent(_off(row)),
    }
    layernorm = facts("quantity", "dtype") | {
        fact: _number(fact) for fact in ("scale", "exact", "got", "error")
    }
    return filled(
        Table.of("Accumulation", _part(run, "accumulation"), sums),
        _dtypes(_part(run, "autocast")),
        Table.of("LayerNorm in 16 bits", _part(run, "layernorm"), layernorm),
    )


def _sum(row: Row) -> str:
    return f"{row['count']} x {row['value']:g}"


def _off(row: Row) -> float:
    return float(row["result"] / (row["value"] * row["count"]) - 1)


def _number(fact: str) -> Cell:
    return lambda row: "" if row.get(fact) is None else f"{row[fact]:.6g}"


def _dtypes(rows: list[Row]) -> Table:
    names = dict.fromkeys(name for row in rows for name in row["tensors"])
    return Table(
        caption="Dtypes under autocast",
        header=["tensor", *(f"{word('dtype', row['dtype'])} autocast" for row in rows)],
        lines=[
            [name, *(word("dtype", row["tensors"].get(name)) for row in rows)] for name in names
        ],
        rows=rows,
    )


def findings(run: Run) -> list[str]:
    """Return the worst sums, where they stagnate, and the LayerNorm quantities that overflow."""
    said = []
    for rows in groups(_part(run, "accumulation"), "count", "value").values():
        best, last = (choose(rows, key=lambda row: abs(_off(row))) for choose in (min, max))
        stop = _stagnates(last)
        end = f" and stops growing at addend {stop}" if stop else ""
        said.append(
            f"{_sum(last)}: {_sides(last)} gives {last['result']:.10g}, off by "
            f"{percent(abs(_off(last)))}{end}; {_sides(best)} is the closest with "
            f"{best['result']:.10g}."
        )
    for (dtype,), rows in groups(_part(run, "layernorm"), "dtype").items():
        lost = [_where(row) for row in rows if not _finite(row.get("got"))]
        if lost:
            names = ", ".join(dict.fromkeys(lost))
            said.append(f"{word('dtype', dtype)} LayerNorm overflows: {names}.")
        errors = [row for row in rows if _finite(row.get("got")) and _finite(row.get("error"))]
        if errors:
            last = max(errors, key=lambda row: abs(row["error"]))
            said.append(
                f"The largest finite error of {word('dtype', dtype)} LayerNorm is "
                f"{last['error']:.3g} ({_where(last)})."
            )
    for row in _part(run, "autocast"):
        kept = [name for name, dtype in row["tensors"].items() if dtype == "float32"]
        if kept:
            said.append(f"{word('dtype', row['dtype'])} autocast keeps in fp32: {', '.join(kept)}.")
    return said


def _sides(row: Row) -> str:
    return " + ".join(word("dtype", row[side]) for side in ("accumulator", "addend"))


def _stagnates(row: Row) -> int | None:
    """Return the first point of the curve after which the sum stagnates, or None."""
    flat = [n for n, partial in row.get("curve") or [] if partial == row["result"]]
    return flat[0] if len(flat) > 1 else None


def _where(row: Row) -> str:
    return f"{row['quantity']} at scale {row['scale']:g}"


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def pictures(run: Run) -> dict[str, plot.Picture]:
    """Plot the partial sums over the number of addends, with a panel for each sum."""
    rows = [row for row in _part(run, "accumulation") if row.get("curve")]
    records: list[plot.Record] = [
        {"panel": _sum(row), "name": _named(row)}
        | {"x": plot.exact(100 * n / row["count"]), "y": plot.exact(partial)}
        for row in rows
        for n, partial in row["curve"]
    ]
    for (count, value), (row, *_) in groups(rows, "count", "value").items():
        for done, said in ((0, ""), (100, "exact")):
            end = {"x": done, "y": plot.exact(done * count * value / 100), "label": said}
            line: plot.Record = {"panel": _sum(row), "name": "exact", "kind": "reference"}
            records.append(line | end)
    x, y = plot.quantity("x", "% of the addends"), plot.quantity("y", "partial sum")
    look: Any = {"dots": False, "columns": 2, "least": 280}
    return plot.shown("precision-sums", plot.lines("Partial sums", records, x, y, **look))


def _named(row: Row) -> str:
    return _sides(row) + (f", {row['cast']}" if row.get("cast") in ("implicit", "explicit") else "")
