"""The model end to end: times, speed against the roof, memory, and what each choice gains."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashattn.report.fit import geometric_mean, in_words
from flashattn.report.plot import bars, legend, panels
from flashattn.report.rows import (
    OURS,
    by,
    groups,
    known,
    label,
    ordered,
    pairs,
    speedup,
    timed,
    values,
)
from flashattn.report.runs import Row, Run
from flashattn.report.study import Study, Table
from flashattn.report.units import (
    ROOFS,
    digits,
    gib,
    ms,
    percent,
    seconds_or_mark,
    spread,
    tera,
    times,
    word,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "lm"
AXES = ("size", "context", "batch", "step", "precision", "impl", "compiled")
SETTING = ("precision", "impl", "compiled")
CASE = ("size", "context", "batch", "step")
# What is chosen, from what, and for what instead.
CONTRASTS: dict[str, tuple[str, Any, Any]] = {
    "tf32 / fp32": ("precision", "fp32", "tf32"),
    "bf16 / fp32": ("precision", "fp32", "bf16"),
    "compiled / eager": ("compiled", False, True),
    f"{OURS} / naive": ("impl", "naive", OURS),
    f"{OURS} / sdpa": ("impl", "sdpa", OURS),
}


def tables(run: Run) -> list[Table]:
    """Return the sizes, a table for each precision, attention and compiler, and the gains."""
    rows = known(run.study(NAME), "size", "step")
    found = [_table(run, own) for own in groups(rows, *SETTING).values()]
    axes = ("precision", "compiled", "impl")
    gains = [_gains(rows, axis) for axis in axes]
    return [table for table in [_sizes(rows), *found, *gains] if table.lines]


def _sizes(rows: list[Row]) -> Table:
    """Return the exact number of parameters of each size, and the bytes of a training's state."""
    told = [own[-1] for own in groups(known(rows, "parameters"), "size").values()]
    return Table(
        caption="The sizes: parameters, and GiB of them, their gradients and AdamW's two moments",
        header=["size", "parameters", "GiB"],
        lines=[
            [row["size"], f"{row['parameters']:,}".replace(",", " "), gib(16 * row["parameters"])]
            for row in told
        ],
        rows=told,
    )


def _table(run: Run, rows: list[Row]) -> Table:
    setting = label(rows[0], *SETTING)
    told = [row for row in ordered(rows, *CASE) if row["status"] != "unsupported"]
    return Table(
        caption=f"{setting}: a step in ms, memory in GiB",
        header=[
            *("size", "context", "batch", "step", "median", "mean ± std", "TFLOP/s", "of roof"),
            *("peak", "predicted"),
        ],
        lines=[
            [
                *(word(fact, row.get(fact)) for fact in CASE),
                seconds_or_mark(row),
                spread(row),
                tera(_speed(row)),
                percent(utilisation(run, row)),
                gib(row.get("peak_bytes")),
                gib(row.get("predicted_bytes")),
            ]
            for row in told
        ],
        rows=told,
    )


def _speed(row: Row) -> float | None:
    return row["flops"] / row["seconds"] if timed([row]) and row.get("flops") else None


def utilisation(run: Run, row: Row) -> float | None:
    """Return the model's flops per second over the measured roof of its precision."""
    speed, roof = _speed(row), run.roof(row, ROOFS.get(row.get("precision", "")))
    return speed / roof if speed and roof else None


def _gains(rows: list[Row], axis: str) -> Table:
    """Return the times side by side of rows that differ in ``axis`` alone, and their ratios."""
    same = tuple(fact for fact in AXES if fact != axis)
    contrasts = {name: c[1:] for name, c in CONTRASTS.items() if c[0] == axis}
    columns, lines, told = values(rows, axis), [], []
    for key, group in groups(rows, *same).items():
        sides = by(timed(group), axis)
        ratios = [
            times(speedup((sides[slow], sides[fast]))) if {slow, fast} <= set(sides) else ""
            for slow, fast in contrasts.values()
        ]
        if any(ratios):
            whole = by(group, axis)
            cells = [word(fact, value) for fact, value in zip(same, key, strict=True)]
            cells += [seconds_or_mark(whole.get(column)) for column in columns]
            lines.append([*cells, *ratios])
            told += group
    names = [word(axis, column) for column in columns]
    return Table(
        caption=f"What the {NOUNS[axis]} gains: a step in ms, and how many times as fast it is",
        header=[*(HEADS.get(fact, fact) for fact in same), *names, *contrasts],
        lines=lines,
        rows=told,
    )


