"""pytest plugin: write each case as a row of the journal before the next case starts."""

from __future__ import annotations

import time
from collections.abc import Generator
from functools import partial
from typing import Any

import pytest

from flashattn.measure.device import out_of_memory, sm_clock
from flashattn.measure.monitor import Monitor
from flashattn.measure.timing import DeviceBenchmark
from flashattn.testing.kept import HEADER, JOURNAL, MADE_BEFORE, rounded
from flashattn.testing.sweep import DEVICE
from flashattn.testing.train_case import forget_models

MONITOR = pytest.StashKey[Monitor]()
STARTED = pytest.StashKey[float]()  # host time when a case started


def pytest_sessionstart(session: pytest.Session) -> None:
    """Monitor the clock of the device."""
    session.config.stash[MONITOR] = Monitor(DEVICE)
    session.config.stash[MONITOR].__enter__()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Record the clock at the end."""
    session.config.stash[HEADER]["clocks"]["after"] = sm_clock(DEVICE)
    session.config.stash[MONITOR].__exit__(None, None, None)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Reuse rows measured before an interruption; turn running out of memory into a row."""
    benchmark: Any = pyfuncitem.funcargs.get("device_benchmark")
    if benchmark is None:
        return (yield)
    before = pyfuncitem.config.stash[MADE_BEFORE].get(pyfuncitem.nodeid)
    if before is not None:
        pyfuncitem.obj = partial(_again, benchmark, before)
    pyfuncitem.stash[STARTED] = time.perf_counter()
    try:
        return (yield)
    except Exception as error:
        if not out_of_memory(error):
            raise
    # After the except clause the traceback is freed, and with it the tensors that it held.
    forget_models()
    facts = benchmark.extra_info
    said, predicted = facts.get("impl", facts["name"]), facts.get("predicted_bytes")
    said += " ran out of memory" + (f" (predicted: {predicted} bytes)" if predicted else "")
    facts |= {"status": "oom", "reason": said}
    pytest.skip(said)


def _again(benchmark: DeviceBenchmark, row: dict[str, Any], **_: object) -> None:
    """Hand a row of the journal to pytest-benchmark as if it were measured now."""
    facts = {name: fact for name, fact in row.items() if name != "samples"}
    benchmark.extra_info |= facts
    if row["status"] != "ok":
        pytest.skip(row["reason"])
    benchmark.replay(row["samples"])
    benchmark.extra_info |= facts  # exactly as they were


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Write the row of a case to the journal, unless --benchmark-disable is given."""
    report = yield
    benchmark = getattr(item, "funcargs", {}).get("device_benchmark")
    if call.when != "call" or benchmark is None or not benchmark.enabled:
        return report
    if item.nodeid in item.config.stash[MADE_BEFORE]:
        return report
    facts = benchmark.extra_info
    samples = rounded(benchmark.stats.stats.data) if benchmark.stats else []
    excinfo = call.excinfo
    if excinfo and (report.failed or excinfo.errisinstance(pytest.xfail.Exception)):
        said = excinfo.exconly().splitlines()[0]
        facts |= {"status": "failed", "reason": f"{item.name}: {said}"}
    if "status" in facts:
        reading = item.config.stash[MONITOR].between(item.stash[STARTED], time.perf_counter())
        facts |= {"sm_hertz": reading.sm_hertz, "throttled": reading.throttled}
        item.config.stash[JOURNAL].add(dict(facts), samples, header=item.config.stash[HEADER])
    return report
