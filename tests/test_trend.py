"""The trend: which cases of the kept runs are compared, and what fails."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from pytest_benchmark.utils import parse_compare_fail

from flashattn.report.runs import Run
from flashattn.testing.trend import FIELDS, Trend


def run(*names, seconds=1.0, sweep="full", made="2026-01-01"):
    """Return a run that timed these cases of one file."""
    rows = [
        {
            "study": "flash",
            "name": name,
            "fullname": f"bench_flash.py::{name}",
            "status": "ok",
            "reason": None,
            "seconds": seconds,
            "sweep": sweep,
        }
        for name in names
    ]
    return Run(machine={"accelerator": "x"}, rows=rows, made=made)


def trend(*runs, sweep="full", checks=(), stats=None, seen=()):
    """Return the trend against these runs in a session that collected ``seen``."""
    made = Trend(list(runs), stats or {}, [parse_compare_fail(check) for check in checks], sweep)
    items = [SimpleNamespace(nodeid=f"bench_flash.py::{name}") for name in seen]
    made.pytest_collection_finish(SimpleNamespace(items=items))
    return made


def verdicts(text):
    """Return the verdict of each case in a comparison's table."""
    lines = [line.split("|") for line in text.splitlines() if line.startswith("| flash: ")]
    return {line[1].strip().removeprefix("flash: "): line[-2].strip() for line in lines}


def test_the_newest_row_is_the_baseline():
    """A case is compared with the run that measured it last, wherever its neighbours are."""
    old, new = run("a", "b", seconds=4.0), run("a", seconds=1.0, made="2026-02-01")
    found = trend(old, new, seen=["a", "b"]).table(run("a", "b", seconds=2.0))
    assert verdicts(found) == {"a": "slower", "b": "faster"}


def test_only_a_case_of_the_same_sweep_is_gone():
    """What this sweep once had is gone; what another sweep has, or was deselected, is not."""
    before = [run("a", "gone", "left", "other")]
    now = trend(*before, seen=["a"])
    now.pytest_deselected([SimpleNamespace(nodeid="bench_flash.py::left")])
    assert verdicts(now.table(run("a"))) == {"a": "same", "gone": "gone", "other": "gone"}
    assert verdicts(trend(*before, sweep="smoke", seen=["a"]).table(run("a"))) == {"a": "same"}
    assert verdicts(trend(*before, seen=["a"]).table(run("a", "b")))["b"] == "new"


@pytest.mark.parametrize(
    ("check", "now", "fails"),
    [
        ("median:5%", 1.06, True),
        ("median:5%", 1.04, False),
        ("median:5%", 0.5, False),
        ("min:0.1", 1.2, True),
    ],
)
def test_a_check_fails_what_is_slower_than_asked(check, now, fails):
    """A check fails a case above its threshold, says the field, and ignores one without a past."""
    made = trend(run("a"), checks=[check], stats={"a": dict.fromkeys(FIELDS, 1.0)})
    stats = SimpleNamespace(**dict.fromkeys(FIELDS, now))
    said = made.complaint("a", stats)
    assert (said is not None) is fails
    assert said is None or check.partition(":")[0] in said
    assert made.complaint("unknown", stats) is None
