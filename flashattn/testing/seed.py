"""pytest plugin: one seed for all that is drawn, said at the end, given by --hypothesis-seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


class Seed:
    """What the run draws by."""

    value = 0


def chance(*names: object) -> random.Random:
    """Return a source of chance that the run's seed and the names decide."""
    return random.Random(f"{Seed.value} {names}")  # noqa: S311 - no secret


@contextmanager
def alike() -> Iterator[None]:
    """Draw the same in every run, as peers do: or one would fail in one run and not in the next."""
    before, Seed.value = Seed.value, 0
    try:
        yield
    finally:
        Seed.value = before


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Draw a seed unless one is given; workers are given theirs.

    With ``--impl`` Hypothesis gets it, too, so that the author of a kernel can repeat all that was
    drawn; it then forgets the examples that failed in earlier runs.
    """
    option = config.option
    if getattr(option, "hypothesis_seed", None) is None:
        option.drawn_seed = getattr(option, "drawn_seed", None) or random.randrange(1, 2**32)  # noqa: S311
        Seed.value = option.drawn_seed
        if option.impl:
            option.hypothesis_seed = Seed.value
    else:
        Seed.value = option.hypothesis_seed
