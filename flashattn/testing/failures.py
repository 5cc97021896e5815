"""Says at the end what implementations failed on, made small, and how to repeat it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from flashattn import registry
from flashattn.testing import repro
from flashattn.testing.plugin_file import asked

if TYPE_CHECKING:
    from flashattn.testing.accuracy import Question


@dataclass
class Failed:
    """An implementation that failed: in which test first, and on which questions."""

    impl: registry.Impl
    test: str
    questions: list[Question] = field(default_factory=list)

    def small(self) -> tuple[int, str]:
        """Return the flops of the smallest case found, what is wrong, and how to repeat it.

        Where no question fails as it stands, because a test asks for more than accuracy, that is
        the test itself.
        """
        least = min(self.questions, key=lambda question: question.problem.flops(), default=None)
        found = least and repro.smallest(self.impl, least)
        if least and found:
            return least.problem.flops(), "\n".join(found)
        again = shlex.join(["pytest", self.test, "--impl", asked(self.impl)])
        return sys.maxsize, f"{self.test}\n{again}"


class Failures:
    """Remembers on what implementations fail; at the end shows the smallest failure of each."""

    def __init__(self) -> None:
        """Start with none."""
        self._failed = dict[str, Failed]()
        self._small = dict[str, tuple[int, str]]()  # of workers: flops, and what is to be said

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

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Shrink a failure of each implementation; a worker hands it over."""
        self._add({name: failed.small() for name, failed in self._failed.items()})
        if hasattr(session.config, "workerinput"):
            output = session.config.workeroutput  # type: ignore[attr-defined] # of xdist
            output["failures"] = self._small

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take what a worker found."""
        self._add(getattr(node, "workeroutput", {}).get("failures", {}))

    def _add(self, found: Mapping[str, tuple[int, str]]) -> None:
        """Keep the smaller of two failures of one implementation."""
        for name, small in found.items():
            self._small[name] = min(self._small.get(name, small), small)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Show it for each implementation."""
        for name, (_, said) in self._small.items():
            terminalreporter.section(f"{name}: what fails, made small")
            terminalreporter.write_line(said)
