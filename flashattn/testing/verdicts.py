"""pytest plugin: report which clauses implementations keep, with a small case of each failure."""

from __future__ import annotations

import shlex
from collections.abc import Generator, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import pytest

from flashattn import registry
from flashattn.problem import Problem
from flashattn.testing import repro
from flashattn.testing.plugin_file import asked
from flashattn.testing.sample import Sample
from flashattn.testing.seed import Seed


@dataclass
class Verdict:
    """The test results of one implementation; a clause is a test function."""

    impl: registry.Impl
    clauses: dict[str, bool] = field(default_factory=dict)
    examples: int = 0
    failed: list[str] = field(default_factory=list)  # test ids
    samples: list[Sample] = field(default_factory=list)  # on which it failed

    def line(self) -> str:
        """Return the results in one line."""
        failed = [clause for clause, kept in self.clauses.items() if not kept]
        drawn = f"{len(self.clauses)} clauses, {self.examples} examples, seed {Seed.value}"
        if failed:
            return f"{self.impl.name} does not conform: {', '.join(sorted(failed))}; of {drawn}"
        return f"{self.impl.name} conforms: {drawn}"

    def small(self) -> tuple[str, str]:
        """Return the failure of the smallest case found, and the command that repeats it.

        If no sample fails by itself, because a test checks more than accuracy, return the first
        test that failed.
        """
        if self.samples:
            least = min(self.samples, key=lambda sample: sample.problem.flops())
            found = repro.smallest(self.impl, least)
            if found is not None:
                return found
        words = ["pytest", self.failed[0], "--impl", asked(self.impl)]
        return self.failed[0], shlex.join([*words, f"--hypothesis-seed={Seed.value}"])


class Verdicts:
    """Collects the reports of all workers; at the end shrinks one failure per implementation."""

    def __init__(self) -> None:
        """Start without verdicts."""
        self._found = dict[str, Verdict]()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Add the implementation and its failing samples to the report, which a worker sends."""
        report = yield
        impl = getattr(item, "funcargs", {}).get("impl")
        if report.when == "call" and isinstance(impl, registry.Impl):
            error = call.excinfo and call.excinfo.value
            # Hypothesis may raise a group of several.
            causes: Iterable[Any] = getattr(error, "exceptions", (error,))
            failing = [cause.sample for cause in causes if hasattr(cause, "sample")]
            samples = [asdict(sample) | {"device": str(sample.device)} for sample in failing]
            report.user_properties.append(("asked", {"impl": impl.name, "samples": samples}))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a report, unless the test was skipped or its failure excused."""
        told: dict[str, Any] = dict(report.user_properties)
        if "asked" not in told or report.skipped:
            return
        impl = registry.get(told["asked"]["impl"])
        verdict = self._found.setdefault(impl.name, Verdict(impl))
        clause = report.nodeid.partition("[")[0].rpartition("::")[2]
        if not clause.startswith("bench_"):  # these measure time, and verify little
            verdict.clauses[clause] = verdict.clauses.get(clause, True) and report.passed
        verdict.examples += told.get("examples", 1)
        if report.failed:
            verdict.failed.append(report.nodeid)
            verdict.samples += [
                Sample(**facts | {"problem": Problem(**facts["problem"])})
                for facts in told["asked"]["samples"]
            ]

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter, config: pytest.Config
    ) -> None:
        """Print a section for each implementation that failed; with ``--impl``, a line for each."""
        for verdict in self._found.values():
            if config.option.impl and verdict.clauses:
                terminalreporter.write_line(verdict.line())
        for name, verdict in self._found.items():
            if verdict.failed:
                terminalreporter.section(f"{name}: what fails, made small")
                terminalreporter.write_line("\n".join(verdict.small()))
