"""pytest plugin: one seed for all that is drawn, said at the end, given by --hypothesis-seed."""

from __future__ import annotations

import random

import pytest


class Seed:
    """What the run draws by."""

    value = 0


def chance(*names: object) -> random.Random:
    """Return a source of chance that the run's seed and the names decide."""
    return random.Random(f"{Seed.value} {names}")  # noqa: S311 - no secret


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Draw a seed unless one is given, and hand it to Hypothesis; workers are given theirs."""
    given = config.getoption("hypothesisseed", None)
    config.option.hypothesisseed = random.randrange(2**32) if given is None else given  # noqa: S311
    Seed.value = config.option.hypothesisseed
