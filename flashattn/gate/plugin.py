"""The gate as a pytest plugin: one item per case, a table, and an exit status."""

from __future__ import annotations

import os
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flashattn.gate.cases import CASES, SELFTEST, Case
from flashattn.gate.pair import Pair, WorkerError, resolve, terminable
from flashattn.report.gate import (
    AMBIGUOUS,
    MISSED,
    NEW,
    SLOWER,
    UNPROVEN,
    Outcome,
    exit_status,
    table,
)

FEWEST_ROUNDS = 10  # with fewer, the 99% interval is the whole range
# A sound gate may miss one slowdown in 25 on a noisy machine: three in a row is below 1e-4.
ATTEMPTS = 3
FAILED, UNSETTLED = {SLOWER, MISSED}, {AMBIGUOUS, UNPROVEN, NEW}  # all others pass


class Gate:
    """Compares the working tree with a revision, if given, and with a slowed copy, if asked.

    Raises:
        pytest.UsageError: there is no such revision, or there are too few rounds.
    """

    def __init__(
        self, root: Path, revision: str | None, device: torch.device, *, rounds: int, selftest: bool
    ) -> None:
        """Check the revision; start nothing."""
        self._root, self._revision, self._device = root, revision, device
        self._rounds, self._selftest = rounds, selftest
        self._pair: tuple[str | None, Pair] | None = None
        self._outcomes: list[Outcome] = []
        if rounds < FEWEST_ROUNDS:
            raise pytest.UsageError(f"--gate-rounds: wanted at least {FEWEST_ROUNDS}, got {rounds}")
        if revision is not None:
            try:
                resolve(root, revision)
            except ValueError as error:
                raise pytest.UsageError(f"--gate-against: {error}") from None

    def timed(self) -> list[tuple[Case, float]]:
        """Return the cases, each with the share by which to slow it down."""
        cases = {str(case): case for case in CASES[self._device.type]}
        compared = [] if self._revision is None else [(case, 0.0) for case in cases.values()]
        injected = SELFTEST[self._device.type] if self._selftest else {}
        return compared + [(cases[name], share) for name, share in injected.items()]

    def judge(self, case: Case, injected: float) -> Outcome:
        """Time a case until its verdict is settled; repeat while an injected slowdown is missed."""
        pair = self._open(None if injected else self._revision)
        # A 5% slowdown is close to the margin, so a shared CPU needs more rounds to detect it.
        disturbed = self._device.type == "cpu"
        rounds = self._rounds * (2 if injected and disturbed else 1)
        for attempt in range(1, ATTEMPTS + 1):
            try:
                found = pair.judge(case, rounds=rounds, injected=injected)
            except WorkerError as error:
                pytest.fail(str(error), pytrace=False)
            outcome = replace(found, attempts=attempt)
            if outcome.verdict not in (MISSED, UNPROVEN) or not injected:
                break
            pair.renew()
        self._outcomes.append(outcome)
        return outcome

    def _open(self, revision: str | None) -> Pair:
        """Return the pair of the working tree and ``revision``; only one is open at a time."""
        if self._pair is None or self._pair[0] != revision:
            self._close()
            self._pair = revision, Pair(self._root, revision, self._device)
        return self._pair[1]

    def _close(self) -> None:
        if self._pair is not None:
            self._pair[1].close()
            self._pair = None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Start the one-line summary of a failure with the verdict."""
        report = yield
        crash = getattr(report.longrepr, "reprcrash", None)
        if crash is not None:
            crash.message = crash.message.removeprefix("Failed: ")
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self) -> Generator[None, object, object]:
        """End the processes and remove the trees, however the session ends."""
        with terminable():
            try:
                return (yield)
            finally:
                self._close()

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Set the exit status, and write the job summary of GitHub Actions."""
        session.exitstatus = exit_status(int(session.exitstatus), self._outcomes)
        summary = os.environ.get("GITHUB_STEP_SUMMARY")
        if summary and self._outcomes:
            with Path(summary).open("a", encoding="utf-8") as file:
                file.write(self._tables() + "\n")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the tables."""
        if self._outcomes:
            terminalreporter.section("gate")
            terminalreporter.write_line(self._tables())

    def _tables(self) -> str:
        """Return the tables as Markdown: the comparison and the self-test."""
        parts = []
        for injected, title, against in (
            (False, f"Working tree against {self._revision}", str(self._revision)),
            (True, "Self-test: injected slowdowns", "working tree"),
        ):
            chosen = [o for o in self._outcomes if bool(o.injected) == injected]
            parts += [f"### {title}", table(chosen, against)] if chosen else []
        return "\n\n".join(parts)
