"""Rows chosen, grouped, put in order and held against one another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from flashattn.report.runs import Row
from flashattn.report.units import word

OURS = "triton"
KERNELS = (OURS, "hopper")  # ours, of which a user gets the faster
UNSTEADY = 0.25  # of a median: how far apart its quartiles may be
LETTERS = {"seq": "N = ", "seq_q": "N = ", "head_dim": "D = "}
# The order of what has one by custom; whatever else there is comes after, by name.
CUSTOM: dict[str, tuple[Any, ...]] = {
    "size": ("tiny", "small", "medium", "large", "xl", "2.7B"),
    "impl": (*KERNELS, "naive"),
    "pass": ("forward", "backward", "forward+backward"),
    "step": ("forward", "backward", "forward+backward", "train"),
    "precision": ("fp32", "tf32", "fp16", "bf16"),
    "dtype": ("bfloat16", "float16", "float32"),
    "accumulator": ("float32", "float16", "bfloat16"),
    "addend": ("float32", "float16", "bfloat16"),
    "mode": ("eager", "compiled", "graph"),
    "causal": (False, "top_left", "bottom_right"),
    "protocol": ("tokens", "one_head", "batch"),
}


def timed(rows: Iterable[Row]) -> list[Row]:
    """Return the rows with a time."""
    return [row for row in rows if row["status"] == "ok" and row.get("seconds")]


def steady(row: Row) -> bool:
    """Whether half of the samples lie close around the median, or nothing is known of them.

    Where the host cannot queue a call as fast as the device runs it, the device waits, now and
    then: the median is of both, and no longer of the device alone.
    """
    if row.get("q1") is None or row.get("q3") is None or not row.get("seconds"):
        return True
    return bool(row["q3"] - row["q1"] <= UNSTEADY * row["seconds"])


def known(rows: Iterable[Row], *facts: str) -> list[Row]:
    """Return the rows that say what they are of; one that failed early may only say why."""
    return [row for row in rows if all(row.get(fact) is not None for fact in facts)]


def place(fact: str, value: Any) -> tuple[Any, ...]:
    """Return where a value of a fact stands among others: by custom, as a number, by name."""
    custom = CUSTOM.get(fact, ())
    if value in custom:
        return (0, custom.index(value), "")
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return (1, value, "") if number else (2, 0, str(value))


def ordered(rows: Iterable[Row], *facts: str) -> list[Row]:
    """Return the rows sorted by facts."""
    return sorted(rows, key=lambda row: [place(fact, row.get(fact)) for fact in facts])


def groups(rows: Iterable[Row], *facts: str) -> dict[tuple[Any, ...], list[Row]]:
    """Return the rows by the values of facts, groups and rows in the order of ``facts``."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in ordered(rows, *facts):
        found.setdefault(tuple(row.get(fact) for fact in facts), []).append(row)
    return found


def values(rows: Iterable[Row], fact: str) -> list[Any]:
    """Return each value of a fact once, in order; rows without it say nothing."""
    found = (row[fact] for row in ordered(rows, fact) if row.get(fact) is not None)
    return list(dict.fromkeys(found))


def by(rows: Iterable[Row], fact: str) -> dict[Any, Row]:
    """Return the rows by the value of one fact; of several with one value, the last."""
    return {row.get(fact): row for row in rows}


def pairs(
    rows: Sequence[Row], axis: str, slow: Any, fast: Any, *same: str
) -> list[tuple[Row, Row]]:
    """Return the timed rows that differ in ``axis`` alone: those of ``slow`` and of ``fast``.

    Args:
        rows: among which to look.
        axis: a fact.
        slow: its value for the first of each pair.
        fast: its value for the second.
        same: facts that the two share.
    """
    found = []
    for group in groups(timed(rows), *same).values():
        side = by(group, axis)
        if slow in side and fast in side:
            found.append((side[slow], side[fast]))
    return found


def speedup(pair: tuple[Row, Row]) -> float:
    """Return how many times as fast the second row is as the first."""
    return pair[0]["seconds"] / pair[1]["seconds"]


def label(row: Row, *facts: str) -> str:
    """Return a case in words: the values of facts, numbers with the name of theirs."""
    said = []
    for fact in facts:
        value = row.get(fact)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        name = LETTERS.get(fact, f"{fact} ") if number else ""
        said.append(name + word(fact, value))
    return ", ".join(part for part in said if part)
