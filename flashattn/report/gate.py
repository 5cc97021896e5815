"""Turn alternating measurements of two revisions into a verdict.

Each round times three arms: the new revision, the old one, and the old one again in another process
(the null arm). Noise that affects a whole round cancels in the ratio. Noise in one arm of one round
does not move the median. A difference in the null arm is not caused by the code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from flashattn.report.study import Table
from flashattn.report.table import markdown
from flashattn.report.units import ms

ARMS = ("new", "ref", "again")
ROUNDS = 60
MARGIN = 0.03  # allowed slowdown
CONFIDENCE = 0.99
RESAMPLES = 4000
AGAIN = 2  # rounds of a repeated collection, relative to the first
SLOWER, FASTER, SAME, AMBIGUOUS = "SLOWER", "FASTER", "SAME", "AMBIGUOUS"
# UNPROVEN: the null arm differs, or the old process dies. NEW: the old revision lacks the case.
UNPROVEN, NEW = "UNPROVEN", "NEW"
SEEN, MISSED = "SEEN", "MISSED"  # verdicts on an injected slowdown
# pytest uses 0 to 5; its 1 (a test failed) means SLOWER here.
EXIT_AMBIGUOUS, EXIT_UNPROVEN, EXIT_BROKEN = 10, 11, 12


@dataclass(frozen=True, kw_only=True)
class Collection:
    """Seconds of each arm, one per round."""

    new: Sequence[float]
    ref: Sequence[float]
    again: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Interval:
    """The median ratio of times and its 99% confidence interval."""

    low: float
    median: float
    high: float

    @property
    def verdict(self) -> str:
        """SLOWER or FASTER if surely beyond the margin; SAME if surely not slower by it."""
        most = 1 + MARGIN
        if self.low > most:
            return SLOWER
        if self.high < 1 / most:
            return FASTER
        return SAME if self.high < most else AMBIGUOUS

    def __str__(self) -> str:
        """Return median and bounds as signed percentages."""
        low, median, high = (f"{value - 1:+.1%}" for value in (self.low, self.median, self.high))
        return f"{median} ({low} to {high})"


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The result of one collection."""

    change: Interval  # time of the new revision over that of the old
    null: Interval  # time of the old revision over its time in another process
    seconds: float  # median time of one call of the old revision
    rounds: int

    @property
    def verdict(self) -> str:
        """The verdict on the change, or UNPROVEN if the null arm differs."""
        return UNPROVEN if self.null.verdict in (SLOWER, FASTER) else self.change.verdict


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of all collections of a case."""

    case: str
    readings: Sequence[Reading] = ()  # one per collection; empty if the old revision cannot run it
    reason: str | None = None  # why the old revision cannot run the case
    dead: bool = False  # whether the process of the old revision died or stopped answering
    injected: float = 0.0  # slowdown of the new revision, as a share of its time
    attempts: int = 1  # attempts of the self-test; the readings are those of the last

    @property
    def difference(self) -> str:
        """The final verdict: SLOWER, FASTER, SAME, AMBIGUOUS, UNPROVEN or NEW; see ``settle``."""
        if self.readings:
            return self.readings[-1].verdict
        return UNPROVEN if self.dead else NEW

    @property
    def verdict(self) -> str:
        """The difference, or whether an injected slowdown was SEEN.

        MISSED means that the gate failed: it called the slowdown SAME or FASTER, or was undecided
        although its interval was narrow. If noise hides the slowdown, the verdict is UNPROVEN.
        """
        if not (self.injected and self.readings):
            return self.difference
        if self.difference == SLOWER:
            return SEEN
        return MISSED if self.difference in (SAME, FASTER) or self._sharp else UNPROVEN

    @property
    def _sharp(self) -> bool:
        """Return whether the interval is narrower than the gap from the margin to the slowdown."""
        last = self.readings[-1]
        room = (1 + self.injected) / (1 + MARGIN)
        return last.verdict != UNPROVEN and last.change.high / last.change.low < room

    def __str__(self) -> str:
        """Return a sentence; verdict and change come first, because pytest truncates lines."""
        if not self.readings:
            return f"{self.verdict}: the old revision cannot run {self.case} ({self.reason})"
        last = self.readings[-1]
        said = f"{self.case}, null arm {last.null}, {last.rounds} rounds"
        why = EXPLAINED.get(self.verdict, "")
        if self.injected:
            why = f"; an injected slowdown of {self.injected:.0%} {SAID[self.verdict]}"
        return f"{self.verdict} {last.change}: {said}{why}"


SAID = {
    SEEN: "was seen",
    MISSED: "was not seen",
    UNPROVEN: "was not seen, because this machine is too noisy now",
}
EXPLAINED = {
    SLOWER: f"; seen twice, each time surely more than {MARGIN:.0%}",
    AMBIGUOUS: f"; neither surely below {MARGIN:.0%} nor twice surely beyond it",
    UNPROVEN: "; the old revision differs from itself, so this machine is too noisy now",
}


def interval(logs: Sequence[float]) -> Interval:
    """Return the median ratio and its bootstrap interval, given the logs of the ratios."""
    values, draw = np.asarray(logs), np.random.default_rng(len(logs))
    drawn = values[draw.integers(0, len(values), (RESAMPLES, len(values)))]
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(np.median(drawn, axis=1), [tail, 1 - tail])
    return Interval(
        low=math.exp(low), median=math.exp(float(np.median(values))), high=math.exp(high)
    )


def read(collection: Collection) -> Reading:
    """Evaluate a collection; the old revision's time in a round is the mean of its two arms."""
    new, ref, again = (
        np.log(np.asarray(arm)) for arm in (collection.new, collection.ref, collection.again)
    )
    return Reading(
        change=interval(new - (ref + again) / 2),
        null=interval(again - ref),
        seconds=float(np.median(collection.ref)),
        rounds=len(collection.ref),
    )


