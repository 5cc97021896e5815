"""Summaries of many numbers: growth exponents and geometric means."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import geometric_mean, linear_regression

from flashattn.report.units import times


def exponent(points: Iterable[tuple[float, float]]) -> float | None:
    """Fit e in y ~ x^e by least squares on logarithms.

    Args:
        points: pairs (x, y); pairs that are not positive are ignored.

    Returns:
        The exponent, or None for fewer than two different x.
    """
    logs = [(math.log(x), math.log(y)) for x, y in points if x > 0 and y > 0]
    if len({x for x, _ in logs}) < 2:  # noqa: PLR2004 - a line has two points
        return None
    return linear_regression(*zip(*logs, strict=True)).slope


def in_words(ratios: Mapping[str, float]) -> str:
    """Return the geometric mean of ratios, and their range, in words.

    Args:
        ratios: at least one ratio, by case.
    """
    low, high = min(ratios, key=ratios.__getitem__), max(ratios, key=ratios.__getitem__)
    if len(ratios) == 1:
        return f"{times(ratios[low])} ({low})"
    mean = f"{times(geometric_mean(ratios.values()))} in the geometric mean of {len(ratios)} cases"
    return f"{mean}, from {times(ratios[low])} ({low}) to {times(ratios[high])} ({high})"
