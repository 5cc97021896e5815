"""Memory of the model: the peak, its parts, its timeline and its largest blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashattn.report.plot import panels
from flashattn.report.rows import groups, label, ordered, pairs
from flashattn.report.runs import Row, Run
from flashattn.report.study import Study, Table
from flashattn.report.units import GIBI, MARKS, binary, digits, gib, percent, times, word

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "memory"
CASE = ("size", "context", "batch", "step", "precision", "impl")
KEPT = "activations"
SHADES = ("#dbe7fb", "#fde8d0", "#dff0e3", "#f3e1f2", "#ececec")  # of phases, in turn


def predicted(row: Row) -> float | None:
    """Return the predicted peak: as it was told, or else the sum of what it is made of."""
    parts = [part for part in (row.get("predicted") or {}).values() if part is not None]
    return row.get("predicted_bytes") or (sum(parts) if parts else None)


def tables(run: Run) -> list[Table]:
    """Return the peaks beside their predictions, their parts, and the largest blocks."""
    rows = [row for row in run.study(NAME) if row["status"] != "unsupported"]
    rows = ordered(rows, *CASE)
    found = [_peaks(rows), _parts([row for row in rows if row.get("predicted")])]
    found += [_blocks([row for row in rows if row.get("largest")])]
    return [table for table in found if table.lines]


def _cells(row: Row) -> list[str]:
    return [word(fact, row.get(fact)) for fact in CASE]


def _peaks(rows: list[Row]) -> Table:
    lines = [
        [
            *_cells(row),
            MARKS.get(row["status"], gib(row.get("peak_bytes"))),
            gib(predicted(row)),
            digits(ratio(row)),
            gib(row.get("before_bytes")),
        ]
        for row in rows
    ]
    return Table(
        caption="Peak of memory in GiB, what was predicted, and what was there before the step",
        header=[*CASE, "peak", "predicted", "peak / predicted", "before"],
        lines=lines,
        rows=rows,
    )


def ratio(row: Row) -> float | None:
    """Return the measured peak over the predicted one."""
    need = predicted(row)
    return row["peak_bytes"] / need if row.get("peak_bytes") and need else None


def _parts(rows: list[Row]) -> Table:
    names = list(dict.fromkeys(name for row in rows for name in row["predicted"]))
    lines = []
    for row in rows:
        measured = row.get("measured") or {}
        sides = [(row["predicted"].get(name), measured.get(name)) for name in names]
        lines.append([*_cells(row), *(gib(count) for side in sides for count in side)])
    return Table(
        caption="What the memory is for, in GiB: predicted, then measured where it is known",
        header=[*CASE, *(f"{name}{kind}" for name in names for kind in ("", ", measured"))],
        lines=lines,
        rows=rows,
    )


def _blocks(rows: list[Row]) -> Table:
    lines = [
        [label(row, *CASE), binary(block["bytes"]), block.get("phase") or "", block["line"] or ""]
        for row in rows
        for block in row["largest"]
    ]
    header = ["case", "block", "phase", "line"]
    caption = "The largest blocks at the peak, and the line that made them"
    return Table(caption=caption, header=header, lines=lines, rows=rows)


def findings(run: Run) -> list[str]:
    """Say how good the predictions are, what fills the peak, and what bf16 changes."""
    rows = ordered((row for row in run.study(NAME) if row["status"] == "ok"), *CASE)
    said = []
    known = [(abs(value - 1), row) for row in rows if (value := ratio(row)) is not None]
    if known:
        off, worst = max(known, key=lambda pair: pair[0])
        said.append(
            f"Of {len(known)} peaks the prediction is off by at most {percent(off)} "
            f"({label(worst, *CASE)})."
        )
    said += [*_held(rows), *_timed_peaks(rows), *_filled(rows)]
    return [*said, *_autocast(rows), *_residual(rows)]


def _held(rows: list[Row]) -> list[str]:
    """Say how far what forward keeps for backward is from its prediction, a GPU or none."""
    sides = {
        label(row, *CASE): (row["predicted"].get(KEPT), (row.get("measured") or {}).get(KEPT))
        for row in rows
        if row.get("predicted")
    }
    off = {case: abs(got / said - 1) for case, (said, got) in sides.items() if said and got}
    if not off:
        return []
    worst = max(off, key=off.__getitem__)
    said = f"Of {len(off)} cases the activations kept for backward are off their prediction by"
    return [f"{said} at most {percent(off[worst])} ({worst})."]


def _timed_peaks(rows: list[Row]) -> list[str]:
    """Say how far the timelines' highest points are from the peaks of steps without a recording."""
    tops = {
        label(row, *CASE): max(count for _, count in row["timeline"]) / row["peak_bytes"]
        for row in rows
        if row.get("timeline") and row.get("peak_bytes")
    }
    if not tops:
        return []
    worst = max(tops, key=lambda case: abs(tops[case] - 1))
    said = f"Of {len(tops)} timelines the highest point is off the allocator's peak by"
    return [f"{said} at most {percent(abs(tops[worst] - 1))} ({worst})."]


