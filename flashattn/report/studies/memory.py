"""Memory of the model: the peak and its parts, the timeline, and the largest blocks."""

from __future__ import annotations

from functools import partial

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
DRAWN = 250  # points of a timeline in a plot
ROOM = 1.3  # top of the y axis, relative to the highest peak
SHOWN = 0.12  # least share of a step at which a phase has room for its name


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
            [row | block for row in known(rows, "largest") for block in row["largest"]],
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
    said += [*_filled(rows), *_autocast(rows)]
    for row in known(rows, "residual_bytes")[-1:]:
        where = label(row, "size", "context", "batch")
        took = binary(row["residual_bytes"])
        said.append(f"One tensor of the residual stream takes {took} ({where}).")
    return said


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


def pictures(run: Run) -> dict[str, plot.Picture]:
    """Plot active memory over time, for the longest context of each size and precision."""
    drawn, axes = {}, ("size", "precision", "impl")
    for case, own in groups(ok(run.study(NAME), "timeline"), *axes).items():
        cases = ordered(list(groups(own, "context").values())[-1], "step")
        what = label(cases[0], "size", "context", "batch", "precision", "impl")
        name = "-".join(str(part) for part in (NAME, *case) if part).replace(".", "_")
        records = [record for row in cases for record in _records(row)]
        drawn[name] = _picture(f"Active memory, {what}", records)
    return drawn


def _picture(title: str, records: list[plot.Record]) -> plot.Picture:
    """Plot a panel for each step, with its phases shaded and named, and its peak labelled."""
    x, y = plot.quantity("x", "ms"), plot.quantity("y", "GiB", zero=True)
    x["scale"] = {"nice": False}
    y["scale"] = {"domain": [0, ROOM * max(record.get("y", 0) for record in records)]}
    hues = {"field": "name", "type": "nominal", "legend": None, "scale": {"range": plot.CYCLE}}
    shade = {"color": hues, "opacity": {"value": 0.14}}
    area = {"type": "area", "interpolate": "step-after", "line": True, "opacity": 0.3}
    told, red = plot.tips(x="ms", y="GiB active"), {"value": plot.CYCLE[5]}
    phase, peak = "datum.kind == 'phase'", "datum.kind == 'peak'"
    mark, said = {"type": "point", "shape": "triangle-down", "filled": True}, {"field": "label"}
    end = max(record.get("x", 0) for record in records)
    early = f"datum.x < {0.4 * end}"  # then the label has no room to the left
    beside = plot.TEXT | {"dy": -7, "dx": {"expr": f"{early} ? 8 : -8"}}
    beside["align"] = {"expr": f"{early} ? 'left' : 'right'"}
    layers = [
        plot.layer("rect", phase, x=x, x2={"field": "end"}, **shade),
        plot.layer(area, "!datum.kind", x=x, y=y, tooltip=told, color={"value": plot.CYCLE[0]}),
        plot.layer(plot.TEXT, phase, x=x | {"field": "middle"}, y={"value": 14}, text=said),
        plot.layer(mark, peak, x=x, y=y, color=red),
        plot.layer(beside, peak, x=x, y=y, text=said, color=red),
    ]
    return plot.picture(title, records, layers, columns=3, least=240)


def _records(row: Row) -> list[plot.Record]:
    """Return a step's phases, its peak, and its timeline as the maxima of about ``DRAWN`` spans."""
    (start, _), *_, (end, _) = row["timeline"]
    panel, spans = {"panel": label(row, "step")}, dict[int, list[float]]()
    for second, count in row["timeline"]:
        point = [1e3 * (second - start), count / GIBI]
        span = int(DRAWN * (second - start) / (end - start or 1))
        spans[span] = max(spans.get(span, point), point, key=lambda point: point[1])
    points = [panel | {"x": plot.exact(x), "y": plot.exact(y)} for x, y in spans.values()]
    moment, most = max(spans.values(), key=lambda point: point[1])
    top = {"kind": "peak", "x": moment, "y": most, "label": f"peak {digits(most)} GiB"}
    phases = []
    for name, *ends in row.get("phases") or ():
        left, right = (1e3 * (second - start) for second in ends)
        wide = right - left > SHOWN * 1e3 * (end - start)
        facts = {"kind": "phase", "name": name, "label": name if wide else ""}
        places = {"x": left, "end": right, "middle": (left + right) / 2}
        phases.append(panel | facts | {fact: plot.exact(ms) for fact, ms in places.items()})
    return [*phases, *points, panel | top]
