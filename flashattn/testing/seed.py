"""pytest plugin: one seed for all random draws, set by --hypothesis-seed, shown at the end."""

from __future__ import annotations

import random
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import pytest


class Seed:
    """The seed of this run."""

    value = 0


def chance(*names: object) -> random.Random:
    """Return a random generator that is seeded by the run's seed and the names."""
    return random.Random(f"{Seed.value} {names}")  # noqa: S311 - no secret


def alike() -> AbstractContextManager[object]:
    """Draw the same in every run, as for peers: else one might fail in one run and not the next."""
    return patch.object(Seed, "value", 0)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Draw a seed unless one is given; xdist workers receive that of the controller.

    With ``--impl`` Hypothesis uses this seed as well, so that the author of a kernel can repeat all
    draws. It then does not replay the examples that failed in earlier runs.
    """
    option = config.option
    if getattr(option, "hypothesis_seed", None) is None:
        received = getattr(config, "workerinput", {}).get("seed")
        Seed.value = received or random.randrange(1, 2**32)  # noqa: S311
        if option.impl:
            option.hypothesis_seed = Seed.value
    else:
        Seed.value = option.hypothesis_seed


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Send the seed to a worker."""
    node.workerinput["seed"] = Seed.value