NOUNS = {"precision": "precision", "compiled": "compiler", "impl": "choice of attention"}
HEADS = {"compiled": "compiler", "impl": "attention"}


def findings(run: Run) -> list[str]:
    """Say what each choice gains, the best train step, and how good the predictions are."""
    rows = known(run.study(NAME), "size", "step")
    said = []
    for name, (axis, slow, fast) in CONTRASTS.items():
        same = tuple(fact for fact in AXES if fact != axis)
        ratios = {
            label(pair[1], *same): speedup(pair) for pair in pairs(rows, axis, slow, fast, *same)
        }
        if ratios:
            said.append(f"Speed of a step, {name}: {in_words(ratios)}.")
    return [*said, *_best(run, rows), *_memory(rows)]


def _best(run: Run, rows: list[Row]) -> list[str]:
    """Say which way to take the largest model's train step is the fastest."""
    found = groups((row for row in timed(rows) if row["step"] == "train"), "size", "context")
    if not found:
        return []
    (size, context), cases = list(found.items())[-1]
    best = min(cases, key=lambda row: row["seconds"])
    share = utilisation(run, best)
    of_roof = f", {percent(share)} of the {best['precision']} roof" if share else ""
    setting = label(best, *SETTING)
    where = f"{len(cases)} train steps of {size} at context {context}"
    return [f"The fastest of {where} takes {ms(best['seconds'])} ms ({setting}){of_roof}."]


def _memory(rows: list[Row]) -> list[str]:
    """Say how far the measured peaks are from the predicted ones, and what did not fit."""
    said = []
    both = [row for row in timed(rows) if row.get("peak_bytes") and row.get("predicted_bytes")]
    if both:
        off = max(both, key=lambda row: abs(row["peak_bytes"] / row["predicted_bytes"] - 1))
        ratio = digits(off["peak_bytes"] / off["predicted_bytes"])
        said.append(
            f"Of {len(both)} measured peaks the one furthest from its prediction is {ratio} times "
            f"it ({label(off, *AXES)})."
        )
    failed = [row for row in rows if row["status"] == "oom"]
    if failed:
        need = [row["predicted_bytes"] for row in failed if row.get("predicted_bytes")]
        least = f", the smallest of them with {gib(min(need))} GiB predicted" if need else ""
        said.append(f"{len(failed)} of {len(rows)} cases do not fit into memory{least}.")
    return said


def pictures(run: Run) -> dict[str, Figure]:
    """Draw how many times as fast each choice makes a step, by size."""
    rows = ordered(timed(known(run.study(NAME), "size", "step")), "size")
    series: dict[str, list[float | None]] = {}
    sizes = list(dict.fromkeys(row["size"] for row in rows))
    for name, (axis, slow, fast) in CONTRASTS.items():
        same = tuple(fact for fact in AXES if fact != axis)
        found = pairs(rows, axis, slow, fast, *same)
        heights = [[speedup(pair) for pair in found if pair[0]["size"] == size] for size in sizes]
        if found:
            series[name] = [geometric_mean(ratios) if ratios else None for ratios in heights]
    if not series:
        return {}
    figure, axes = panels("How many times as fast is a step?", 1, 1, height=3.4)
    bars(axes[0][0], sizes, series)
    axes[0][0].axhline(1, color="0.4", linewidth=1)
    axes[0][0].set_ylabel("times as fast, geometric mean")
    legend(figure, axes)
    return {"lm-speedups": figure}


STUDY = Study(
    name=NAME,
    title="The model, end to end",
    question="How long does a step take, how much memory, and what do precision, compiler and "
    "attention gain?",
    tables=tables,
    pictures=pictures,
    findings=findings,
)
