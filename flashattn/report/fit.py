"""What many numbers say in one: the exponent of their growth, their geometric mean."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from flashattn.report.units import times


def exponent(points: Iterable[tuple[float, float]]) -> float | None:
    """Return e of y ~ x^e by least squares of log y on log x; None with fewer than two x's.

    Args:
        points: of positive x and y.
    """
    logs = [(math.log(x), math.log(y)) for x, y in points if x > 0 and y > 0]
    if len({x for x, _ in logs}) < 2:  # noqa: PLR2004 - a line has two points
        return None
    mean_x = math.fsum(x for x, _ in logs) / len(logs)
    mean_y = math.fsum(y for _, y in logs) / len(logs)
    along = math.fsum((x - mean_x) * (y - mean_y) for x, y in logs)
    return along / math.fsum((x - mean_x) ** 2 for x, _ in logs)


def geometric_mean(ratios: Iterable[float]) -> float:
    """Return the mean of ratios: twice as fast and half as fast make one."""
    logs = [math.log(ratio) for ratio in ratios]
    return math.exp(math.fsum(logs) / len(logs))


def in_words(ratios: Mapping[str, float]) -> str:
    """Return the mean of ratios and between which cases they lie.

    Args:
        ratios: by the name of their case; at least one.
    """
    low, high = min(ratios, key=ratios.__getitem__), max(ratios, key=ratios.__getitem__)
    if len(ratios) == 1:
        return f"{times(ratios[low])} ({low})"
    mean = f"{times(geometric_mean(ratios.values()))} in the geometric mean of {len(ratios)} cases"
    return f"{mean}, from {times(ratios[low])} ({low}) to {times(ratios[high])} ({high})"
