"""Precision: what is lost in a sum, and which dtype autocast gives to whom."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from flashattn.report.plot import CYCLE, heading, legend, panels
from flashattn.report.rows import groups, known, ordered
from flashattn.report.runs import Row, Run
from flashattn.report.study import Study, Table
from flashattn.report.units import percent, word

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "precision"
FACTS = {
    "accumulation": ("accumulator", "addend", "value", "count", "result"),
    "autocast": ("dtype", "tensors"),
    "layernorm": ("dtype", "quantity", "scale"),
}


def _part(run: Run, name: str) -> list[Row]:
    rows = [row for row in run.study(NAME) if row.get("part") == name and row["status"] == "ok"]
    return ordered(
        known(rows, *FACTS[name]), "count", "value", "accumulator", "addend", "cast", "dtype"
    )


def tables(run: Run) -> list[Table]:
    """Return the sums, the dtypes under autocast, and the parts of a LayerNorm."""
    found = [
        _sums(_part(run, "accumulation")),
        _dtypes(_part(run, "autocast")),
        _layernorm(_part(run, "layernorm")),
    ]
    return [table for table in found if table.lines]


def _exact(row: Row) -> float:
    return float(row["value"] * row["count"])


def _sums(rows: list[Row]) -> Table:
    lines = [
        [
            f"{row['count']} x {row['value']:g}",
            word("dtype", row["accumulator"]),
            word("dtype", row["addend"]),
            row.get("cast") or "",
            f"{row['result']:.17g}",
            percent(row["result"] / _exact(row) - 1),
        ]
        for row in rows
    ]
    header = ["sum", "accumulator", "addend", "cast", "result", "error"]
    return Table(caption="Accumulation", header=header, lines=lines, rows=rows)


def _dtypes(rows: list[Row]) -> Table:
    names = list(dict.fromkeys(name for row in rows for name in row["tensors"]))
    lines = [
        [name, *(word("dtype", row["tensors"].get(name, "")) for row in rows)] for name in names
    ]
    header = ["tensor", *(f"{word('dtype', row['dtype'])} autocast" for row in rows)]
    return Table(caption="Which dtype autocast gives", header=header, lines=lines, rows=rows)


def _layernorm(rows: list[Row]) -> Table:
    lines = [
        [
            row["quantity"],
            word("dtype", row["dtype"]),
            *(_number(row.get(fact)) for fact in ("scale", "exact", "got", "error")),
        ]
        for row in rows
    ]
    header = ["quantity", "dtype", "scale", "exact", "got", "error"]
    return Table(caption="LayerNorm in 16 bits", header=header, lines=lines, rows=rows)


def _number(value: float | None) -> str:
    return (
        "" if value is None else f"{value:.6g}" if isinstance(value, (int, float)) else str(value)
    )


def findings(run: Run) -> list[str]:
    """Say which sum is off the most and where it stops, and which parts of LayerNorm fail."""
    said = []
    for rows in groups(_part(run, "accumulation"), "count", "value").values():
        worst = max(rows, key=lambda row: abs(row["result"] - _exact(row)))
        best = min(rows, key=lambda row: abs(row["result"] - _exact(row)))
        stops = _stops(worst)
        off = percent(abs(worst["result"] / _exact(worst) - 1))
        end = f" and stops growing by addend {stops}" if stops else ""
        said.append(
            f"{worst['count']} x {worst['value']:g}: {_sides(worst)} gives {worst['result']:.10g}, "
            f"off by {off}{end}; {_sides(best)} is the closest with {best['result']:.10g}."
        )
    return [*said, *_overflows(_part(run, "layernorm")), *_kept(_part(run, "autocast"))]


def _sides(row: Row) -> str:
    return " + ".join(word("dtype", row[side]) for side in ("accumulator", "addend"))


def _stops(row: Row) -> int | None:
    """Return the first point of the curve from which the sum stays what it is."""
    curve = row.get("curve") or []
    flat = [n for n, partial in curve if partial == row["result"]]
    return flat[0] if len(flat) > 1 else None


def _overflows(rows: list[Row]) -> list[str]:
    said = []
    for (dtype,), own in groups(rows, "dtype").items():
        lost = [row for row in own if not _finite(row.get("got"))]
        if lost:
            names = dict.fromkeys(f"{row['quantity']} at scale {row['scale']:g}" for row in lost)
            said.append(f"In {word('dtype', dtype)} LayerNorm has no finite {', '.join(names)}.")
        errors = [row for row in own if row not in lost and _finite(row.get("error"))]
        if errors:
            worst = max(errors, key=lambda row: abs(row["error"]))
            said.append(
                f"In {word('dtype', dtype)} the largest error that stays finite is "
                f"{worst['error']:.3g}, in {worst['quantity']} at scale {worst['scale']:g}."
            )
    return said


def _finite(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _kept(rows: list[Row]) -> list[str]:
    """Say what stays in fp32 under autocast."""
    return [
        f"Under {word('dtype', row['dtype'])} autocast "
        f"{', '.join(name for name, dtype in row['tensors'].items() if dtype == 'float32')} "
        "stay in fp32."
        for row in rows
        if "float32" in row["tensors"].values()
    ]


def pictures(run: Run) -> dict[str, Figure]:
    """Draw the partial sums against the number of addends, a panel for each sum."""
    rows = [row for row in _part(run, "accumulation") if row.get("curve")]
    found = list(groups(rows, "count", "value").values())
    if not found:
        return {}
    figure, axes = panels("Partial sums", 1, len(found), height=3.4)
    names = list(dict.fromkeys(_named(row) for row in rows))
    for axis, own in zip(axes[0], found, strict=True):
        count, exact = own[0]["count"], _exact(own[0])
        axis.plot([0, count], [0, exact], color="0.5", linestyle="--", label="exact", zorder=4)
        for row in own:
            i = names.index(_named(row))
            x, y = zip(*row["curve"], strict=True)
            axis.plot(x, y, color=CYCLE[i % len(CYCLE)], label=names[i], linewidth=1.8)
        heading(axis, f"{count} x {own[0]['value']:g}")
        axis.set_xlabel("addends")
    axes[0][0].set_ylabel("partial sum")
    legend(figure, axes)
    return {"precision-sums": figure}


def _named(row: Row) -> str:
    return _sides(row) + (f", {row['cast']}" if row.get("cast") in ("implicit", "explicit") else "")


STUDY = Study(
    name=NAME,
    title="Precision",
    question="What does a sum lose in 16 bits, and what does autocast therefore leave in 32?",
    tables=tables,
    pictures=pictures,
    findings=findings,
)
