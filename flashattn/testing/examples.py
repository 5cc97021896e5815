"""pytest plugin: counts the examples that Hypothesis ran, of all workers."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import hypothesis
import pytest
import torch

Check = Callable[..., None]
# Of a whole run, times the profile's examples per property, of which a GPU has five times as many.
PROMISED = {"cpu": 30, "cuda": 10}
CHOOSE = ("keyword", "markexpr", "deselect", "ignore", "ignore_glob", "impl", "lf", "stepwise")


class Count:
    """How many examples passed, here and in the workers that ended."""

    passed = 0

    @classmethod
    def of(cls, check: Check) -> Check:
        """Return ``check``, counted; an example that was rejected, or fails, is none."""
        if getattr(check, "is_counted", False):
            return check

        @wraps(check)
        def counted(*args: Any, **drawn: Any) -> None:
            check(*args, **drawn)
            cls.passed += 1

        counted.is_counted = True  # type: ignore[attr-defined]
        return counted


def pytest_itemcollected(item: pytest.Item) -> None:
    """Count the examples of every property."""
    property_ = getattr(getattr(item, "obj", None), "hypothesis", None)
    if property_ is not None:
        property_.inner_test = Count.of(property_.inner_test)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Hand a worker's count over; fail a whole run that drew fewer examples than it promises."""
    config = session.config
    if hasattr(config, "workerinput"):
        config.workeroutput["examples"] = Count.passed  # type: ignore[attr-defined] # of xdist
    elif exitstatus == 0 and _whole(config) and Count.passed < promised():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add what a worker counted."""
    Count.passed += getattr(node, "workeroutput", {}).get("examples", 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many examples passed."""
    if _whole(terminalreporter.config) and Count.passed < promised():
        said = f", too few: wanted {promised()}"
    else:
        said = ""
    if Count.passed or said:
        terminalreporter.write_line(f"hypothesis: {Count.passed} examples passed{said}")


def promised() -> int:
    """Return how many examples a whole run draws at the least."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return PROMISED[device] * hypothesis.settings().max_examples


def _whole(config: pytest.Config) -> bool:
    whole = config.args in (["tests"], [str(config.rootpath / "tests")])
    return whole and not any(config.getoption(name, None) for name in CHOOSE)
