"""Select, group, order, compare and summarize rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import groupby
from statistics import geometric_mean, linear_regression
from typing import Any

from flashattn.report.runs import Row, Run
from flashattn.report.units import NOT_BOUND, TOO_LOW, UNSTEADY, percent, times, word

OURS, NAIVE = "triton", "naive"
ANY_ORDER = "hopper, any order"  # of the additions to dq
KERNELS = (OURS, "hopper")  # our kernels; ``attention`` chooses among them
OWN = (*KERNELS, ANY_ORDER, "tiled")  # implementations that are not peers
LETTERS = {"seq": "N = ", "seq_q": "N = ", "head_dim": "D = "}
# Conventional order of values; others follow, sorted.
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
    "scores": (
        *("plain", "softcap 50", "ALiBi", "bias", "bias and its gradient", "relative bias"),
        *("relative bias and its gradient", "sink", "sink and its gradient"),
    ),
    "attention": (
        *("sdpa, activated", "attention", "fattn, cu_seq_lens", "fattn"),
        *("sdpa", "eager", "flex_attention"),
    ),
    "method": ("keys", "keys, kept", "keys, contiguous", "heads"),
}


def ok(rows: Iterable[Row], *facts: str) -> list[Row]:
    """Return the rows that have status ok and all the facts."""
    return [row for row in known(rows, *facts) if row["status"] == "ok"]


def timed(rows: Iterable[Row]) -> list[Row]:
    """Return the rows with a time."""
    return [row for row in ok(rows) if row.get("seconds")]


def quickest(rows: Iterable[Row]) -> Row | None:
    """Return the row with the least time, or None."""
    return min(timed(rows), key=lambda row: float(row["seconds"]), default=None)


def best(rows: Iterable[Row], *, ours: bool) -> Row | None:
    """Return the fastest row of our kernels or of the peers, or None."""
    rows = known(rows, "impl")
    return quickest(r for r in rows if (r["impl"] in KERNELS if ours else r["impl"] not in OWN))


def gain(slow: Row | None, fast: Row | None) -> float | None:
    """Return the speed of one row over that of another, or None without both times."""
    both = timed(row for row in (slow, fast) if row)
    return float(both[0]["seconds"] / both[1]["seconds"]) if both[1:] else None


def over_peer(rows: Iterable[Row]) -> float | None:
    """Return the speed of the faster of our kernels over that of the fastest peer."""
    rows = list(rows)
    return gain(best(rows, ours=False), best(rows, ours=True))


def attempted(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of supported cases, measured or not."""
    return [row for row in rows if row["status"] != "unsupported"]


def known(rows: Iterable[Row], *facts: str) -> list[Row]:
    """Return the rows that have all the facts; a row that failed early may lack some."""
    return [row for row in rows if all(row.get(fact) is not None for fact in facts)]


def steady(row: Row) -> bool:
    """Return whether the quartiles are close to the median, or unknown.

    They are far apart if the host sometimes queues calls more slowly than the device runs them.
    """
    if row.get("q1") is None or row.get("q3") is None or not row.get("seconds"):
        return True
    return bool(row["q3"] - row["q1"] <= UNSTEADY * row["seconds"])


def speed(row: Row) -> float | None:
    """Return the FLOP/s of a row, or None if it has no time."""
    return row["flops"] / row["seconds"] if known(timed([row]), "flops") else None


def share(run: Run, row: Row, kind: str | None) -> float | None:
    """Return the speed of a row as a fraction of a measured roof, or None."""
    reached, roof = speed(row), run.roof(row, kind)
    return reached / roof if reached and roof else None


def reached(run: Run, row: Row, kind: str | None) -> str:
    """Return the share of a roof that a row reaches, as the end of a sentence, or ""."""
    part = share(run, row, kind)
    if part is None:
        return ""
    ours = kind == "float32" and row.get("impl") in KERNELS
    why = f" ({NOT_BOUND if ours else TOO_LOW})" if part > 1 else ""
    return f", {percent(part)} of the {word('dtype', kind)} roof{why}"


def place(fact: str, value: Any) -> tuple[Any, ...]:
    """Return the sort key of a value: conventional order, then numbers, then names."""
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
    """Group the rows by the values of facts, sorted by the same facts."""
    found = groupby(ordered(rows, *facts), lambda row: tuple(row.get(fact) for fact in facts))
    return {case: list(own) for case, own in found}


def values(rows: Iterable[Row], fact: str) -> list[Any]:
    """Return the distinct values of a fact in order."""
    return [value for (value,) in groups(known(rows, fact), fact)]


def by(rows: Iterable[Row], fact: str) -> dict[Any, Row]:
    """Return the last row for each value of a fact."""
    return {row.get(fact): row for row in rows}


def pairs(
    rows: Iterable[Row], axis: str, slow: Any, fast: Any, *same: str
) -> list[tuple[Row, Row]]:
    """Return pairs of rows whose ``axis`` is ``slow`` in the first and ``fast`` in the second.

    The facts in ``same`` are equal in both.
    """
    sides = [by(group, axis) for group in groups(rows, *same).values()]
    return [(side[slow], side[fast]) for side in sides if slow in side and fast in side]


def label(row: Row, *facts: str) -> str:
    """Return the values of facts in words; numbers follow the name of the fact."""
    said = [
        (LETTERS.get(fact, f"{fact} ") if _number(row.get(fact)) else "")
        + word(fact, row.get(fact))
        for fact in facts
    ]
    return ", ".join(part for part in said if part)


def worst(what: str, ratios: Mapping[str, float]) -> list[str]:
    """Return a sentence about the ratio farthest from one, if any; ``what`` begins it."""
    if not ratios:
        return []
    off = {case: abs(ratio - 1) for case, ratio in ratios.items()}
    case = max(off, key=off.__getitem__)
    return [f"{what} by at most {percent(off[case])} in {len(off)} cases (worst: {case})."]


def in_words(ratios: Mapping[str, float]) -> str:
    """Return the geometric mean and the range of at least one ratio, in words."""
    low, high = min(ratios, key=ratios.__getitem__), max(ratios, key=ratios.__getitem__)
    if len(ratios) == 1:
        return f"{times(ratios[low])} ({low})"
    mean = f"{times(geometric_mean(ratios.values()))} in the geometric mean of {len(ratios)} cases"
    return f"{mean}, from {times(ratios[low])} ({low}) to {times(ratios[high])} ({high})"


def exponent(points: Iterable[tuple[float, float]]) -> float | None:
    """Fit e in y ~ x^e by least squares on the logarithms of the positive pairs (x, y).

    The result is None if there are fewer than two different x.
    """
    logs = [(math.log(x), math.log(y)) for x, y in points if x > 0 and y > 0]
    if len({x for x, _ in logs}) < 2:  # noqa: PLR2004 - a line has two points
        return None
    return linear_regression(*zip(*logs, strict=True)).slope
