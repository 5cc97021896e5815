"""The model end to end: times, share of the roof, memory, and the gain of each choice."""

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
    values,
    worst,
)
from flashattn.report.runs import Row, Run
from flashattn.report.study import Table, facts, filled

NAME = "lm"
TITLE = "The model, end to end"
QUESTION = "What time and memory does a step take? What do precision, compiler and attention gain?"
CASE = ("size", "context", "batch", "step")
SETTING = ("precision", "impl", "compiled")
LONG = ("size", "context", "packed")
# Name: the fact that differs, its slow value and its fast value.
CONTRASTS: dict[str, tuple[str, Any, Any]] = {
    "tf32 / fp32": ("precision", "fp32", "tf32"),
    "bf16 / fp32": ("precision", "fp32", "bf16"),
    "compiled / eager": ("compiled", False, True),
    f"{OURS} / {NAIVE}": ("impl", NAIVE, OURS),
    f"{OURS} / sdpa": ("impl", "sdpa", OURS),
}


def steps(run: Run) -> list[Row]:
    """Return the steps that keep their activations."""
    return [row for row in known(run.study(NAME), "size", "step") if not row.get("checkpoint")]


def long_steps(run: Run) -> list[Row]:
    """Return the train steps of checkpointed blocks, at long contexts."""
    return [row for row in known(run.study(NAME), "size", "step") if row.get("checkpoint")]


def _other_facts(axis: str) -> list[str]:
    return [fact for fact in (*CASE, *SETTING) if fact != axis]


def tables(run: Run) -> list[Table]:
    """Return the sizes, a table for each setting, the gains, and the long contexts."""
    rows, long = steps(run), long_steps(run)
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


def _steps(run: Run, rows: list[Row], shared: tuple[str, ...], *columns: str) -> Table:
    what = "a checkpointed train step" if rows[0].get("checkpoint") else "a step"
    return Table.of(
        f"{label(rows[0], *shared)}: {what} in ms, memory in GiB",
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
    """Return the times of rows that differ only in ``axis``, and their ratios."""
    contrasts = {name: sides for name, (of, *sides) in CONTRASTS.items() if of == axis}
    columns, lines, told = values(rows, axis), [], []
    for own in groups(rows, *_other_facts(axis)).values():
        sides, seconds = by(own, axis), by(timed(own), axis)
        ratios = [
            units.times(_gain((seconds[slow], seconds[fast])))
            if {slow, fast} <= set(seconds)
            else ""
            for slow, fast in contrasts.values()
        ]
        if any(ratios):
            cells = [cell(own[0]) for cell in facts(*_other_facts(axis)).values()]
            cells += [units.or_mark(sides.get(column), units.ms) for column in columns]
            lines.append([*cells, *ratios])
            told += own
    return Table(
        caption=f"What {NOUNS[axis]} gains: a step in ms, and the speed-up",
        header=[*_other_facts(axis), *(units.word(axis, column) for column in columns), *contrasts],
        lines=lines,
        rows=told,
    )


NOUNS = {"precision": "precision", "compiled": "the compiler", "impl": "attention"}


def _gain(pair: tuple[Row, Row]) -> float:
    return float(pair[0]["seconds"] / pair[1]["seconds"])


def _contrasted(rows: list[Row]) -> dict[str, list[tuple[Row, Row]]]:
    """Return, for each contrast, the pairs of rows that differ only in it."""
    found = {
        name: pairs(timed(rows), *sides, *_other_facts(sides[0]))
        for name, sides in CONTRASTS.items()
    }
    return {name: own for name, own in found.items() if own}


def findings(run: Run) -> list[str]:
    """Return the gain of each choice, the fastest train step, and the error of predictions."""
    rows, long = steps(run), long_steps(run)
    said = []
    for name, found in _contrasted(rows).items():
        ratios = {
            label(fast, *_other_facts(CONTRASTS[name][0])): _gain((slow, fast))
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
    """Return how far measured peaks are from predictions, and how many cases ran out of memory."""
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
    """Plot the speed-up of each choice by model size, a panel for each choice."""
    records = []
    for name, found in _contrasted(steps(run)).items():
        for (size,), own in groups([fast for _, fast in found], "size").items():
            gains = [_gain(pair) for pair in found if pair[1] in own]
            mean = geometric_mean(gains)
            records.append(
                {"panel": name, "place": size, "value": plot.exact(mean), "cases": len(gains)}
                | {"said": units.times(mean), "ours": name.startswith(OURS)}
            )
    title = "Speed-up of a step, geometric mean over contexts and steps"
    made = plot.bars(title, records, columns=3)
    return {"lm-speedups": made} if records else {}
