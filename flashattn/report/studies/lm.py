"""The model end to end: times, shares of the roof, memory, and the gain of each choice."""

from __future__ import annotations

from functools import partial
from statistics import geometric_mean
from typing import Any

from flashattn.report import plot, units
from flashattn.report.rows import (
    NAIVE,
    OURS,
    attempted,
    by,
    gain,
    groups,
    in_words,
    known,
    label,
    ordered,
    over_peer,
    pairs,
    reached,
    share,
    speed,
    timed,
    worst,
)
from flashattn.report.runs import Row, Run
from flashattn.report.study import Table, facts, filled, shared, sides

NAME = "lm"
TITLE = "The model, end to end"
QUESTION = "What time and memory does a step take? What do precision, compiler and attention gain?"
CASE = ("size", "context", "batch", "step")
SETTING = ("precision", "impl", "compiled")
LONG = ("size", "context", "packed")
# By name: the fact that differs, its slow value and its fast value.
CONTRASTS: dict[str, tuple[str, Any, Any]] = {
    "tf32 / fp32": ("precision", "fp32", "tf32"),
    "bf16 / fp32": ("precision", "fp32", "bf16"),
    "compiled / eager": ("compiled", False, True),
    f"{OURS} / {NAIVE}": ("impl", NAIVE, OURS),
    f"{OURS} / sdpa": ("impl", "sdpa", OURS),
}
NOUNS = {"precision": "precision", "compiled": "the compiler", "impl": "attention"}


def steps(run: Run, *, long: bool = False) -> list[Row]:
    """Return the steps that keep their activations, or (``long``) those that checkpoint blocks."""
    rows = known(run.study(NAME), "size", "step")
    return [row for row in rows if bool(row.get("checkpoint")) == long]


def _other_facts(axis: str) -> list[str]:
    return [fact for fact in (*CASE, *SETTING) if fact != axis]


def tables(run: Run) -> list[Table]:
    """Return the sizes, a table for each setting, the gains, and the long contexts."""
    rows, long = steps(run), steps(run, long=True)
    made = [_steps(run, own, SETTING, *CASE) for own in groups(rows, *SETTING).values()]
    gains = [_gains(rows, axis) for axis in ("precision", "compiled", "impl")]
    made_long = [
        _steps(run, own, ("precision", "compiled", "batch"), *LONG, "impl")
        for own in groups(long, "precision", "compiled", "batch").values()
    ]
    return filled(_sizes(rows + long), *made, *gains, *made_long)


def _sizes(rows: list[Row]) -> Table:
    return Table.of(
        "Parameters of each size, and GiB of parameters, gradients and AdamW's two moments",
        [own[-1] for own in groups(known(rows, "parameters"), "size").values()],
        facts("size")
        | {
            "parameters": lambda row: f"{row['parameters']:,}".replace(",", " "),
            "GiB": lambda row: units.gib(16 * row["parameters"]),
        },
    )


def _steps(run: Run, rows: list[Row], setting: tuple[str, ...], *columns: str) -> Table:
    what = "a checkpointed train step" if rows[0].get("checkpoint") else "a step"
    return Table.of(
        f"{label(rows[0], *setting)}: {what} in ms, memory in GiB",
        attempted(ordered(rows, *columns)),
        facts(*columns)
        | {
            "median": partial(units.or_mark, unit=units.ms),
            "mean ± std": units.spread,
            "TFLOP/s": lambda row: units.tera(speed(row)),
            "of roof": lambda row: units.of_roof(
                share(run, row, units.ROOFS.get(row.get("precision", "")))
            ),
            "peak": lambda row: units.gib(row.get("peak_bytes")),
            "predicted": lambda row: units.gib(row.get("predicted_bytes")),
        },
    )


