"""Two runs side by side, case by case, with a verdict in a word.

The machine changes between two runs, so a change counts only beside cases whose code is unchanged,
the controls: the peers' attention (naive, PyTorch's, FlexAttention, flash-attn) under equal
versions, and every case if both runs are of the same sources. The model: a case of ours is faster
or slower if its change, divided by the median change of the controls beside it, exceeds twice the
largest deviation of any steady control, twice the width of the middle half of its own samples in
both runs, and 3%. The cases of one implementation and pass are held together in the same way, by
their median against those of the peers, which shows smaller changes.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import geometric_mean, median
from typing import Any, Protocol

from flashattn.report.origin import VERSIONS, circumstances
from flashattn.report.rows import steady
from flashattn.report.runs import Row, Run
from flashattn.report.study import Table
from flashattn.report.table import markdown
from flashattn.report.units import digits, ms, percent, times

PEERS = re.compile(r"naive|compiled|flex|sdpa(_\w+)?|flash_attn_\w+|floor.*")
BESIDE = 3  # controls that say how much faster or slower the machine was for a case
ENOUGH = 8  # controls that say how much unchanged code varies
TWICE = 2  # noise over the largest deviation of a control
LEAST = 0.03  # noise at the least
UNCONTROLLED = 0.10  # noise at the least where there are not enough controls
FASTER, SLOWER, SAME, CONTROL, ONCE = "faster", "slower", "same", "control", "timed once"
# pytest's own statuses are 0 to 5, the gate's 10 to 12.
EXIT_INSIDE_NOISE = 13

Case = tuple[str, str]  # study and name


class Limit(Protocol):
    """What --benchmark-compare-fail asks for, such as ``median:10%``."""

    field: str

    def fails(self, current: Any, compared: Any) -> str | None:
        """Return a sentence if the current statistics are worse than asked, else None."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """What became of one case.

    Args:
        study: of the case.
        name: of the case in its study.
        verdict: faster, slower, same, control, timed once, new, gone, still or now without a time.
        before: seconds in the first run, None where it has none.
        after: seconds in the second.
        shift: after over before that the controls beside it show.
        noise: share by which unchanged code differs from that; 0 where nothing is to be compared.
        controls: how many the noise was estimated from.
        same_code: whether both runs are of the same sources.
        family: its study, pass and implementation.
    """

    study: str
    name: str
    verdict: str
    before: float | None = None
    after: float | None = None
    shift: float = 1.0
    noise: float = 0.0
    controls: int = 0
    same_code: bool = False
    family: tuple[Any, ...] = ()

    @property
    def ratio(self) -> float | None:
        """Seconds after over before."""
        return self.after / self.before if self.before and self.after else None


@dataclass(frozen=True)
class _Pair:
    """One case with a time in both runs."""

    case: Case
    before: Row
    after: Row
    same_versions: bool
    same_code: bool

    @property
    def log(self) -> float:
        return math.log(self.after["seconds"] / self.before["seconds"])

    @property
    def peer(self) -> bool:
        """Whether it times a peer's attention: not in our model, nor behind our entry point."""
        row, name = self.after, self.after.get("impl") or ""
        ours = "size" in row or (row["study"], name) == ("launch", "naive")
        return self.same_versions and PEERS.fullmatch(name) is not None and not ours

    @property
    def control(self) -> bool:
        return (self.peer or self.same_code) and not self.once

    @property
    def once(self) -> bool:
        return 1 in (self.before.get("rounds"), self.after.get("rounds"))

    @property
    def levels(self) -> tuple[tuple[Any, ...], ...]:
        """What it shares with its controls, from the narrowest to the widest."""
        row = self.after
        beside = row["name"].replace(str(row.get("impl")), "", 1)
        clock, kind = row.get("clock"), row.get("pass") or row.get("step")
        return (clock, row["study"], kind, beside), (clock, row["study"], kind), (clock,)

    @property
    def width(self) -> float:
        """How far apart the quartiles of its samples are, in both runs together."""
        rows = self.before, self.after
        return sum(math.log(row["q3"] / row["q1"]) for row in rows if row.get("q1"))


class _Machine:
    """What the controls say about the machine.

    Args:
        pairs: of which some are controls.
    """

    def __init__(self, pairs: Iterable[_Pair]) -> None:
        """Collect the controls' changes, then how far each is from those beside it."""
        controls = [pair for pair in pairs if pair.control]
        self._logs: dict[tuple[Any, ...], dict[Case, float]] = defaultdict(dict)
        self._deviations: dict[tuple[Any, ...], list[float]] = defaultdict(list)
        for pair in controls:
            for level in pair.levels:
                self._logs[level][pair.case] = pair.log
        for pair in controls:
            if steady(pair.before) and steady(pair.after):
                for level in pair.levels[1:]:
                    self._deviations[level].append(abs(pair.log - self.shift(pair)))

    def shift(self, pair: _Pair) -> float:
        """Return the logarithm of the median change of the other controls beside a case."""
        for level in pair.levels:
            others = [log for case, log in self._logs[level].items() if case != pair.case]
            if len(others) >= BESIDE:
                return median(others)
        return 0.0

    def noise(self, pair: _Pair) -> tuple[float, int]:
        """Return by how much the logarithm of unchanged code differs, and the controls it is of."""
        least, found = UNCONTROLLED, list[float]()
        for level in pair.levels[1:]:
            found = self._deviations[level]
            if len(found) >= ENOUGH:
                least = LEAST
                break
        widest = TWICE * max(pair.width, *found, 0.0)
        return max(math.log1p(least), widest), len(found)


