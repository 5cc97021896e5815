"""What is swept: the points of a grid of axes, each with a name."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

UNEQUAL = (64, 500, 3000, 1200, 2500, 900, 1800, 300, 2600, 1120, 2400)  # documents, 16384 tokens


@dataclass(frozen=True)
class Point:
    """One point: its coordinates are its attributes, its name is read as a test's id."""

    facts: tuple[tuple[str, Any], ...]  # coordinate by axis, in the order of the axes

    def __getattr__(self, axis: str) -> Any:
        """Return the coordinate on ``axis``."""
        for name, value in object.__getattribute__(self, "facts"):
            if name == axis:
                return value
        raise AttributeError(axis)

    def __str__(self) -> str:
        """Return the words for each coordinate; a fact that does not hold is not said."""
        return "-".join(word for name, value in self.facts if (word := _word(name, value)))

    def replace(self, **changed: Any) -> Point:
        """Return the point with other coordinates on some of its axes."""
        return Point(tuple((name, changed.get(name, value)) for name, value in self.facts))


def _word(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return name if value else ""
    return value if isinstance(value, str) else f"{name}{value}"


def grid(**axes: list[Any]) -> list[Point]:
    """Return every combination of the axes' values; the last axis changes fastest."""
    names = tuple(axes)
    return [Point(tuple(zip(names, values, strict=True))) for values in product(*axes.values())]
