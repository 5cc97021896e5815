"""The gate as pytest shows it: an item for each case, a table, an exit status that tells."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

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

if TYPE_CHECKING:
    from collections.abc import Generator

    import torch

FEWEST_ROUNDS = 10  # of fewer the interval at 99% is the range
INJECTED = (0.05, 0.10)  # what the gate must see to be believed
# A gate that is blind misses every time, a good one on a noisy machine misses now and then: three
# times running is less than one in ten thousand where it misses one in twenty-five.
ATTEMPTS = 3
FAILED, UNSETTLED = {SLOWER, MISSED}, {AMBIGUOUS, UNPROVEN, NEW}  # all else passes


class Gate:
    """Holds the working tree against a revision, or against itself slowed down on purpose.

    Args:
        root: of the working tree.
        revision: to compare with; None compares with none.
        device: where.
        rounds: of a case's first collection.
        selftest: whether slow-downs are made on purpose, too.

    Raises:
        pytest.UsageError: there is no such revision, or there are too few rounds.
    """

    def __init__(
        self,
        root: Path,
        revision: str | None,
        device: torch.device,
        *,
        rounds: int,
        selftest: bool,
    ) -> None:
        """Look the revision up; nothing runs yet."""
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
        """Return the cases, each with the share by which it is slowed down on purpose."""
        cases = {str(case): case for case in CASES[self._device.type]}
        compared = [] if self._revision is None else [(case, 0.0) for case in cases.values()]
        chosen = SELFTEST[self._device.type] if self._selftest else ()
        return compared + [(cases[name], share) for name in chosen for share in INJECTED]

    def judge(self, case: Case, injected: float) -> Outcome:
        """Time a case until its verdict is settled, and what is not seen though it is there, again.

        Args:
            case: what is timed.
            injected: share by which the new revision is made slower on purpose.
        """
        pair = self._open(None if injected else self._revision)
        # 5% is close to the margin: on a processor that others use the self-test must not miss it
        # for want of precision. A GPU is ours alone.
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
        """Let a failure begin with its verdict where pytest has one line for it."""
        report = yield
        crash = getattr(report.longrepr, "reprcrash", None)
        if crash is not None:
            crash.message = crash.message.removeprefix("Failed: ")
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self) -> Generator[None, object, object]:
        """Leave no process and no tree behind, however it ends."""
        with terminable():
            try:
                return (yield)
            finally:
                self._close()

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Set the exit status, and hand the table to GitHub where that asks for one."""
        session.exitstatus = exit_status(int(session.exitstatus), self._outcomes)
        summary = os.environ.get("GITHUB_STEP_SUMMARY")
        if summary and self._outcomes:
            with Path(summary).open("a", encoding="utf-8") as file:
                file.write(self._told() + "\n")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the tables."""
        if self._outcomes:
            terminalreporter.section("gate")
            terminalreporter.write_line(self._told())

    def _told(self) -> str:
        """Return the tables as Markdown: what was compared, and what was made slower."""
        parts = []
        for injected, title, against in (
            (False, f"Working tree against {self._revision}", str(self._revision)),
            (True, "Self-test: slow-downs made on purpose", "working tree"),
        ):
            chosen = [o for o in self._outcomes if bool(o.injected) == injected]
            parts += [f"### {title}", table(chosen, against)] if chosen else []
        return "\n\n".join(parts)