def compare(a: Run, b: Run) -> list[Change]:
    """Return what became of every case of ``a`` and of ``b``, in ``b``'s order, gone ones last.

    Args:
        a: the run before; rows of a merged one remember their own.
        b: the run after.

    Raises:
        ValueError: they are of different accelerators.
    """
    if a.accelerator != b.accelerator:
        raise ValueError(f"b: wanted a run of {a.accelerator}, got one of {b.accelerator}")
    before, after = ({(row["study"], row["name"]): row for row in run.rows} for run in (a, b))
    pairs = {
        case: _pair(case, a.origin(before[case]), before[case], b, after[case])
        for case in after
        if case in before and _timed(before[case]) and _timed(after[case])
    }
    machine = _Machine(pairs.values())
    return [
        _change(pairs[case], machine)
        if case in pairs
        else _untimed(case, before.get(case), after.get(case))
        for case in {**after, **before}
    ]


def _timed(row: Row) -> bool:
    return bool(row["status"] == "ok" and row.get("seconds"))


def _pair(case: Case, a: Run, before: Row, b: Run, after: Row) -> _Pair:
    same_versions = all(a.machine.get(name) == b.machine.get(name) for name in VERSIONS)
    same_code = same_versions and a.sources is not None and a.sources == b.sources
    return _Pair(case, before, after, same_versions, same_code)


def _change(pair: _Pair, machine: _Machine) -> Change:
    shift, (noise, controls) = machine.shift(pair), machine.noise(pair)
    change = Change(
        study=pair.case[0],
        name=pair.case[1],
        verdict=SAME,
        before=pair.before["seconds"],
        after=pair.after["seconds"],
        shift=math.exp(shift),
        noise=math.expm1(noise),
        controls=controls,
        same_code=pair.same_code,
        family=(*pair.levels[1][1:], pair.after.get("impl")),
    )
    if pair.once:
        return replace(change, verdict=ONCE, noise=0.0)
    if pair.same_code:
        return change
    if pair.peer:
        return replace(change, verdict=CONTROL)
    if abs(pair.log - shift) <= noise:
        return change
    return replace(change, verdict=FASTER if pair.log < shift else SLOWER)


def _untimed(case: Case, a: Row | None, b: Row | None) -> Change:
    before, after = (row["seconds"] if row and _timed(row) else None for row in (a, b))
    if a is None or b is None:
        verdict = "gone" if b is None else "new"
    else:
        verdict = f"{'still' if a['status'] == b['status'] else 'now'} {b['status']}"
    return Change(study=case[0], name=case[1], verdict=verdict, before=before, after=after)


def summary(changes: Sequence[Change]) -> str:
    """Return how many cases have which verdict, the mean of their ratios, and the noise."""
    counts = Counter(change.verdict for change in changes)
    order = dict.fromkeys([FASTER, SLOWER, SAME, CONTROL, ONCE, *sorted(counts)])
    said = ", ".join(f"{counts[verdict]} {verdict}" for verdict in order if counts[verdict])
    parts = [f"{said or 'no cases'}."]
    ratios = [c.ratio for c in changes if c.ratio and c.verdict != CONTROL]
    if ratios:
        mean = f"{times(geometric_mean(ratios))} in the geometric mean of {len(ratios)}"
        parts.append(f"Times after over before: {mean}.")
    return " ".join(parts + _noise(changes) + _together(changes))


def _together(changes: Iterable[Change]) -> list[str]:
    """Say who is faster or slower in a pass: a median of cases is less noisy than a case."""
    logs: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for change in changes:
        if change.noise and change.ratio and not change.same_code:
            family = (*change.family, change.verdict == CONTROL)
            logs[family].append(math.log(change.ratio / change.shift))
    medians = {family: median(found) for family, found in logs.items() if len(found) >= ENOUGH}
    said = []
    for (study, kind, impl, peer), log in medians.items():
        beside = [
            abs(m) for family, m in medians.items() if family[:2] == (study, kind) and family[3]
        ]
        if peer or len(beside) < BESIDE:
            continue
        noise = max(math.log1p(LEAST), TWICE * max(beside))
        if abs(log) > noise:
            count = len(logs[study, kind, impl, peer])
            said.append(
                f"Taken together, {study} {kind} of {impl} is {FASTER if log < 0 else SLOWER}:"
                f" {times(math.exp(log))} in the median of {count} cases beside the controls,"
                f" ±{percent(math.expm1(noise))}."
            )
    return said


