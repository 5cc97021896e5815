"""Rows chosen, grouped, ordered and compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from flashattn.report.runs import Row, Run
from flashattn.report.units import NOT_BOUND, TOO_LOW, UNSTEADY, percent, word

OURS, NAIVE = "triton", "naive"
KERNELS = (OURS, "hopper")  # ours, of which a user gets the faster
LETTERS = {"seq": "N = ", "seq_q": "N = ", "head_dim": "D = "}
# The order of what has one by custom; whatever else there is comes after, by name.
CUSTOM: dict[str, tuple[Any, ...]] = {
    "size": ("tiny", "small", "medium", "large", "xl", "2.7B"),
    "impl": (*KERNELS, NAIVE),
    "pass": ("forward", "backward", "forward+backward"),
    "step": ("forward", "backward", "forward+backward", "train"),
    "precision": ("fp32", "tf32", "fp16", "bf16"),
    "dtype": ("bfloat16", "float16", "float32"),
    "accumulator": ("float32", "float16", "bfloat16"),
    "addend": ("float32", "float16", "bfloat16"),
    "mode": ("eager", "compiled", "graph"),
    "causal": (False, "top_left", "bottom_right"),
    "protocol": ("tokens", "one_head", "batch"),
    "values": ("normal",),
}


def ok(rows: Iterable[Row], *facts: str) -> list[Row]:
    """Return the rows that were measured and have every one of some facts."""
    return [row for row in known(rows, *facts) if row["status"] == "ok"]


def timed(rows: Iterable[Row]) -> list[Row]:
    """Return the rows with a time."""
    return [row for row in ok(rows) if row.get("seconds")]


def attempted(rows: Iterable[Row]) -> list[Row]:
    """Return the rows that were measured or failed to be."""
    return [row for row in rows if row["status"] != "unsupported"]


def known(rows: Iterable[Row], *facts: str) -> list[Row]:
    """Return the rows that say what they are of; one that failed early may only say why."""
    return [row for row in rows if all(row.get(fact) is not None for fact in facts)]


def steady(row: Row) -> bool:
    """Whether half of the samples lie close around the median, or nothing is known of them.

    Where the host queues calls more slowly than the device runs them, the median is of both.
    """
    if row.get("q1") is None or row.get("q3") is None or not row.get("seconds"):
        return True
    return bool(row["q3"] - row["q1"] <= UNSTEADY * row["seconds"])


def speed(row: Row) -> float | None:
    """Return flops per second of a row that has a time."""
    return row["flops"] / row["seconds"] if known(timed([row]), "flops") else None


def share(run: Run, row: Row, kind: str | None) -> float | None:
    """Return flops per second of a row over the measured roof of some kind of product."""
    reached, roof = speed(row), run.roof(row, kind)
    return reached / roof if reached and roof else None


def reached(run: Run, row: Row, kind: str | None) -> str:
    """Return the end of a sentence that says which share of a roof was reached, if it is known."""
    part = share(run, row, kind)
    if part is None:
        return ""
    ours = kind == "float32" and row.get("impl") in KERNELS
    why = f" ({NOT_BOUND if ours else TOO_LOW})" if part > 1 else ""
    return f", {percent(part)} of the {word('dtype', kind)} roof{why}"


def place(fact: str, value: Any) -> tuple[Any, ...]:
    """Return where a value of a fact stands among others: by custom, as a number, by name."""
    custom = CUSTOM.get(fact, ())
    if value in custom:
        return (0, custom.index(value), "")
    return (1, value, "") if _number(value) else (2, 0, str(value))


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def ordered(rows: Iterable[Row], *facts: str) -> list[Row]:
    """Return the rows sorted by facts."""
    return sorted(rows, key=lambda row: [place(fact, row.get(fact)) for fact in facts])


def groups(rows: Iterable[Row], *facts: str) -> dict[tuple[Any, ...], list[Row]]:
    """Return the rows by the values of facts, groups and rows in the order of ``facts``."""
    found = groupby(ordered(rows, *facts), lambda row: tuple(row.get(fact) for fact in facts))
    return {case: list(own) for case, own in found}


def values(rows: Iterable[Row], fact: str) -> list[Any]:
    """Return each value of a fact once, in order; rows without it say nothing."""
    return [value for (value,) in groups(known(rows, fact), fact)]


def by(rows: Iterable[Row], fact: str) -> dict[Any, Row]:
    """Return the rows by the value of one fact; of several with one value, the last."""
    return {row.get(fact): row for row in rows}


def pairs(
    rows: Iterable[Row], axis: str, slow: Any, fast: Any, *same: str
) -> list[tuple[Row, Row]]:
    """Return the rows that differ in ``axis`` alone: those of ``slow`` and of ``fast``.

    Args:
        rows: among which to look.
        axis: a fact.
        slow: its value for the first of each pair.
        fast: its value for the second.
        same: facts that the two share.
    """
    sides = [by(group, axis) for group in groups(rows, *same).values()]
    return [(side[slow], side[fast]) for side in sides if slow in side and fast in side]


def label(row: Row, *facts: str) -> str:
    """Return a case in words: the values of facts, numbers with the name of theirs."""
    said = [
        (LETTERS.get(fact, f"{fact} ") if _number(row.get(fact)) else "")
        + word(fact, row.get(fact))
        for fact in facts
    ]
    return ", ".join(part for part in said if part)


def worst(what: str, ratios: Mapping[str, float]) -> list[str]:
    """Say how far at most ratios are from one, and which case it is.

    Args:
        what: the ratios are of, as in "peak memory differs from its prediction".
        ratios: by case.
    """
    if not ratios:
        return []
    off = {case: abs(ratio - 1) for case, ratio in ratios.items()}
    case = max(off, key=off.__getitem__)
    return [f"{what} by at most {percent(off[case])} in {len(off)} cases (worst: {case})."]
