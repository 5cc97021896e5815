"""Memory of the model: the peak, its parts, its timeline and its largest blocks."""

from __future__ import annotations

from functools import partial
from typing import Any

from flashattn.report import plot
from flashattn.report.rows import attempted, groups, known, label, ok, ordered, pairs, worst
from flashattn.report.runs import Row, Run
from flashattn.report.study import Cell, Table, facts, filled
from flashattn.report.units import GIBI, binary, digits, gib, or_mark, percent, times

NAME = "memory"
TITLE = "Where the memory goes"
QUESTION = "How much memory does a step need at its peak, what for, and could it be predicted?"
CASE = ("size", "context", "batch", "step", "precision", "impl")
KEPT = "activations"
SHADES = ("#dbe7fb", "#fde8d0", "#dff0e3", "#f3e1f2", "#ececec")  # of phases, cyclic


def _predicted(row: Row) -> float | None:
    """Return the predicted peak, or the sum of its parts."""
    return row.get("predicted_bytes") or sum(filter(None, (row.get("predicted") or {}).values()))


def _ratio(row: Row) -> float | None:
    """Return the measured peak over the predicted one."""
    need = _predicted(row)
    return row["peak_bytes"] / need if row.get("peak_bytes") and need else None


def tables(run: Run) -> list[Table]:
    """Return the peaks and their predictions, their parts, and the largest blocks."""
    rows = ordered(attempted(run.study(NAME)), *CASE)
    peaks: dict[str, Cell] = {
        "peak": lambda row: or_mark(row, gib, "peak_bytes"),
        "predicted": lambda row: gib(_predicted(row) or None),
        "peak / predicted": lambda row: digits(_ratio(row)),
        "before": lambda row: gib(row.get("before_bytes")),
    }
    blocks: dict[str, Cell] = {
        "case": lambda row: label(row, *CASE),
        "block": lambda block: binary(block["bytes"]),
        **facts("phase", "line"),
    }
    return filled(
        Table.of(
            "Peak memory in GiB, its prediction, and what was allocated before the step",
            rows,
            facts(*CASE) | peaks,
        ),
        _parts(known(rows, "predicted")),
        Table.of(
            "The largest blocks at the peak, and the line that allocated them",
            known(rows, "largest"),
            blocks,
            lambda row: [row | block for block in row["largest"]],
        ),
    )


def _parts(rows: list[Row]) -> Table:
    def cell(of: str, name: str, row: Row) -> str:
        return gib((row.get(of) or {}).get(name))

    columns = facts(*CASE)
    for name in dict.fromkeys(name for row in rows for name in row["predicted"]):
        columns[name] = partial(cell, "predicted", name)
        columns[f"{name}, measured"] = partial(cell, "measured", name)
    return Table.of("What the memory holds, in GiB: predicted, and measured", rows, columns)


def findings(run: Run) -> list[str]:
    """Return the error of predictions, the largest part of the peak, and the effect of bf16."""
    rows = ordered(ok(run.study(NAME)), *CASE)
    peaks = {label(row, *CASE): ratio for row in rows if (ratio := _ratio(row)) is not None}
    said = worst("Peak memory differs from its prediction", peaks)
    kept = {
        label(row, *CASE): row["measured"][KEPT] / row["predicted"][KEPT]
        for row in known(rows, "predicted", "measured")
        if row["predicted"].get(KEPT) and row["measured"].get(KEPT)
    }
    said += worst("Activations kept for backward differ from their prediction", kept)
    tops = {
        label(row, *CASE): max(count for _, count in row["timeline"]) / row["peak_bytes"]
        for row in known(rows, "timeline", "peak_bytes")
    }
    said += worst("A timeline's highest point differs from the allocator's peak", tops)
    return [*said, *_filled(rows), *_autocast(rows), *_residual(rows)]


def _filled(rows: list[Row]) -> list[str]:
    """Return the largest part of the largest peak."""
    row = max(known(rows, "peak_bytes", "predicted"), key=lambda r: r["peak_bytes"], default=None)
    if row is None:
        return []
    parts = {name: count for name, count in row["predicted"].items() if count}
    largest = max(parts, key=parts.__getitem__)
    share = percent(parts[largest] / sum(parts.values()))
    peak = f"{gib(row['peak_bytes'])} GiB ({label(row, *CASE)})"
    return [f"The largest peak is {peak}; {share} of its predicted bytes are {largest}."]


def _autocast(rows: list[Row]) -> list[str]:
    same, said = [fact for fact in CASE if fact != "precision"], []
    for cases in groups(known(rows, "peak_bytes"), "step").values():
        for fp32, bf16 in pairs(cases, "precision", "fp32", "bf16", *same)[-1:]:
            ratio = times(bf16["peak_bytes"] / fp32["peak_bytes"])
            said.append(f"{label(fp32, *same)}: bf16 autocast peaks at {ratio} the bytes of fp32.")
    return said


def _residual(rows: list[Row]) -> list[str]:
    return [
        f"One tensor of the residual stream takes {binary(row['residual_bytes'])} "
        f"({label(row, 'size', 'context', 'batch')})."
        for row in known(rows, "residual_bytes")[-1:]
    ]


def pictures(run: Run) -> dict[str, plot.Figure]:
    """Plot active memory over time, for the longest context of each size and precision."""
    drawn, axes = {}, ("size", "precision", "impl")
    for case, own in groups(ok(run.study(NAME), "timeline"), *axes).items():
        cases = ordered(list(groups(own, "context").values())[-1], "step")
        title = label(cases[0], "size", "context", "batch", "precision", "impl")
        figure, panels = plot.panels(f"Active memory, {title}", len(cases), 1, height=2.5)
        for (axis,), row in zip(panels, cases, strict=True):
            _timeline(axis, row)
        drawn["-".join(str(part) for part in (NAME, *case) if part).replace(".", "_")] = figure
    return drawn


def _timeline(axis: plot.Axes, row: Row) -> None:
    """Plot one step: phases shaded and named, the peak labelled."""
    start = row["timeline"][0][0]
    points = [(1e3 * (second - start), count / GIBI) for second, count in row["timeline"]]
    moments, sizes = zip(*points, strict=True)
    axis.fill_between(moments, sizes, step="post", color=plot.CYCLE[0], alpha=0.35, linewidth=0)
    axis.plot(moments, sizes, drawstyle="steps-post", color=plot.CYCLE[0], linewidth=1.2)
    moment, peak = max(points, key=lambda point: point[1])
    for i, (name, begin, end) in enumerate(row.get("phases") or ()):
        left, right = 1e3 * (begin - start), 1e3 * (end - start)
        axis.axvspan(left, right, color=SHADES[i % len(SHADES)], zorder=0, linewidth=0)
        look: Any = {"ha": "center", "va": "top", "fontsize": 8.5, "color": "0.25"}
        axis.text((left + right) / 2, 1.29 * peak, name, **look)
    axis.plot([moment], [peak], marker="v", color="#c1121f", markersize=7, zorder=5)
    late = moment > (moments[0] + moments[-1]) / 2
    look = {"xytext": (-8 if late else 8, 3), "textcoords": "offset points", "color": "#c1121f"}
    where = "right" if late else "left"
    axis.annotate(f"peak {digits(peak)} GiB", (moment, peak), ha=where, **look)
    axis.set_title(row["step"], loc="left")
    axis.set(xlim=(moments[0], moments[-1]), ylim=(0, 1.32 * peak), xlabel="ms", ylabel="GiB")
