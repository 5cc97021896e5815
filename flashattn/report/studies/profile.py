"""Where device time goes: kernels, their categories, and the parts of attention."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from flashattn.report.plot import CYCLE, legend, panels
from flashattn.report.rows import groups, known, label, ordered
from flashattn.report.runs import Row, Run
from flashattn.report.study import Study, Table
from flashattn.report.units import ms, percent, tera, word

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "profile"
CASE = ("size", "context", "batch", "precision", "impl", "compiled")
SHAPE = ("dtype", "head_dim", "seq")
MATMUL = "matmul"
SOFTMAX = "softmax"
PARTS = {"scores": "scores, QKᵀ", SOFTMAX: SOFTMAX, "values": "values, PV"}
COLOURS = {
    MATMUL: "#0a58ca",
    "ours": "#5b8c00",
    "attention": "#17917f",
    SOFTMAX: "#c1121f",
    "elementwise": "#d4a017",
    "reduction": "#e07a1f",
    "copy": "#8a817c",
    "indexing": "#7b2cbf",
    "optimizer": "#d16ba5",
    "other": "#c9c5c0",
}
LONGEST = 8  # kernels told of each step
MOST = 40  # bars in the picture


def _profiled(run: Run) -> list[Row]:
    rows = [row for row in run.study(NAME) if row["status"] == "ok" and row.get("categories")]
    return ordered(known(rows, "step"), *CASE, "step")


def _divided(run: Run) -> list[Row]:
    rows = [row for row in run.study(NAME) if row["status"] == "ok" and row.get("parts")]
    return ordered(known(rows, *SHAPE), *SHAPE, "heads")


def _total(row: Row) -> float:
    return float(row.get("device_seconds") or sum(row["categories"].values()))


def tables(run: Run) -> list[Table]:
    """Return the categories of every step, its phases, attention's parts, then the kernels."""
    rows, parts = _profiled(run), _divided(run)
    found = [_categories(rows), _phases([row for row in rows if row.get("phases")]), _parts(parts)]
    found += [_kernels(own) for own in groups(rows, *CASE).values()]
    return [table for table in found if table.lines]


def _shares(rows: list[Row], fact: str) -> tuple[list[str], list[list[str]]]:
    """Return the names in a fact, the largest first, and the share of each in every row."""
    sums: Counter[str] = Counter()
    for row in rows:
        sums.update({name: part / _total(row) for name, part in row[fact].items()})
    names = [name for name, _ in sums.most_common()]
    return names, [
        [percent(row[fact][name] / _total(row)) if name in row[fact] else "" for name in names]
        for row in rows
    ]


def _categories(rows: list[Row]) -> Table:
    names, shares = _shares(rows, "categories")
    lines = [
        [
            label(row, *CASE),
            row["step"],
            ms(_total(row)),
            ms(row.get("seconds")),
            percent(_total(row) / row["seconds"] if row.get("seconds") else None),
            *cells,
        ]
        for row, cells in zip(rows, shares, strict=True)
    ]
    return Table(
        caption="Device time of a step: the profile's and the benchmark's in ms, and who has it",
        header=["case", "step", "profile", "benchmark", "profile / benchmark", *names],
        lines=lines,
        rows=rows,
    )


def _phases(rows: list[Row]) -> Table:
    names, shares = _shares(rows, "phases")
    lines = [
        [label(row, *CASE), row["step"], ms(_total(row)), *cells]
        for row, cells in zip(rows, shares, strict=True)
    ]
    return Table(
        caption="Device time by phase: all of it in ms, and the share of each phase",
        header=["case", "step", "profile", *names],
        lines=lines,
        rows=rows,
    )


def _parts(rows: list[Row]) -> Table:
    lines = []
    for row in rows:
        seconds, flops = _sums(row)
        for name, part in row["parts"].items():
            lines.append(
                [
                    PARTS.get(name, name),
                    *(word(fact, row.get(fact)) for fact in ("dtype", "heads", "head_dim", "seq")),
                    ms(part["seconds"]),
                    percent(part["seconds"] / seconds),
                    percent(part["flops"] / flops if flops else None),
                    tera(part["flops"] / part["seconds"]),
                    tera(part["bytes"] / part["seconds"] if part.get("bytes") else None),
                ]
            )
    return Table(
        caption="Inside naive attention: each part in ms, its share of time and of flops",
        header=[
            "part",
            "dtype",
            "heads",
            "D",
            "N",
            "time",
            "of time",
            "of flops",
            "TFLOP/s",
            "TB/s",
        ],
        lines=lines,
        rows=rows,
    )