def settle(collect: Callable[[int], Collection], rounds: int = ROUNDS) -> list[Reading]:
    """Collect until the verdict is settled, at most three times.

    SAME and FASTER are final. After any other verdict the case is collected again, twice as long.
    SLOWER is final only the second time, so a first SLOWER in the second collection needs a third.
    """
    readings = [read(collect(rounds))]
    while not _settled(readings):
        readings.append(read(collect(AGAIN * rounds)))
    return readings


def _settled(readings: Sequence[Reading]) -> bool:
    found = [reading.verdict for reading in readings]
    if found[-1] == SLOWER:
        return found.count(SLOWER) > 1
    return found[-1] in (SAME, FASTER) or len(found) > 1


def exit_status(status: int, outcomes: Sequence[Outcome]) -> int:
    """Return the exit status of the session; pytest's own status stays unless it is 0 or 1."""
    found = {outcome.verdict for outcome in outcomes}
    if status not in (0, 1):
        return status
    if MISSED in found:
        return EXIT_BROKEN
    if status == 1:
        return status
    return EXIT_UNPROVEN if UNPROVEN in found else EXIT_AMBIGUOUS if AMBIGUOUS in found else 0


def table(outcomes: Sequence[Outcome], against: str) -> str:
    """Return a Markdown table with one line per case; ``against`` names the old revision."""
    header = ["case", f"{against}, ms", "change (99%)", "null arm (99%)", "rounds", "verdict"]
    return markdown(Table(caption="", header=header, lines=list(map(_line, outcomes))))


def _line(outcome: Outcome) -> list[str]:
    name = outcome.case + (f" {outcome.injected:+.0%}" if outcome.injected else "")
    if not outcome.readings:
        return [name, "", "", "", "", outcome.verdict]
    last = outcome.readings[-1]
    rounds = " + ".join(str(reading.rounds) for reading in outcome.readings)
    verdict = outcome.verdict + (f", attempt {outcome.attempts}" if outcome.attempts > 1 else "")
    return [name, ms(last.seconds), str(last.change), str(last.null), rounds, verdict]
