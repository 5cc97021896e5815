"""pytest plugin: with ``--impl`` one line for each implementation, which its author can repeat."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from flashattn.testing.seed import Seed


@dataclass
class Tally:
    """What the tests said of one implementation: clauses are test functions."""

    clauses: dict[str, bool] = field(default_factory=dict)
    examples: int = 0

    def line(self, name: str) -> str:
        """Return the result in one line."""
        failed = [clause for clause, kept in self.clauses.items() if not kept]
        drawn = f"{len(self.clauses)} clauses, {self.examples} examples, seed {Seed.value}"
        if failed:
            return f"{name} does not conform: {', '.join(sorted(failed))}; of {drawn}"
        return f"{name} conforms: {drawn}"


class Conforms:
    """Adds up reports, of all workers."""

    def __init__(self) -> None:
        """Start with none."""
        self.tallies = dict[str, Tally]()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item):  # type: ignore[no-untyped-def]  # noqa: ANN201
        """Note in the report, which a worker sends, who was asked."""
        report = yield
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if report.when == "call" and isinstance(params.get("impl"), str):
            report.user_properties.append(("asked", params["impl"]))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add it up; what was skipped or excused is kept by nobody."""
        told = dict(report.user_properties)
        if "asked" not in told or report.skipped:
            return
        tally = self.tallies.setdefault(str(told["asked"]), Tally())
        clause = report.nodeid.partition("[")[0].rpartition("::")[2]
        tally.clauses[clause] = tally.clauses.get(clause, True) and report.passed
        tally.examples += int(str(told.get("examples", 1)))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say it."""
        for name, tally in self.tallies.items():
            terminalreporter.write_line(tally.line(name))


def pytest_configure(config: pytest.Config) -> None:
    """Count where implementations were chosen."""
    if config.option.impl:
        config.pluginmanager.register(Conforms())