def _noise(changes: Sequence[Change]) -> list[str]:
    """Say what the noise was estimated from, and how large it is."""
    known = [change for change in changes if change.noise]
    same = [abs(c.ratio / c.shift - 1) for c in known if c.ratio and c.same_code]
    said = []
    if same:
        said.append(
            "The code is the same as before, so what differs is this machine's noise: half of"
            f" {len(same)} cases by more than {percent(median(same))}, one by {percent(max(same))}."
        )
    ours = [c for c in known if not c.same_code and c.verdict != CONTROL]
    held = [c for c in ours if c.controls >= ENOUGH]
    if held:
        low, high = (pick(c.noise for c in held) for pick in (min, max))
        between = percent(high) if percent(low) == percent(high) else f"{low:.1%} to {high:.1%}"
        shifts = median(c.shift for c in held)
        said.append(
            f"The controls, whose code is unchanged, took {times(shifts)} as long in the median;"
            " a case is faster or slower if it differs from those beside it by more than its noise,"
            f" {between}: twice their largest deviation, or twice the width of the middle halves"
            " of its own samples."
        )
    if len(held) < len(ours):
        said.append(
            f"{len(ours) - len(held)} cases have fewer than {ENOUGH} controls: their noise is"
            f" {UNCONTROLLED:.0%} at the least, and a busy machine can exceed it."
        )
    return said


def report(a: Run, b: Run, *, every: bool = False) -> str:
    """Return the comparison as Markdown: the summary, then a table.

    Args:
        a: the run before.
        b: the run after.
        every: give each timed case a line, and not only those that changed.
    """
    changes = compare(a, b)
    quiet = () if every else (SAME, CONTROL, ONCE)
    told = [c for c in changes if "still" not in c.verdict and c.verdict not in quiet]
    sides = [f"Before: {circumstances(a)}.", f"After: {circumstances(b)}."]
    parts = ["\n".join(sides), summary(changes)]
    if told:
        header = [
            "case",
            "before, ms",
            "after, ms",
            "after / before",
            "controls",
            "noise",
            "verdict",
        ]
        lines = [_line(change) for change in told]
        parts.append(markdown(Table(caption="", header=header, lines=lines, rows=[])))
    return "\n\n".join(parts)


def _line(change: Change) -> list[str]:
    case, shift, noise = f"{change.study}: {change.name}", "", ""
    if change.noise:
        shift, noise = digits(change.shift), f"±{percent(change.noise)}"
    seconds = ms(change.before), ms(change.after)
    return [case, *seconds, digits(change.ratio), shift, noise, change.verdict]


@dataclass(frozen=True)
class Held:
    """What limits say of a run.

    Args:
        broken: by case, the sentence that says which limit it surely breaks.
        inside: a sentence for each limit that lies inside the noise of some cases.
    """

    broken: dict[Case, str]
    inside: list[str]


def hold(a: Run, b: Run, limits: Iterable[Limit]) -> Held:
    """Hold the cases of ours in ``b`` to limits on how much slower than in ``a`` they may be.

    Args:
        a: the run before; its rows have ``stats``, the statistics that a limit may be on.
        b: the run after, likewise.
        limits: of pytest-benchmark.
    """
    held = Held({}, [])
    for limit in limits:
        field, inside = limit.field, list[float]()
        changes = compare(_on(a, field), _on(b, field))
        ours = [c for c in changes if c.noise and c.verdict != CONTROL]
        for change in ours:
            if not (change.before and change.after):
                continue
            before, after = {field: change.before}, {field: change.after / change.shift}
            edge = {field: change.before * (1 + change.noise)}
            if change.verdict == SLOWER and limit.fails(after, before):
                held.broken[change.study, change.name] = (
                    f"slower than in the kept runs: {field} {after[field] / change.before - 1:+.1%}"
                    " beside the controls, more than the limit and than the noise of"
                    f" {percent(change.noise)}"
                )
            elif limit.fails(edge, before):
                inside.append(change.noise)
        if inside:
            held.inside.append(
                f"--benchmark-compare-fail: the limit on the {field} lies inside the noise of"
                f" {len(inside)} of {len(ours)} cases, {percent(max(inside))} at most, and"
                " proves nothing about them; allow more, or use --gate-against"
            )
    return held


def _on(run: Run, field: str) -> Run:
    """Return the run with another statistic in the median's place."""
    spread = () if field in ("min", "mean", "median") else ("q1", "q3")
    rows = [
        {name: fact for name, fact in row.items() if name not in spread}
        | {"seconds": row["stats"][field]}
        if "stats" in row
        else row
        for row in run.rows
    ]
    return replace(run, rows=rows)
