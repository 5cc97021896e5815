"""pytest plugin: compare a benchmark session with the runs that were kept before."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from flashattn.report.compare import EXIT_UNPROVEN_LIMIT, Limit, hold, report
from flashattn.report.runs import Run, load, merge, with_stats
from flashattn.testing.kept import HEADER, JOURNAL, TOLD
from flashattn.testing.sweep import COLLECTED, study_and_name, sweep_name

COMPARE = pytest.StashKey[Any]()  # name of a run, True for all, or False
LIMITS = pytest.StashKey[list[Limit]]()
BASELINE = pytest.StashKey[Run | None]()
HELD_BACK = pytest.StashKey[list[tuple[pytest.Item, list[pytest.TestReport]]]]()
UNPROVEN = pytest.StashKey[bool]()  # whether a limit proves nothing


def pytest_configure(config: pytest.Config) -> None:
    """Take comparing over from pytest-benchmark, which has no verdicts and fails by traceback."""
    option = config.option
    config.stash[COMPARE] = option.benchmark_compare
    config.stash[LIMITS] = option.benchmark_compare_fail or []
    config.stash[HELD_BACK], config.stash[UNPROVEN] = [], False
    option.benchmark_compare, option.benchmark_compare_fail = [], []


def pytest_sessionstart(session: pytest.Session) -> None:
    """Load the baseline."""
    session.config.stash[BASELINE] = _baseline(session.config)


def _baseline(config: pytest.Config) -> Run | None:
    """Return the clean runs for --benchmark-compare, merged into one, or None if there are none.

    Raises:
        pytest.UsageError: no clean run has the requested name, a file is damaged, a run was made
            on another accelerator, or --benchmark-compare-fail has no run, or none with its
            statistic.
    """
    compare = config.stash[COMPARE]
    named = isinstance(compare, str) and compare
    ours = config.stash[HEADER]["machine_info"]["accelerator"]
    try:
        found = [load(path) for path in _kept(config, named or "")] if compare else []
    except ValueError as error:
        raise pytest.UsageError(f"--benchmark-compare: {error}") from error
    clean = [run for run in found if not run.commit.get("dirty")]
    if named and not clean:
        why = "has a clean commit, and others are no baseline" if found else f"is called {compare}"
        raise pytest.UsageError(f"--benchmark-compare: no kept run {why}")
    if config.stash[LIMITS] and not clean:
        raise pytest.UsageError("--benchmark-compare-fail: wanted --benchmark-compare and a run")
    for run in clean:
        if run.accelerator != ours:
            raise pytest.UsageError(
                f"--benchmark-compare: wanted a run made on {ours}, got {run.accelerator}"
            )
    if compare and not clean:
        why = "every kept run has uncommitted changes" if found else "no run was kept before"
        config.stash[TOLD].append(f"Compared with nothing: {why} on {ours}")
    bare = any("stats" not in row for run in clean for row in run.rows if row["status"] == "ok")
    fields = {limit.field for limit in config.stash[LIMITS]} - {"mean", "median"}
    if bare and fields:
        raise pytest.UsageError(
            f"--benchmark-compare-fail: wanted a limit on mean or median, got {', '.join(fields)}:"
            " runs that flashattn.report keep has written have no other statistics"
        )
    return merge(clean) if clean else None


def _kept(config: pytest.Config, name: str) -> list[Path]:
    """Return a file, or the runs in the folder of this machine whose names begin with ``name``."""
    if name and Path(name).is_file():
        return [Path(name)]
    folder = config._benchmarksession.storage.path  # type: ignore[attr-defined] # noqa: SLF001
    runs = [path for suffix in (".json", ".jsonl") for path in folder.glob(f"[0-9]*_*{suffix}")]
    return sorted(path for path in runs if path.name.startswith(name))


def _compared(config: pytest.Config, before: Run) -> tuple[Run, Run]:
    """Return the kept runs, limited to cases measured now or gone since, and this session."""
    stats = {
        case.fullname: case.stats.as_dict()
        for case in config._benchmarksession.benchmarks  # type: ignore[attr-defined] # noqa: SLF001
        if case
    }
    rows = [
        with_stats(row, stats[row["fullname"]])
        if row["status"] == "ok" and row["fullname"] in stats
        else row
        for row in config.stash[JOURNAL].rows
    ]
    measured, collected = {row["fullname"] for row in rows}, config.stash[COLLECTED]
    chosen = "::" in "".join(config.args) or config.option.impl or config.getoption("lf", None)
    whole = set() if chosen else {name.partition("::")[0] for name in collected}

    def gone(row: dict[str, Any]) -> bool:
        ours = row.get("sweep") == sweep_name(config) and row["fullname"] not in collected
        return ours and row["fullname"].partition("::")[0] in whole

    belong = [row for row in before.rows if row["fullname"] in measured or gone(row)]
    return replace(before, rows=belong), Run.of(config.stash[HEADER], rows)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """With a limit, hold back what passed: the noise is known only once all controls are timed."""
    if not item.config.stash[LIMITS]:
        return None
    item.config.get_terminal_writer().line(item.name)
    reports = runtestprotocol(item, log=False, nextitem=nextitem)
    item.config.stash[HELD_BACK].append((item, reports))
    if any(report.failed for report in reports):
        _let_go(item.config, {})
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """Fail the cases that exceed a limit, now that the noise is known."""
    try:
        return (yield)
    finally:
        config, broken = session.config, dict[tuple[str, str], str]()
        before, limits = config.stash[BASELINE], config.stash[LIMITS]
        if before and limits and config.stash[HELD_BACK]:
            broken, inside = hold(*_compared(config, before), limits)
            config.stash[UNPROVEN] = bool(inside)
            config.stash[TOLD][:0] = inside
        _let_go(config, broken)


def _let_go(config: pytest.Config, broken: dict[tuple[str, str], str]) -> None:
    """Send the reports that were held back; a case in ``broken`` fails."""
    for item, reports in config.stash[HELD_BACK]:
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        failure = broken.get(study_and_name(item))
        for made in reports:
            told = made
            if failure and made.when == "call":
                fail = partial(pytest.fail, failure, pytrace=False)
                call = pytest.CallInfo.from_call(fail, "call")
                told = pytest.TestReport.from_item_and_call(item, call)
                crash = told.longrepr.reprcrash  # type: ignore[union-attr]
                crash.message = failure  # without "Failed: "
            item.ihook.pytest_runtest_logreport(report=told)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    config.stash[HELD_BACK].clear()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> Iterator[None]:
    """Set the exit status if a limit proves nothing."""
    result = yield
    if exitstatus == pytest.ExitCode.OK and session.config.stash[UNPROVEN]:
        session.exitstatus = EXIT_UNPROVEN_LIMIT
    return result


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print the comparison."""
    before = config.stash[BASELINE]
    if before and config.stash[JOURNAL].rows:
        terminalreporter.section("compared with the runs kept before")
        terminalreporter.write_line(report(*_compared(config, before), every=True))
