"""Two runs side by side, case by case, with a verdict in a word."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from flashattn.report.fit import geometric_mean
from flashattn.report.origin import circumstances
from flashattn.report.runs import Row, Run
from flashattn.report.study import Table
from flashattn.report.table import markdown
from flashattn.report.units import digits, ms, times

NOISE = 0.03  # what medians of unchanged code differ by at the least, from run to run
TIMED = ("faster", "slower", "same")


@dataclass(frozen=True, kw_only=True)
class Change:
    """What became of one case.

    Args:
        study: of the case.
        name: of the case in its study.
        before: seconds in the first run, None where it has none.
        after: seconds in the second.
        ratio: after over before.
        verdict: faster, slower, same, new, gone, still or now without a time, timed again.
    """

    study: str
    name: str
    before: float | None
    after: float | None
    ratio: float | None
    verdict: str


def compare(a: Run, b: Run) -> list[Change]:
    """Return what became of every case of ``a`` and of ``b``, in ``b``'s order, gone ones last.

    Times differ by less than the noise, and are the same, while the medians are within 3% or the
    middle halves of the samples overlap. Seconds that were stored are a trend and not a gate: the
    machine has changed since in ways that no statistics of its own can tell.

    Args:
        a: the run before.
        b: the run after.

    Raises:
        ValueError: they are of different accelerators.
    """
    if a.accelerator != b.accelerator:
        raise ValueError(f"b: wanted a run of {a.accelerator}, got one of {b.accelerator}")
    before, after = ({(row["study"], row["name"]): row for row in run.rows} for run in (a, b))
    return [_change(before.get(case), after.get(case), *case) for case in {**after, **before}]


def _change(a: Row | None, b: Row | None, study: str, name: str) -> Change:
    before, after = (
        row.get("seconds") if row and row["status"] == "ok" else None for row in (a, b)
    )
    return Change(
        study=study,
        name=name,
        before=before,
        after=after,
        ratio=after / before if before and after else None,
        verdict=_verdict(a, b),
    )


def _verdict(a: Row | None, b: Row | None) -> str:
    if a is None:
        return "new"
    if b is None:
        return "gone"
    if a["status"] != b["status"]:
        return f"now {b['status']}"
    if not (a["status"] == "ok" and a.get("seconds") and b.get("seconds")):
        return f"still {a['status']}"
    if _within_noise(a, b):
        return "same"
    return "faster" if b["seconds"] < a["seconds"] else "slower"


def _within_noise(a: Row, b: Row) -> bool:
    low, high = sorted((a["seconds"], b["seconds"]))
    if high <= low * (1 + NOISE):
        return True
    if not all("q1" in row and "q3" in row for row in (a, b)):
        return False
    return bool(a["q1"] <= b["q3"] and b["q1"] <= a["q3"])


def summary(changes: Sequence[Change]) -> str:
    """Return how many cases have which verdict, and the geometric mean of the times' ratios."""
    counts = Counter(change.verdict for change in changes)
    order = [*TIMED, *sorted(set(counts) - set(TIMED))]
    said = ", ".join(f"{counts[verdict]} {verdict}" for verdict in order if counts[verdict])
    ratios = [change.ratio for change in changes if change.ratio is not None]
    if not ratios:
        return f"{said or 'no cases'}."
    mean = geometric_mean(ratios)
    return f"{said}. Times after over before: {times(mean)} in the geometric mean of {len(ratios)}."


def report(a: Run, b: Run, *, every: bool = False) -> str:
    """Return the comparison as Markdown: the summary, then a table.

    Args:
        a: the run before.
        b: the run after.
        every: give each timed case a line, and not only those that are not the same.
    """
    changes = compare(a, b)
    told = [
        change
        for change in changes
        if "still" not in change.verdict and (every or change.verdict != "same")
    ]
    sides = [f"Before: {circumstances(a)}.", f"After: {circumstances(b)}."]
    parts = ["\n".join(sides), summary(changes)]
    if told:
        header = ["case", "before, ms", "after, ms", "after / before", "verdict"]
        lines = [_line(change) for change in told]
        parts.append(markdown(Table(caption="", header=header, lines=lines, rows=[])))
    return "\n\n".join(parts)


def _line(change: Change) -> list[str]:
    ratio = digits(change.ratio)
    case = f"{change.study}: {change.name}"
    return [case, ms(change.before), ms(change.after), ratio, change.verdict]
