"""Comparison with the runs kept before, for --benchmark-compare: a trend in words, never a gate.

Seconds that were stored differ from today's by more than the code; only what
--benchmark-compare-fail asks for fails, as a test that failed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from flashattn.report.compare import report
from flashattn.report.runs import Run, merge

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import pytest

FIELDS = ("min", "max", "mean", "median", "stddev", "iqr")


class Check(Protocol):
    """What --benchmark-compare-fail asks for, such as ``median:10%``."""

    def fails(self, current: Mapping[str, float], compared: Mapping[str, float]) -> str | None:
        """Return a sentence if the current statistics are worse than asked, else None."""


class Trend:
    """What the kept runs had of each case.

    Args:
        runs: that were kept, the oldest first.
        stats: pytest-benchmark's statistics of each case, by its full name; the newest.
        checks: what must not have become worse.
        sweep: the one of this session; a case that its own baseline lacks is gone.
    """

    def __init__(
        self,
        runs: list[Run],
        stats: Mapping[str, Mapping[str, float]],
        checks: Iterable[Check],
        sweep: str,
    ) -> None:
        """Merge the runs; nothing is compared yet."""
        self._before, self._stats = merge(runs), stats
        self._checks, self._sweep = list(checks), sweep
        self._seen: set[str] = set()

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        """Note what exists though it does not run."""
        self._seen |= {item.nodeid for item in items}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Note what runs."""
        self._seen |= {item.nodeid for item in session.items}

    def complaint(self, name: str, stats: Any) -> str | None:
        """Return the sentence that says which check a case breaks, or None.

        Args:
            name: the case's full name.
            stats: has the fields in ``FIELDS`` as attributes, in seconds.
        """
        before = self._stats.get(name)
        if before is None:
            return None
        now = {field: getattr(stats, field) for field in FIELDS}
        said = [check.fails(now, before) for check in self._checks]
        return "; ".join(f"slower than the last run: {line}" for line in said if line) or None

    def table(self, run: Run) -> str:
        """Return a line with a verdict for each case of ``run``, and for those that are gone."""
        measured = {row["fullname"] for row in run.rows}
        files = {name.partition("::")[0] for name in self._seen}
        rows = [row for row in self._before.rows if self._belongs(row, measured, files)]
        return report(replace(self._before, rows=rows), run, every=True)

    def _belongs(self, row: Mapping[str, Any], measured: set[str], files: set[str]) -> bool:
        """Whether a row of the baseline is of a case that ran, or that should have been there."""
        name = row["fullname"]
        if name in measured:
            return True
        asked = name.partition("::")[0] in files and row.get("sweep") == self._sweep
        return asked and name not in self._seen
