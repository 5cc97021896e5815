"""Two runs side by side: a verdict in a word for every case."""

from __future__ import annotations

import pytest

from flashattn.report.compare import compare, report, summary
from flashattn.report.runs import Run


def row(seconds=1.0, status="ok", name="a", **facts):
    """Return a case."""
    timed = {"seconds": seconds} if status == "ok" else {}
    return {"study": "lm", "name": name, "status": status, "reason": None} | timed | facts


def run(*rows, machine="nvidia-h200"):
    """Return a run of these rows."""
    return Run(machine={"accelerator": machine}, rows=list(rows))


def verdict(before, after):
    """Return what is said about the one case of two runs."""
    (change,) = compare(run(*before), run(*after))
    return change.verdict


@pytest.mark.parametrize(
    ("before", "after", "wanted"),
    [
        ([row()], [row(0.5)], "faster"),
        ([row()], [row(2.0)], "slower"),
        ([row()], [row(1.02)], "same"),
        ([row()], [row(0.98)], "same"),
        ([row()], [row(1.04)], "slower"),
        ([row()], [row(0.96)], "faster"),
        ([], [row()], "new"),
        ([row()], [], "gone"),
        ([row()], [row(status="oom")], "now oom"),
        ([row(status="oom")], [row()], "now ok"),
        ([row(status="failed")], [row(status="oom")], "now oom"),
        ([row(status="oom")], [row(status="oom")], "still oom"),
        ([row(seconds=None)], [row(seconds=None)], "still ok"),
    ],
)
def test_verdict_is_a_word(before, after, wanted):
    """Three percent and more are a difference; what is there once, or fails, is said so."""
    assert verdict(before, after) == wanted


@pytest.mark.parametrize(
    ("q1", "q3", "wanted"), [(0.9, 1.15, "same"), (0.95, 1.05, "slower"), (1.2, 1.4, "slower")]
)
def test_noise_is_the_middle_half(q1, q3, wanted):
    """While the middle halves of the samples overlap, a difference of medians is noise."""
    before, after = row(1.0, q1=q1, q3=q3), row(1.2, q1=1.1, q3=1.3)
    assert verdict([before], [after]) == ("same" if (q1, q3) == (1.2, 1.4) else wanted)


def test_every_case_is_told_once():
    """The cases are those of either run, of two studies with one name too, gone ones last."""
    before = run(row(name="gone"), row(name="a"), row(name="a", study="flash"))
    after = run(row(2.0, name="new"), row(2.0, name="a"), row(0.5, name="a", study="flash"))
    told = [(change.study, change.name, change.ratio) for change in compare(before, after)]
    assert told == [
        ("lm", "new", None),
        ("lm", "a", 2.0),
        ("flash", "a", 0.5),
        ("lm", "gone", None),
    ]


def test_summary_counts_and_averages():
    """The summary has each verdict's count and the geometric mean of the ratios."""
    before = run(*(row(1.0, name=name) for name in "abc"), row(status="oom", name="d"))
    after = run(row(4.0, name="a"), row(1.0, name="b"), row(0.5, name="c"), row(name="d"))
    said = summary(compare(before, after))
    assert said.startswith("1 faster, 1 slower, 1 same, 1 now ok.")
    assert said.endswith("1.26x in the geometric mean of 3.")
    assert summary([]) == "no cases."


def test_another_accelerator_is_refused():
    """Times of two machines are not compared."""
    with pytest.raises(ValueError, match="wanted a run of nvidia-h200, got one of cpu"):
        compare(run(), run(machine="cpu"))


def test_report_tells_what_is_not_the_same():
    """In Markdown the table has what changed, and leaves out what did not."""
    before = run(row(1.0, name="slow"), row(1.0, name="even"), row(status="oom", name="full"))
    text = report(
        before, run(row(2.0, name="slow"), row(name="even"), row(status="oom", name="full"))
    )
    lines = [line for line in text.splitlines() if line.startswith("| lm")]
    assert [cell.strip() for cell in lines[0].strip("|").split("|")] == [
        *("lm: slow", "1000", "2000", "2", "slower")
    ]
    assert len(lines) == 1
