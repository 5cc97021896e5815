"""A progress line: what runs, how many are left and how long that will take."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Container

    from _pytest.terminal import TerminalReporter


class Progress:
    """Replaces pytest's dots by a line before each case.

    Args:
        reporter: pytest's, which writes to the terminal.
        known: cases that are not run again, and so say nothing about how long the others take.
    """

    def __init__(self, reporter: TerminalReporter, known: Container[str] = ()) -> None:
        """Take over from the dots; the clock starts with the first case."""
        self._reporter, self._known = reporter, known
        self._done = self._total = 0  # of all cases
        self._ran = self._runs = 0  # of those that are not known
        self._start = time.perf_counter()
        reporter.showfspath = False

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Count what is to come."""
        self._total, self._start = len(session.items), time.perf_counter()
        self._runs = sum(item.nodeid not in self._known for item in session.items)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Say what runs now."""
        line = f"[{self._done + 1}/{self._total}] {nodeid.rpartition('::')[2]}"
        if self._ran:
            elapsed = time.perf_counter() - self._start
            left = elapsed / self._ran * (self._runs - self._ran)
            line += f" ({clock_face(elapsed)}, about {clock_face(left)} left)"
        if self._reporter.isatty:
            self._reporter.rewrite(line, erase=True)
        else:
            self._reporter.write_line(line)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Count what is done."""
        self._done += 1
        self._ran += nodeid not in self._known

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Write no letter for what went well or was left out; failures are said at once."""
        expected = report.outcome in ("passed", "skipped") and not hasattr(report, "wasxfail")
        if report.when == "call" and expected:
            return report.outcome, "", ""
        return None


def clock_face(seconds: float) -> str:
    """Return minutes and seconds, as 3:07."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