def _gains(rows: list[Row], axis: str) -> Table:
    """Return a table of the times of rows that differ only in ``axis``, and their ratios."""

    def cell(slow: Any, fast: Any, own: list[Row]) -> str:
        found = by(own, axis)
        return units.times(gain(found.get(slow), found.get(fast)))

    ratios = {x: partial(cell, a, b) for x, (of, a, b) in CONTRASTS.items() if of == axis}
    others = _other_facts(axis)
    found = groups(rows, *others).values()
    told = [own for own in found if any(ratio(own) for ratio in ratios.values())]
    return Table.of(
        f"What {NOUNS[axis]} gains: a step in ms, and the speed-up",
        [row for own in told for row in own],
        shared(*others) | sides(rows, axis, units.ms) | ratios,
        told,
    )


def _contrasted(rows: list[Row]) -> dict[str, list[tuple[Row, Row]]]:
    """Return, for each contrast, the pairs of rows that differ only in its fact."""
    found = {
        name: pairs(timed(rows), *sides, *_other_facts(sides[0]))
        for name, sides in CONTRASTS.items()
    }
    return {name: own for name, own in found.items() if own}


def findings(run: Run) -> list[str]:
    """Return the gain of each choice, the fastest train step, and the error of predictions."""
    rows, long = steps(run), steps(run, long=True)
    said = []
    for name, found in _contrasted(rows).items():
        ratios = {
            label(fast, *_other_facts(CONTRASTS[name][0])): gain(slow, fast) or 0
            for slow, fast in found
        }
        said.append(f"Speed of a step, {name}: {in_words(ratios)}.")
    return [*said, *_best(run, rows), *_against_peers(long), *_memory(attempted(rows + long))]


def _against_peers(rows: list[Row]) -> list[str]:
    """Return our speed over the fastest peer's in checkpointed steps."""
    found = groups(known(timed(rows), "impl"), *LONG, "batch", "precision", "compiled").values()
    ratios = {label(own[0], *LONG): ratio for own in found if (ratio := over_peer(own))}
    said = "Speed of a checkpointed train step, ours / the fastest peer"
    return [f"{said}: {in_words(ratios)}."] if ratios else []


def _best(run: Run, rows: list[Row]) -> list[str]:
    """Return the fastest setting for a train step of the largest model."""
    found = groups((row for row in timed(rows) if row["step"] == "train"), "size", "context")
    if not found:
        return []
    cases = list(found.values())[-1]
    best = min(cases, key=lambda row: row["seconds"])
    where = label(best, "size", "context")
    roof = reached(run, best, units.ROOFS.get(best.get("precision", "")))
    first = f"The fastest of {len(cases)} train steps ({where}) takes"
    return [f"{first} {units.ms(best['seconds'])} ms ({label(best, *SETTING)}){roof}."]


def _memory(rows: list[Row]) -> list[str]:
    """Return how far peaks are from their predictions, and how many cases ran out of memory."""
    both = known(timed(rows), "peak_bytes", "predicted_bytes")
    off = {
        label(row, *CASE, "packed", *SETTING): row["peak_bytes"] / row["predicted_bytes"]
        for row in both
    }
    said = worst("Peak memory differs from its prediction", off)
    failed = [row for row in rows if row["status"] == "oom"]
    if failed:
        need = [row["predicted_bytes"] for row in known(failed, "predicted_bytes")]
        least = (
            f"; the smallest prediction among them is {units.gib(min(need))} GiB" if need else ""
        )
        said.append(f"{len(failed)} of {len(rows)} cases run out of memory{least}.")
    return said


def pictures(run: Run) -> dict[str, plot.Picture]:
    """Plot the speed-up of each choice by model size, with a panel for each choice."""
    records = []
    for name, found in _contrasted(steps(run)).items():
        for (size,), own in groups([fast for _, fast in found], "size").items():
            gains = [gain(slow, fast) or 0 for slow, fast in found if fast in own]
            mean = geometric_mean(gains)
            records.append(
                {"panel": name, "place": size, "value": plot.exact(mean), "cases": len(gains)}
                | {"said": units.times(mean), "ours": name.startswith(OURS)}
            )
    title = "Speed-up of a step, geometric mean over contexts and steps"
    return plot.shown("lm-speedups", plot.bars(title, records, columns=3))