def _filled(rows: list[Row]) -> list[str]:
    """Say what takes most of the largest peak."""
    known = [row for row in rows if row.get("peak_bytes") and row.get("predicted")]
    if not known:
        return []
    row = max(known, key=lambda row: row["peak_bytes"])
    parts = {name: count for name, count in row["predicted"].items() if count}
    largest = max(parts, key=parts.__getitem__)
    share = percent(parts[largest] / sum(parts.values()))
    peak = f"{gib(row['peak_bytes'])} GiB ({label(row, *CASE)})"
    return [f"The largest peak is {peak}; by prediction {share} of its bytes are {largest}."]


def _autocast(rows: list[Row]) -> list[str]:
    same = tuple(fact for fact in CASE if fact != "precision")
    timeless = [row | {"seconds": row.get("seconds") or 1} for row in rows if row.get("peak_bytes")]
    said = []
    for cases in groups(timeless, "step").values():
        found = pairs(cases, "precision", "fp32", "bf16", *same)
        if found:
            fp32, bf16 = found[-1]
            share = times(bf16["peak_bytes"] / fp32["peak_bytes"])
            said.append(f"{label(fp32, *same)}: bf16 autocast peaks at {share} the bytes of fp32.")
    return said


def _residual(rows: list[Row]) -> list[str]:
    found = {
        (row.get("size"), row.get("context"), row.get("batch")): row["residual_bytes"]
        for row in rows
        if row.get("residual_bytes")
    }
    if not found:
        return []
    (size, context, batch), count = list(found.items())[-1]
    where = f"{size}, batch {batch}, context {context}"
    return [f"One tensor of the residual stream takes {binary(count)} ({where})."]


def pictures(run: Run) -> dict[str, Figure]:
    """Draw active memory over time, of the longest context of each size and precision."""
    rows = [row for row in run.study(NAME) if row["status"] == "ok" and row.get("timeline")]
    drawn = {}
    for (size, precision, impl), own in groups(rows, "size", "precision", "impl").items():
        context = max(row.get("context") or 0 for row in own)
        cases = ordered((row for row in own if (row.get("context") or 0) == context), "step")
        title = label(cases[0], "size", "context", "batch", "precision", "impl")
        figure, axes = panels(f"Active memory, {title}", len(cases), 1, height=2.5)
        for (axis,), row in zip(axes, cases, strict=True):
            _timeline(axis, row)
        stem = "-".join(str(part) for part in (NAME, size, precision, impl) if part)
        drawn[stem.replace(".", "_")] = figure
    return drawn


def _timeline(axis: Axes, row: Row) -> None:
    """Draw one step: its phases as shades with names, its peak with its size."""
    start = row["timeline"][0][0]
    points = [(1e3 * (second - start), count / GIBI) for second, count in row["timeline"]]
    times_, sizes = zip(*points, strict=True)
    axis.fill_between(times_, sizes, step="post", color="#0a58ca", alpha=0.35, linewidth=0)
    axis.plot(times_, sizes, drawstyle="steps-post", color="#0a58ca", linewidth=1.2)
    peak_time, peak = max(points, key=lambda point: point[1])
    axis.set_ylim(0, 1.32 * peak)
    for i, (name, begin, end) in enumerate(row.get("phases") or ()):
        left, right = 1e3 * (begin - start), 1e3 * (end - start)
        axis.axvspan(left, right, color=SHADES[i % len(SHADES)], zorder=0, linewidth=0)
        place: dict[str, Any] = {"ha": "center", "va": "top", "fontsize": 8.5, "color": "0.25"}
        axis.text((left + right) / 2, 1.29 * peak, name, **place)
    axis.plot([peak_time], [peak], marker="v", color="#c1121f", markersize=7, zorder=5)
    away = "right" if peak_time > (times_[0] + times_[-1]) / 2 else "left"
    shift = -8 if away == "right" else 8
    axis.annotate(
        f"peak {digits(peak)} GiB",
        (peak_time, peak),
        xytext=(shift, 3),
        textcoords="offset points",
        ha=away,
        color="#c1121f",
    )
    axis.set_title(row["step"], loc="left", fontsize=10)
    axis.set_xlim(times_[0], times_[-1])
    axis.set_ylabel("GiB")
    axis.set_xlabel("ms")


STUDY = Study(
    name=NAME,
    title="Where the memory goes",
    question="How much memory does a step need at its peak, for what, and was it to be foreseen?",
    tables=tables,
    pictures=pictures,
    findings=findings,
)
