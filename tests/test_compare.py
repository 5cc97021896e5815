"""Comparing two runs: a verdict for every case, and limits that fail cases."""

import math
import random
from dataclasses import replace

import pytest
from pytest_benchmark.utils import parse_compare_fail

from flashattn.report.compare import compare, hold, report, summary
from flashattn.report.runs import Run, merge

PEERS = ("naive", "sdpa", "sdpa_flash", "flex", "flash_attn_2")
OURS = ("triton", "hopper")


def row(seconds=1.0, status="ok", name="a", **facts):
    """Return the row of one case."""
    timed = {"seconds": seconds, "rounds": 20} if status == "ok" else {}
    return {"study": "flash", "name": name, "status": status, "reason": None} | timed | facts


def run(*rows, machine="nvidia-h200", sources=None, torch="2.11", made="2026-01-01"):
    """Return a run of these rows."""
    facts = {"accelerator": machine, "torch": torch}
    return Run(machine=facts, rows=list(rows), sources=sources, made=made)


def verdict(before, after):
    """Return the verdict on the only case of two runs."""
    (change,) = compare(run(*before), run(*after))
    return change.verdict


@pytest.mark.parametrize(
    ("before", "after", "wanted"),
    [
        ([row()], [row(0.5)], "faster"),
        ([row()], [row(2.0)], "slower"),
        ([row()], [row(1.09)], "same"),
        ([row()], [row(0.92)], "same"),
        ([row()], [row(1.11)], "slower"),
        ([row()], [row(0.90)], "faster"),
        ([], [row()], "new"),
        ([row()], [], "gone"),
        ([row()], [row(status="oom")], "now oom"),
        ([row(status="oom")], [row()], "now ok"),
        ([row(status="failed")], [row(status="oom")], "now oom"),
        ([row(status="oom")], [row(status="oom")], "still oom"),
        ([row(seconds=None)], [row(seconds=None)], "still ok"),
        ([row()], [row(2.0, rounds=1)], "timed once"),
        ([row(q1=0.9, q3=1.15)], [row(1.3, q1=1.2, q3=1.4)], "same"),
        ([row(q1=0.98, q3=1.02)], [row(1.3, q1=1.27, q3=1.33)], "slower"),
        ([row(q1=0.98, q3=1.02)], [row(0.8, q1=0.79, q3=0.81)], "faster"),
        ([row(q1=0.6, q3=1.9)], [row(200.0, q1=199.0, q3=201.0)], "slower"),
    ],
)
def test_verdict_without_controls(before, after, wanted):
    """Without controls a verdict needs 10%, and twice the interquartile range of the samples."""
    assert verdict(before, after) == wanted


def made(seed, *, spread=0.007, tail=0.02, machine=1.0, slower=1.0, sources=None, **how):
    """Make a run as timed on a shared GPU: 24 problems, two passes, all implementations.

    Args:
        seed: seed of the noise.
        spread: standard deviation of the logarithm of a case's median between runs.
        tail: fraction of the cases that have four times that spread.
        machine: factor on all times.
        slower: factor on the times of ours.
        sources: digest of the code.
        how: further facts of the run.
    """
    draw, rows = random.Random(seed), []  # noqa: S311
    for step in ("forward", "backward"):
        for number in range(24):
            for impl in (*PEERS, *OURS):
                own = slower if impl in OURS else 1.0
                wide = spread * (4 if draw.random() < tail else 1)
                seconds = 1e-3 * (number + 1) * machine * own * math.exp(draw.gauss(0, wide))
                facts = {"impl": impl, "pass": step, "clock": "device time"}
                stats = {"q1": seconds * 0.995, "q3": seconds * 1.005}
                named = row(seconds, name=f"{step}[q{number}-{impl}]", **facts, **stats)
                rows.append(named | {"stats": {"median": seconds, "min": seconds}})
    return run(*rows, sources=sources, **how)


def verdicts(before, after):
    """Return the verdicts of all cases that are not controls."""
    return [c.verdict for c in compare(before, after) if c.verdict != "control"]


@pytest.mark.parametrize("machine", [1.0, 1.2, 0.7])
@pytest.mark.parametrize("spread", [0.007, 0.02, 0.1, 0.3])
def test_unchanged_kernels_have_no_verdict(spread, machine):
    """If only the digest changes, no case is faster or slower, however fast the machine is."""
    first = made(0, spread=spread, sources="a")
    for seed in range(1, 11):
        again = made(seed, spread=spread, machine=machine, sources="b")
        assert set(verdicts(first, again)) == {"same"}


