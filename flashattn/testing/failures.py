"""Says at the end what implementations failed on, made small, and how to repeat it."""

from __future__ import annotations

import shlex
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from flashattn import registry
from flashattn.testing import repro
from flashattn.testing.chosen import asked

if TYPE_CHECKING:
    from flashattn.testing.accuracy import Question


@dataclass
class Failed:
    """An implementation that failed: in which test first, and on which questions."""

    impl: registry.Impl
    test: str
    questions: list[Question] = field(default_factory=list)

    def small(self) -> tuple[str, str]:
        """Return what is wrong with the smallest case that was found, and the line that repeats it.

        Where no question fails as it stands, because a test asks for more than accuracy, that is
        the test itself.
        """
        if self.questions:
            least = min(self.questions, key=lambda question: question.problem.flops())
            found = repro.smallest(self.impl, least)
            if found is not None:
                return found
        return self.test, shlex.join(["pytest", self.test, "--impl", asked(self.impl)])


class Failures:
    """Remembers on what implementations fail; at the end shrinks one failure of each.

    Args:
        config: pytest's.
    """

    def __init__(self, config: pytest.Config) -> None:
        """Start with none."""
        self._config, self._failed = config, dict[str, Failed]()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Remember what a test of an implementation failed on."""
        report = yield
        impl = getattr(item, "funcargs", {}).get("impl")
        if report.when == "call" and report.failed and impl is not None and call.excinfo:
            error = call.excinfo.value
            causes = getattr(error, "exceptions", (error,))  # Hypothesis may find several
            test = item.nodeid
            failed = self._failed.setdefault(impl.name, Failed(impl, test))
            failed.questions += [cause.question for cause in causes if hasattr(cause, "question")]
        return report

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say it for each implementation."""
        for name, failed in self._failed.items():
            terminalreporter.section(f"{name}: what fails, made small")
            terminalreporter.write_line("\n".join(failed.small()))
