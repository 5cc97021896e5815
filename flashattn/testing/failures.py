"""Says at the end what implementations failed on, made small, and how to repeat it."""

from __future__ import annotations

import shlex
from collections.abc import Generator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from flashattn import registry
from flashattn.problem import Problem
from flashattn.testing import repro
from flashattn.testing.plugin_file import asked
from flashattn.testing.sample import Sample
from flashattn.testing.seed import Seed

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass
class Failed:
    """An implementation that failed: in which test first, and on which samples."""

    impl: registry.Impl
    test: str
    samples: list[Sample] = field(default_factory=list)

    def small(self) -> tuple[str, str]:
        """Return what is wrong with the smallest case that was found, and the line that repeats it.

        Where no sample fails as it stands, because a test asks for more than accuracy, that is
        the test itself.
        """
        if self.samples:
            least = min(self.samples, key=lambda sample: sample.problem.flops())
            found = repro.smallest(self.impl, least)
            if found is not None:
                return found
        words = ["pytest", self.test, "--impl", asked(self.impl)]
        return self.test, shlex.join([*words, f"--hypothesis-seed={Seed.value}"])


class Failures:
    """Remembers on what implementations fail; at the end shrinks one failure of each."""

    def __init__(self) -> None:
        """Start with none."""
        self._failed = dict[str, Failed]()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Note in the report, which a worker sends, what a test of an implementation failed on."""
        report = yield
        impl = getattr(item, "funcargs", {}).get("impl")
        if report.when == "call" and report.failed and impl is not None and call.excinfo:
            error = call.excinfo.value
            causes = getattr(error, "exceptions", (error,))  # Hypothesis may find several
            samples = [_plain(cause.sample) for cause in causes if hasattr(cause, "sample")]
            report.user_properties.append(("failed on", {"impl": impl.name, "asked": samples}))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Remember it."""
        told: dict[str, Any] = dict(report.user_properties)
        value = told.get("failed on")
        if value is not None and report.when == "call":
            impl = registry.get(value["impl"])
            failed = self._failed.setdefault(impl.name, Failed(impl, report.nodeid))
            failed.samples += _samples(value["asked"])

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say it for each implementation."""
        for name, failed in self._failed.items():
            terminalreporter.section(f"{name}: what fails, made small")
            terminalreporter.write_line("\n".join(failed.small()))


def _plain(sample: Sample) -> dict[str, Any]:
    return asdict(sample) | {"device": str(sample.device)}


def _samples(plain: Iterable[dict[str, Any]]) -> list[Sample]:
    return [Sample(**facts | {"problem": Problem(**facts["problem"])}) for facts in plain]
