"""Compare two runs case by case, with a verdict for each case.

The machine may change between runs, so changes are relative to controls: cases whose code is
unchanged. Peers (naive, PyTorch, FlexAttention, flash-attn) are controls if the versions are equal,
and all cases are if the sources are equal too. The change of a case is divided by the median change
of the controls of its study and pass. The case is faster or slower if the result exceeds all of:
twice the largest deviation of a control (of a steady one, if most are steady), twice the
interquartile range of its own samples in both runs, and 3%. The median over all cases of one
implementation and pass is compared with the peers' medians in the same way, which reveals smaller
changes.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import geometric_mean, median, stdev
from typing import Any, Protocol

from flashattn.report.origin import VERSIONS, circumstances
from flashattn.report.rows import steady
from flashattn.report.runs import STATS, Row, Run
from flashattn.report.study import Table
from flashattn.report.table import markdown
from flashattn.report.units import digits, ms, percent, times

PEERS = re.compile(r"naive|compiled|flex|sdpa(_\w+)?|flash_attn_\w+|floor.*")
FEWEST = 3  # controls needed to estimate the shift of the machine
ENOUGH = 8  # controls needed to estimate the noise
TWICE = 2  # noise, as a multiple of the largest deviation of a control
ERRORS = 4  # standard errors by which the median of a family may differ from the peers
LEAST = 0.03  # minimum noise
UNCONTROLLED = 0.10  # minimum noise without enough controls
BUSY = 1.0  # above this noise of the controls there is no verdict
FASTER, SLOWER, SAME, CONTROL, ONCE = "faster", "slower", "same", "control", "timed once"
EXIT_UNPROVEN_LIMIT = 13  # pytest's own statuses are 0 to 5, the gate's 10 to 12


class Limit(Protocol):
    """A limit of --benchmark-compare-fail, such as ``median:10%``."""

    field: str

    def fails(self, current: Any, compared: Any) -> str | None:
        """Return a sentence if the current statistics exceed the limit, else None."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """The change of one case."""

    a: Row | None  # its row in the first run
    b: Row | None  # its row in the second run
    same_versions: bool = False  # of driver, torch, Triton and so on
    same_code: bool = False  # of the sources, and the same versions
    verdict: str = SAME  # or FASTER, SLOWER, CONTROL, ONCE, new, gone, still STATUS, now STATUS
    shift: float = 0.0  # log of the median ratio of its controls
    noise: float = 0.0  # log of the largest ratio explained by noise; 0 if nothing is compared
    controls: int = 0  # how many controls determine the noise

    @property
    def row(self) -> Row:
        """The newer row."""
        return self.b or self.a or {}

    @property
    def case(self) -> tuple[str, str]:
        """The study and the name of the case."""
        return self.row["study"], self.row["name"]

    @cached_property
    def seconds(self) -> tuple[float | None, float | None]:
        """Seconds before and after; None if there is no time."""
        rows = [row if row and row["status"] == "ok" else {} for row in (self.a, self.b)]
        return rows[0].get("seconds") or None, rows[1].get("seconds") or None

    @property
    def ratio(self) -> float | None:
        """Seconds after over seconds before."""
        before, after = self.seconds
        return after / before if before and after else None

    @property
    def log(self) -> float:
        """The log of the ratio."""
        return math.log(self.ratio or 1.0)

    @cached_property
    def peer(self) -> bool:
        """Return whether the case times only a peer, not our model or our entry point around it."""
        study, name = self.case[0], self.row.get("impl") or ""
        ours = "size" in self.row or (study, name) == ("launch", "naive")
        return self.same_versions and bool(PEERS.fullmatch(name)) and not ours

    @property
    def once(self) -> bool:
        """Return whether a row has only one sample, and so no spread."""
        return any(row and row.get("rounds") == 1 for row in (self.a, self.b))

    @property
    def levels(self) -> tuple[tuple[Any, ...], ...]:
        """The keys by which controls are looked up: clock, study and pass; then clock alone."""
        clock, kind = self.row.get("clock"), self.row.get("pass") or self.row.get("step")
        return (clock, self.case[0], kind), (clock,)

    @property
    def width(self) -> float:
        """The sum of both runs' log interquartile ratios."""
        rows = (row for row in (self.a, self.b) if row and row.get("q1"))
        return sum(math.log(row["q3"] / row["q1"]) for row in rows)


