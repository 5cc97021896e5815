"""Device time by kernel, by category, and by part of attention."""

from __future__ import annotations

from collections import Counter
from functools import partial

from flashattn.report import plot
from flashattn.report.rows import groups, label, ok, ordered
from flashattn.report.runs import Row, Run
from flashattn.report.study import Cell, Table, facts, filled
from flashattn.report.units import ms, percent, tera

NAME = "profile"
TITLE = "Where the time goes"
QUESTION = "Which kernels take the device's time, and does attention spend it on matrix products?"
CASE = ("size", "context", "batch", "precision", "impl", "compiled")
SHAPE = ("dtype", "head_dim", "seq")
MATMUL, SOFTMAX = "matmul", "softmax"
PARTS = {"scores": "scores, QKᵀ", SOFTMAX: SOFTMAX, "values": "values, PV"}
CATEGORIES: tuple[str, ...] = (MATMUL, "ours", "attention", SOFTMAX, "elementwise", "reduction")
CATEGORIES += ("copy", "indexing", "optimizer", "other")  # one per colour
LONGEST = 8  # kernels listed for each step
MOST = 40  # most bars in the plot


def _profiled(run: Run) -> list[Row]:
    rows = ok(run.study(NAME), "step", "categories")
    return ordered((row for row in rows if row["categories"]), *CASE, "step")


def _divided(run: Run) -> list[Row]:
    return ordered(ok(run.study(NAME), "parts", *SHAPE), *SHAPE, "heads")


def _pieces(row: Row) -> list[Row]:
    """Return a row for each part of attention, with its share of the time and of the FLOPs."""
    parts = row["parts"].values()
    seconds, flops = (sum(part[of] for part in parts) for of in ("seconds", "flops"))
    return [
        row
        | {"part": name, "of_time": part["seconds"] / seconds, "of_flops": part["flops"] / flops}
        | part
        for name, part in row["parts"].items()
    ]


def _total(row: Row) -> float:
    return float(row.get("device_seconds") or sum(row["categories"].values()))


def tables(run: Run) -> list[Table]:
    """Return the categories and phases of each step, the parts of attention, and the kernels."""
    rows = _profiled(run)
    phases = [row for row in rows if row.get("phases")]
    case: dict[str, Cell] = {"case": lambda row: label(row, *CASE), **facts("step")}
    case["profile"] = lambda row: ms(_total(row))
    times: dict[str, Cell] = {
        "benchmark": lambda row: ms(row.get("seconds")),
        "profile / benchmark": lambda row: percent(
            _total(row) / row["seconds"] if row.get("seconds") else None
        ),
    }
    return filled(
        Table.of(
            "Device time of a step in ms, by the profiler and by the benchmark, and its categories",
            rows,
            case | times | _shares(rows, "categories"),
        ),
        Table.of(
            "Device time of a step in ms, and the share of each phase",
            phases,
            case | _shares(phases, "phases"),
        ),
        _parts(_divided(run)),
        *(_kernels(own) for own in groups(rows, *CASE).values()),
    )


def _shares(rows: list[Row], fact: str) -> dict[str, Cell]:
    """Return a column for each name in a fact, with its share of device time, largest first."""
    sums: Counter[str] = Counter()
    for row in rows:
        sums.update({name: part / _total(row) for name, part in row[fact].items()})

    def cell(name: str, row: Row) -> str:
        return percent(row[fact][name] / _total(row)) if name in row[fact] else ""

    return {name: partial(cell, name) for name, _ in sums.most_common()}


def _parts(rows: list[Row]) -> Table:
    columns: dict[str, Cell] = {"part": lambda part: str(PARTS.get(part["part"], part["part"]))}
    columns |= facts("dtype", "heads", D="head_dim", N="seq")
    columns |= {
        "time": lambda part: ms(part["seconds"]),
        "of time": lambda part: percent(part["of_time"]),
        "of FLOPs": lambda part: percent(part["of_flops"]),
        "TFLOP/s": lambda part: tera(part["flops"] / part["seconds"]),
        "TB/s": lambda part: tera(part["bytes"] / part["seconds"] if part.get("bytes") else None),
    }
    caption = "Inside naive attention: time in ms, and shares of time and FLOPs"
    return Table.of(caption, rows, columns, [piece for row in rows for piece in _pieces(row)])


def _kernels(rows: list[Row]) -> Table:
    return Table.of(
        f"{label(rows[0], *CASE)}: the longest kernels, in ms",
        rows,
        {"kernel": lambda row: row["name"]}
        | facts("step", "category", "calls")
        | {
            "time": lambda row: ms(row["seconds"]),
            "of step": lambda row: percent(row["seconds"] / _total(row)),
        },
        [row | kernel for row in rows for kernel in (row.get("kernels") or [])[:LONGEST]],
    )


def findings(run: Run) -> list[str]:
    """Return the shares of matrix products in each step, and of softmax in naive attention."""
    said = []
    for rows in groups(_profiled(run), *CASE).values():
        shares = [
            f"{percent(row['categories'].get(MATMUL, 0) / _total(row))} of {row['step']}"
            for row in rows
        ]
        last = rows[-1]
        rest = {name: part for name, part in last["categories"].items() if name != MATMUL}
        after = ""
        if rest:
            name = max(rest, key=rest.__getitem__)
            share = percent(rest[name] / _total(last))
            after = f"; the largest other category of {last['step']} is {name} with {share}"
        said.append(f"{label(last, *CASE)}: matrix products take {', '.join(shares)}{after}.")
    for cases in groups(_divided(run), "dtype", "head_dim").values():
        said += [
            f"Inside naive attention ({label(part, *SHAPE)}) softmax takes "
            f"{percent(part['of_time'])} of the time for {percent(part['of_flops'])} of the FLOPs."
            for part in _pieces(cases[-1])
            if part["part"] == SOFTMAX
        ]
    return said


def pictures(run: Run) -> dict[str, plot.Picture]:
    """Plot the categories of each step as a stacked bar."""
    rows = _profiled(run)[-MOST:]
    found = dict.fromkeys(name for row in rows for name in row["categories"])
    names = [*(c for c in CATEGORIES if c in found), *(c for c in found if c not in CATEGORIES)]
    known = dict(zip(CATEGORIES, plot.CYCLE, strict=True))
    records = [
        {"panel": "", "place": label(row, *CASE, "step"), "name": name, "order": names.index(name)}
        | {"share": plot.exact(100 * seconds / _total(row)), "ms": plot.exact(1e3 * seconds)}
        for row in rows
        for name, seconds in row["categories"].items()
    ]
    y = {"field": "place", "type": "nominal", "sort": None, "title": None}
    x = plot.quantity("share", "% of device time") | {"stack": "zero"}
    x["scale"] = {"domain": [0, 100]}
    told = plot.tips("ms", place="step", name="category", share="% of device time")
    mark = plot.layer("bar", x=x, y=y, order={"field": "order"}, tooltip=told)
    made = plot.picture("Device time by category", records, [mark], height={"step": 17})
    made = plot.beside(made, [record["place"] for record in records])
    colours = [known.get(name, plot.colour(name)) for name in names]
    return plot.shown("profile-categories", plot.named(made, names, colours))