@pytest.mark.parametrize(("slower", "wanted"), [(1.30, "slower"), (1 / 1.30, "faster")])
def test_a_change_beyond_the_noise_is_seen(slower, wanted):
    """A change of 30% is seen in nine of ten cases, on a machine that is a fifth faster."""
    for seed in range(10):
        before = made(0, sources="a")
        after = made(seed + 1, machine=0.8, slower=slower, sources="b")
        found = verdicts(before, after)
        assert set(found) <= {wanted, "same"}
        assert found.count(wanted) >= 0.9 * len(found)


def test_a_smaller_change_is_seen_in_all_cases_together():
    """A change of 10% is seen over all cases of a pass; without a change nothing is reported."""
    for seed in range(1, 11):
        before = made(0, spread=0.03, sources="a")
        after = made(seed, spread=0.03, machine=1.2, slower=1.10, sources="b")
        said = summary(compare(before, after))
        for step in ("forward", "backward"):
            for impl in OURS:
                assert f"Taken together, flash {step} of {impl} is slower: 1." in said
        unchanged = made(seed, spread=0.03, machine=1.2, sources="b")
        assert "together" not in summary(compare(before, unchanged))


def test_a_control_is_not_compared_with_itself():
    """If two of four controls moved by 22%, a change of ours by 40% is noise."""

    def of(*times):
        facts = {"pass": "forward", "clock": "device time"}
        names = (*PEERS[:4], "triton")
        return [row(x, name=n, impl=n, **facts) for n, x in zip(names, times, strict=True)]

    before, after = run(*of(1, 1, 1, 1, 1), sources="a"), of(1, 1, 1.22, 1.22, 1.4)
    assert verdicts(before, run(*after, sources="b")) == ["same"]


def test_the_same_sources_are_never_faster_or_slower():
    """Runs of the same sources differ by noise alone, and the summary says so."""
    before, after = made(0, sources="a"), made(1, slower=2.0, sources="a")
    changes = compare(before, after)
    assert {change.verdict for change in changes} == {"same"}
    assert "The code is the same as before, so what differs is this machine's noise" in summary(
        changes
    )
    assert "slower" in verdicts(before, replace(after, sources="b"))


def test_each_row_remembers_its_sources():
    """In a merged baseline, only rows of the same sources count as unchanged."""
    old = made(0, sources="a")
    new = run(row(name="own"), sources="b", made="2026-02-01")
    after = run(row(9.0, name="own"), *made(1, slower=2.0).rows, sources="b")
    found = {c.case[1]: c.verdict for c in compare(merge([old, new]), after)}
    assert found["own"] == "same"
    assert found["forward[q3-triton]"] == "slower"
    assert found["forward[q3-flex]"] == "control"


@pytest.mark.parametrize(
    ("facts", "control"),
    [
        ({"impl": "sdpa_cudnn"}, True),
        ({"impl": "triton"}, False),
        ({"impl": "naive", "size": "tiny"}, False),  # our model
        ({"impl": "naive", "study": "launch"}, False),  # our entry point
        ({"impl": "sdpa", "study": "launch"}, True),
        ({}, False),
    ],
)
def test_controls_are_the_peers_attention(facts, control):
    """A peer outside our own code is a control, unless the version of torch differs."""
    before, after = run(row(**facts)), run(row(2.0, **facts))
    assert (compare(before, after)[0].verdict == "control") is control
    other = replace(after, machine=after.machine | {"torch": "2.12"})
    assert compare(before, other)[0].verdict == "slower"


def test_a_busy_machine_has_no_verdict():
    """If unchanged code varies by more than a factor of two, no case is slower, however long."""
    for spread, wanted in ((0.5, "same"), (0.01, "slower")):
        before = made(0, spread=spread, sources="a")
        after = made(1, spread=spread, slower=1e9, sources="b")
        assert set(verdicts(before, after)) == {wanted}


