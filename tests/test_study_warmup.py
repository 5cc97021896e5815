"""The warm-up study: what the first step costs is read off the samples."""

from __future__ import annotations

import pytest

from flashattn.report.runs import Run
from flashattn.report.studies import warmup


def row(warm, first, size="small", status="ok"):
    """Return a case whose steps take 10 ms but for the first."""
    samples = [first, *[0.01] * 9]
    facts = {"study": "warmup", "name": f"{size}-{warm}", "size": size, "warm_steps": warm}
    facts |= {"status": status, "reason": None, "context": 512, "in_order": samples}
    facts |= {"first": first, "second": 0.01, "mean": sum(samples) / 10, "std": 0.0}
    return facts | {"seconds": 0.01}


def run(*rows):
    """Return a run of these rows."""
    return Run(machine={}, rows=list(rows))


def test_line_for_each_number_of_warm_up_steps():
    """First, second, mean and median stand in ms, in order of the warm-up."""
    (table,) = warmup.tables(run(row(5, 0.01), row(0, 0.1)))
    assert table.lines == [
        ["small, context 512", "0", "100", "10", "19 ± 0", "10"],
        ["small, context 512", "5", "10", "10", "10 ± 0", "10"],
    ]


@pytest.mark.parametrize(("first", "times", "off"), [(0.1, "10.0x", "90%"), (0.03, "3.00x", "20%")])
def test_cost_of_the_first_step_follows_the_samples(first, times, off):
    """How many times the median the first step takes, and what it does to the mean, is said."""
    (said,) = warmup.findings(run(row(0, first), row(5, 0.01)))
    assert f"the first step after 0 warm-up steps takes {times} the median after 5." in said
    assert f"by {off} after 0, 0.0% after 5." in said


def test_one_warm_up_is_no_comparison():
    """With a single number of warm-up steps nothing is said."""
    assert warmup.findings(run(row(0, 0.1))) == []


def test_picture_has_a_panel_for_each_case_and_a_line_for_each_warm_up():
    """The samples are drawn in ms in their order."""
    rows = [row(0, 0.1), row(5, 0.01), row(0, 0.1, "xl")]
    (figure,) = warmup.pictures(run(*rows)).values()
    small, large = figure.axes
    lines = {line.get_label(): list(line.get_ydata()) for line in small.get_lines()}
    assert lines == {"0 warm-up steps": [100, *[10] * 9], "5 warm-up steps": [10] * 10}
    assert len(large.get_lines()) == 1