class _Controls:
    """The shift and the noise of the machine, estimated from the controls."""

    def __init__(self, changes: Iterable[Change]) -> None:
        """Collect each control's change, and its deviation from the other controls' median."""
        controls = [c for c in changes if (c.peer or c.same_code) and not c.once]
        self._logs: dict[tuple[Any, ...], dict[tuple[str, str], float]] = defaultdict(dict)
        self._deviations: dict[tuple[Any, ...], list[tuple[bool, float]]] = defaultdict(list)
        for control in controls:
            for level in control.levels:
                self._logs[level][control.case] = control.log
        for control in controls:
            firm = all(steady(row) for row in (control.a, control.b) if row)
            for level in control.levels:
                self._deviations[level].append((firm, abs(control.log - self._shift(control))))

    def judge(self, change: Change) -> Change:
        """Return a change that has both times, with its verdict."""
        shift, (noise, controls) = self._shift(change), self._noise(change)
        busy = controls >= ENOUGH and noise > math.log1p(BUSY)
        noise = max(noise, TWICE * change.width)
        if change.once:
            return replace(change, verdict=ONCE, shift=shift)
        verdict = SAME
        if not change.same_code:
            beyond = abs(change.log - shift) > noise and not busy
            ours = (FASTER if change.log < shift else SLOWER) if beyond else SAME
            verdict = CONTROL if change.peer else ours
        return replace(change, verdict=verdict, shift=shift, noise=noise, controls=controls)

    def _shift(self, change: Change) -> float:
        own = change.case
        for level in change.levels:
            others = [log for case, log in self._logs[level].items() if case != own]
            if len(others) >= FEWEST:
                return median(others)
        return 0.0

    def _noise(self, change: Change) -> tuple[float, int]:
        least, found = UNCONTROLLED, list[tuple[bool, float]]()
        for level in change.levels:
            found = self._deviations[level]
            if len(found) >= ENOUGH:
                least = LEAST
                break
        firm = [deviation for is_firm, deviation in found if is_firm]
        few = 2 * len(firm) < len(found)  # most controls are unsteady, so the machine is, too
        largest = max([deviation for _, deviation in found] if few else firm, default=0.0)
        return max(math.log1p(least), TWICE * largest), len(found)


def compare(a: Run, b: Run) -> list[Change]:
    """Compare every case of two runs; the result has the order of ``b``, then cases only in ``a``.

    Raises:
        ValueError: the runs are of different accelerators.
    """
    if a.accelerator != b.accelerator:
        raise ValueError(f"b: wanted a run of {a.accelerator}, got one of {b.accelerator}")
    before, after = ({(row["study"], row["name"]): row for row in run.rows} for run in (a, b))
    changes = []
    for case in {**after, **before}:
        row = before.get(case)
        old = a.origin(row) if row else a
        versions = all(old.machine.get(name) == b.machine.get(name) for name in VERSIONS)
        code = versions and old.sources is not None and old.sources == b.sources
        changes.append(Change(a=row, b=after.get(case), same_versions=versions, same_code=code))
    controls = _Controls(change for change in changes if change.ratio)
    return [
        controls.judge(change) if change.ratio else replace(change, verdict=_untimed(change))
        for change in changes
    ]


def _untimed(change: Change) -> str:
    if change.a is None or change.b is None:
        return "gone" if change.b is None else "new"
    now = change.b["status"]
    return f"still {now}" if change.a["status"] == now else f"now {now}"


def summary(changes: Sequence[Change]) -> str:
    """Return the count of each verdict, the mean ratio and the noise, in words."""
    counts = Counter(change.verdict for change in changes)
    order = dict.fromkeys([FASTER, SLOWER, SAME, CONTROL, ONCE, *sorted(counts)])
    said = ", ".join(f"{counts[verdict]} {verdict}" for verdict in order if counts[verdict])
    parts = [f"{said or 'no cases'}."]
    ratios = [c.ratio for c in changes if c.ratio and c.verdict != CONTROL]
    if ratios:
        mean = f"{times(geometric_mean(ratios))} in the geometric mean of {len(ratios)}"
        parts.append(f"Times after over before: {mean}.")
    return " ".join(parts + _noise(changes) + _together(changes))


def _noise(changes: Sequence[Change]) -> list[str]:
    """Return sentences about the size and the origin of the noise."""
    known, said = [change for change in changes if change.noise], list[str]()
    same = [math.expm1(abs(change.log - change.shift)) for change in known if change.same_code]
    if same:
        said.append(
            "The code is the same as before, so what differs is this machine's noise: half of"
            f" {len(same)} cases by more than {percent(median(same))}, one by {percent(max(same))}."
        )
    ours = [change for change in known if not change.same_code and change.verdict != CONTROL]
    held = [change for change in ours if change.controls >= ENOUGH]
    if held:
        low, high = (percent(math.expm1(pick(c.noise for c in held))) for pick in (min, max))
        shift = times(math.exp(median(change.shift for change in held)))
        said.append(
            f"The controls, whose code is unchanged, took {shift} as long in the median; a case is"
            f" faster or slower if it differs from that by more than its noise, {low} to {high}:"
            " twice their largest deviation, or twice the width of the middle half of its own"
            f" samples. Where the controls' noise exceeds {BUSY:.0%} nothing can be said."
        )
    if len(held) < len(ours):
        said.append(
            f"{len(ours) - len(held)} cases have fewer than {ENOUGH} controls: their noise is"
            f" {UNCONTROLLED:.0%} at the least, and a busy machine can exceed it."
        )
    return said