def _sums(row: Row) -> tuple[float, float]:
    parts = row["parts"].values()
    return sum(part["seconds"] for part in parts), sum(part["flops"] for part in parts)


def _kernels(rows: list[Row]) -> Table:
    lines = [
        [
            kernel["name"],
            row["step"],
            kernel["category"],
            str(kernel["calls"]),
            ms(kernel["seconds"]),
            percent(kernel["seconds"] / _total(row)),
        ]
        for row in rows
        for kernel in (row.get("kernels") or [])[:LONGEST]
    ]
    return Table(
        caption=f"{label(rows[0], *CASE)}: the longest kernels, in ms",
        header=["kernel", "step", "category", "calls", "time", "of step"],
        lines=lines,
        rows=rows,
    )


def findings(run: Run) -> list[str]:
    """Say what share matrix products have in each step, and what softmax has of attention."""
    said = []
    for rows in groups(_profiled(run), *CASE).values():
        shares = [
            f"{percent(row['categories'].get(MATMUL, 0) / _total(row))} of {row['step']}"
            for row in rows
        ]
        rest: Counter[str] = Counter(rows[-1]["categories"])
        rest.pop(MATMUL, None)
        after = ""
        if rest:
            ((name, seconds),) = rest.most_common(1)
            after = f"; most of the rest of {rows[-1]['step']} is {name}, "
            after += percent(seconds / _total(rows[-1]))
        said.append(f"{label(rows[0], *CASE)}: matrix products are {', '.join(shares)}{after}.")
    for cases in groups(_divided(run), "dtype", "head_dim").values():
        row = cases[-1]
        if SOFTMAX not in row["parts"]:
            continue
        (time, flops), part = _sums(row), row["parts"][SOFTMAX]
        where = label(row, *SHAPE)
        said.append(
            f"Inside naive attention ({where}) softmax has {percent(part['seconds'] / time)} of "
            f"the time for {percent(part['flops'] / flops)} of the flops."
        )
    return said


def pictures(run: Run) -> dict[str, Figure]:
    """Draw each step as one bar of its categories' shares."""
    rows = _profiled(run)[-MOST:]
    if not rows:
        return {}
    names = [name for name in COLOURS if any(name in row["categories"] for row in rows)]
    names += [name for name in _every_category(rows) if name not in COLOURS]
    figure, axes = panels("Device time by kind of kernel", 1, 1, height=0.34 * len(rows) + 0.9)
    axis, left = axes[0][0], [0.0] * len(rows)
    for i, name in enumerate(names):
        shares = [100 * row["categories"].get(name, 0) / _total(row) for row in rows]
        colour = COLOURS.get(name, CYCLE[i % len(CYCLE)])
        drawn = axis.barh(
            range(len(rows)), shares, left=left, color=colour, label=name, height=0.75
        )
        said = [f"{share:.0f}" if share >= 4 else "" for share in shares]  # noqa: PLR2004 - room
        axis.bar_label(drawn, said, label_type="center", color="white", fontsize=7.5)
        left = [start + share for start, share in zip(left, shares, strict=True)]
    axis.set_yticks(range(len(rows)), [label(row, *CASE, "step") for row in rows], fontsize=8)
    axis.invert_yaxis()
    axis.margins(y=0.01)
    axis.set_xlim(0, 100)
    axis.set_xlabel("% of device time")
    legend(figure, axes)
    return {"profile-categories": figure}


def _every_category(rows: list[Row]) -> list[str]:
    """Return the names of all categories, each once."""
    return list(dict.fromkeys(name for row in rows for name in row["categories"]))


STUDY = Study(
    name=NAME,
    title="Where the time goes",
    question="Which kernels have the device's time, and does attention spend it on its products?",
    tables=tables,
    pictures=pictures,
    findings=findings,
)