@pytest.mark.parametrize(("unsteady", "wanted"), [(9, "same"), (3, "slower")])
def test_most_controls_say_how_steady_a_machine_is(unsteady, wanted):
    """Steady controls set the noise, unless most controls are unsteady."""
    before = [row(name=f"{n}", impl="sdpa", q1=0.99, q3=1.01) for n in range(12)]
    after = [row(1.4, name=f"{n}", impl="sdpa", q1=1.0, q3=2.0) for n in range(unsteady // 2)]
    after += [
        row(0.8, name=f"{n}", impl="sdpa", q1=0.6, q3=1.1) for n in range(len(after), unsteady)
    ]
    after += before[unsteady:]
    ours = row(name="ours", q1=0.99, q3=1.01), row(1.3, name="ours", q1=1.29, q3=1.31)
    assert verdicts(run(*before, ours[0]), run(*after, ours[1])) == [wanted]


def test_every_case_is_told_once():
    """Every case of either run is compared once, by study and name; gone cases come last."""
    before = run(row(name="gone"), row(name="a"), row(name="a", study="lm"))
    after = run(row(2.0, name="new"), row(2.0, name="a"), row(0.5, name="a", study="lm"))
    told = [(*change.case, change.ratio) for change in compare(before, after)]
    assert told == [
        ("flash", "new", None),
        ("flash", "a", 2.0),
        ("lm", "a", 0.5),
        ("flash", "gone", None),
    ]


def test_summary_counts_averages_and_names_the_model():
    """The summary has the count of each verdict, the mean ratio, and the state of the controls."""
    before = run(*(row(1.0, name=name) for name in "abc"), row(status="oom", name="d"))
    after = run(row(4.0, name="a"), row(1.0, name="b"), row(0.5, name="c"), row(name="d"))
    said = summary(compare(before, after))
    assert said.startswith("1 faster, 1 slower, 1 same, 1 now ok.")
    assert "1.26x in the geometric mean of 3." in said
    assert "3 cases have fewer than 8 controls" in said
    said = summary(compare(made(0), made(1, machine=1.5)))
    assert "The controls, whose code is unchanged, took 1.50x as long in the median" in said
    assert "twice their largest deviation" in said
    assert summary([]) == "no cases."


def test_report_tells_what_is_not_the_same():
    """The Markdown table leaves out cases that did not change, unless all are asked for."""
    before = run(row(1.0, name="slow"), row(1.0, name="even"), row(status="oom", name="full"))
    text = report(
        before, run(row(2.0, name="slow"), row(name="even"), row(status="oom", name="full"))
    )
    lines = [line for line in text.splitlines() if line.startswith("| flash")]
    assert [cell.strip() for cell in lines[0].strip("|").split("|")] == [
        *("flash: slow", "1000", "2000", "2", "1", "±10%", "slower")
    ]
    assert len(lines) == 1
    wild = made(0), made(1, spread=3.0)
    assert "| more than 2x |" in report(*wild, every=True)


@pytest.mark.parametrize(
    ("check", "slower", "broken", "inside"),
    [
        ("median:20%", 1.3, True, False),
        ("median:60%", 1.3, False, False),
        ("median:1%", 1.3, True, False),  # beyond the noise, so beyond any limit inside it
        ("median:20%", 1.0, False, False),
        ("median:1%", 1.0, False, True),
        ("min:0.1", 1.3, False, False),  # in seconds; no case takes that long
        ("min:0.000001", 1.0, False, True),
    ],
)
def test_limits(check, slower, broken, inside):
    """A case beyond a limit and the noise fails; a limit inside the noise is only reported."""
    limits = [parse_compare_fail(check)]
    before = made(0, tail=0, sources="a")
    after = made(1, tail=0, machine=1.4, slower=slower, sources="b")
    failed, unsure = hold(before, after, limits)
    assert bool(failed) is broken
    assert bool(unsure) is inside
    assert all(name.endswith(("-triton]", "-hopper]")) for _, name in failed)
    assert all(check.partition(":")[0] in said for said in (*failed.values(), *unsure))
    assert not hold(before, replace(after, sources="a"), limits)[0]


def test_a_limit_on_no_case_proves_nothing():
    """If no case was timed in both runs, each limit says so."""
    after = replace(made(1), rows=[row | {"name": f"{row['name']}, new"} for row in made(1).rows])
    failed, unsure = hold(made(0), after, [parse_compare_fail("median:5%")])
    assert not failed
    (said,) = unsure
    assert "no case was timed in both runs, so the limit on the median proves nothing" in said