def _together(changes: Iterable[Change]) -> list[str]:
    """Return a sentence for each implementation and pass whose median over cases has changed."""
    logs: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for change in changes:
        if change.noise and not change.same_code:
            family = (change.levels[0], change.row.get("impl"), change.peer)
            logs[family].append(change.log - change.shift)
    medians = {family: median(found) for family, found in logs.items() if len(found) >= ENOUGH}
    said = []
    for (kind, impl, peer), log in medians.items():
        beside = [abs(m) for (other, _, control), m in medians.items() if control and other == kind]
        own = logs[kind, impl, peer]
        error = ERRORS * stdev(own) / math.sqrt(len(own))
        noise = max(math.log1p(LEAST), TWICE * max(beside, default=0.0), error)
        if not peer and len(beside) >= FEWEST and abs(log) > noise:
            said.append(
                f"Taken together, {kind[1]} {kind[2]} of {impl} is {FASTER if log < 0 else SLOWER}:"
                f" {times(math.exp(log))} in the median of {len(own)} cases"
                f" beside the controls, {_within(noise)}."
            )
    return said


def report(a: Run, b: Run, *, every: bool = False) -> str:
    """Return the comparison as Markdown: a summary, and a table of changed or all timed cases."""
    changes = compare(a, b)
    quiet = () if every else (SAME, CONTROL, ONCE)
    told = [c for c in changes if "still" not in c.verdict and c.verdict not in quiet]
    sides = [f"Before: {circumstances(a)}.", f"After: {circumstances(b)}."]
    parts = ["\n".join(sides), summary(changes)]
    if told:
        header = ["case", "before, ms", "after, ms", "after / before"]
        header += ["controls", "noise", "verdict"]
        lines = [_line(change) for change in told]
        parts.append(markdown(Table(caption="", header=header, lines=lines)))
    return "\n\n".join(parts)


def _within(noise: float) -> str:
    """Return log noise as a percentage, or "more than 2x"."""
    share = math.expm1(noise)
    return f"±{percent(share)}" if share < 1 else "more than 2x"


def _line(change: Change) -> list[str]:
    beside = ["", ""]
    if change.noise:
        beside = [digits(math.exp(change.shift)), _within(change.noise)]
    seconds = (ms(each) for each in change.seconds)
    return [": ".join(change.case), *seconds, digits(change.ratio), *beside, change.verdict]


def hold(a: Run, b: Run, limits: Iterable[Limit]) -> tuple[dict[tuple[str, str], str], list[str]]:
    """Check our cases in ``b`` against the limits of --benchmark-compare-fail relative to ``a``.

    Limits on other statistics than mean and median need rows with ``stats``, those of
    pytest-benchmark.

    Returns:
        A sentence for each case that exceeds both a limit and the noise, and a sentence for each
        limit that proves nothing: it lies within the noise of some cases, or there is no case.
    """
    broken, inside = dict[tuple[str, str], str](), list[str]()
    for limit in limits:
        field, blurred = limit.field, list[float]()
        ours = [
            c for c in compare(_on(a, field), _on(b, field)) if c.noise and c.verdict != CONTROL
        ]
        for change in ours:
            # A limit may be absolute, so it is applied to seconds, corrected for the shift.
            before = {field: change.seconds[0]}
            moved, edge = (
                {field: (change.seconds[0] or 0.0) * math.exp(log)}
                for log in (change.log - change.shift, change.noise)
            )
            if change.verdict == SLOWER and limit.fails(moved, before):
                broken[change.case] = (
                    f"SLOWER {math.expm1(change.log - change.shift):+.1%} than in the kept runs:"
                    f" {field} beside the controls, beyond the limit and the noise of"
                    f" {percent(math.expm1(change.noise))}"
                )
            elif limit.fails(edge, before):
                blurred.append(change.noise)
        if not ours:
            inside.append(
                f"--benchmark-compare-fail: no case was timed in both runs, so the limit on the"
                f" {field} proves nothing"
            )
        if blurred:
            inside.append(
                f"--benchmark-compare-fail: the limit on the {field} lies inside the noise of"
                f" {len(blurred)} of {len(ours)} cases, {percent(math.expm1(max(blurred)))} at"
                " most, and proves nothing about them; allow more, or use --gate-against"
            )
    return broken, inside


def _on(run: Run, field: str) -> Run:
    """Return the run with ``seconds`` replaced by another statistic."""
    spread = () if field in ("min", "mean", "median") else ("q1", "q3")
    known = {name: fact for fact, name in STATS.items()}  # of a kept row
    rows = [
        {name: fact for name, fact in row.items() if name not in spread}
        | {"seconds": row["stats"][field] if "stats" in row else row.get(known.get(field, ""))}
        for row in run.rows
    ]
    return replace(run, rows=rows)
