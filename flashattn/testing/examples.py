"""pytest plugin: count the examples that Hypothesis runs in all workers."""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import wraps
from typing import Any

import hypothesis
import pytest
import torch

Check = Callable[..., None]
# Least examples of a whole run, per ``max_examples`` of the profile: a GPU has five times as many.
PROMISED = {"cpu": 30, "cuda": 10}
CHOOSE = ("keyword", "markexpr", "deselect", "ignore", "ignore_glob", "impl", "lf", "stepwise")


class Count:
    """How many examples passed: in the running test, and in all reported tests."""

    passed = 0
    all = 0

    @classmethod
    def of(cls, check: Check) -> Check:
        """Return ``check``, with a count of its examples that are not rejected and do not fail."""
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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    call: pytest.CallInfo[None],
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the number of passed examples to the report, which a worker sends."""
    report = yield
    if call.when == "call" and Count.passed:
        report.user_properties.append(("examples", Count.passed))
        Count.passed = 0
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add up the examples of all tests."""
    if report.when == "call":
        Count.all += sum(int(str(n)) for name, n in report.user_properties if name == "examples")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail a whole run with too few examples."""
    if exitstatus == 0 and _too_few(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many examples passed."""
    said = f", too few: wanted {promised()}" if _too_few(terminalreporter.config) else ""
    if Count.all or said:
        terminalreporter.write_line(f"hypothesis: {Count.all} examples passed{said}")


def promised() -> int:
    """Return the least number of examples that a whole run must pass."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return PROMISED[device] * hypothesis.settings().max_examples


def _too_few(config: pytest.Config) -> bool:
    whole = config.args in (["tests"], [str(config.rootpath / "tests")])
    chosen = any(config.getoption(name, None) for name in CHOOSE) or hasattr(config, "workerinput")
    return whole and not chosen and Count.all < promised()
