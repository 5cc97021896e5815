"""When two revisions differ: from seconds measured in turns to a verdict, and how often it errs.

Each round times three arms close together: the new revision, the old one, and the old one again in
a process of its own, the null arm. What slows all of a round down cancels in the logarithm of a
ratio, what slows one arm of one round down cannot move a median, and what the null arm shows is not
the code's doing.
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
MARGIN = 0.03  # what a change may cost
CONFIDENCE = 0.99
RESAMPLES = 4000
AGAIN = 2  # how much longer a case is collected again
SLOWER, FASTER, SAME, AMBIGUOUS = "SLOWER", "FASTER", "SAME", "AMBIGUOUS"
# The null arm differs, or the old revision does not run at all; it cannot run this one case.
UNPROVEN, NEW = "UNPROVEN", "NEW"
SEEN, MISSED = "SEEN", "MISSED"  # of a slow-down made on purpose
# pytest's own are 0 to 5, of which 1 says that something is SLOWER.
EXIT_AMBIGUOUS, EXIT_UNPROVEN, EXIT_BROKEN = 10, 11, 12


@dataclass(frozen=True, kw_only=True)
class Collection:
    """Seconds of each arm, round by round."""

    new: Sequence[float]
    ref: Sequence[float]
    again: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A ratio of seconds, and between which values 99 of 100 such intervals have the true one."""

    low: float
    median: float
    high: float

    @property
    def verdict(self) -> str:
        """SLOWER, FASTER: surely, and by more than the margin. SAME: surely not slower by it."""
        most = 1 + MARGIN
        if self.low > most:
            return SLOWER
        if self.high < 1 / most:
            return FASTER
        return SAME if self.high < most else AMBIGUOUS

    def __str__(self) -> str:
        """Return the three as signed percents."""
        low, median, high = (f"{value - 1:+.1%}" for value in (self.low, self.median, self.high))
        return f"{median} ({low} to {high})"


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What one collection says.

    Args:
        change: of the new revision's seconds over the old one's.
        null: of the old one's over its own, in another process.
        seconds: of one call of the old revision, the median.
        rounds: that were made.
    """

    change: Interval
    null: Interval
    seconds: float
    rounds: int

    @property
    def verdict(self) -> str:
        """The change's, if the null arm lets one believe it."""
        return UNPROVEN if self.null.verdict in (SLOWER, FASTER) else self.change.verdict


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What all collections of a case say.

    Args:
        case: its name.
        readings: in their order; none where the old revision cannot run it.
        reason: why it cannot.
        dead: whether its process has died or does not answer, so that nothing can be compared.
        injected: share by which the new revision was made slower on purpose.
        attempts: of the self-test, of which these readings are the last.
    """

    case: str
    readings: Sequence[Reading] = ()
    reason: str | None = None
    dead: bool = False
    injected: float = 0.0
    attempts: int = 1

    @property
    def difference(self) -> str:
        """SLOWER, FASTER, SAME, AMBIGUOUS, UNPROVEN or NEW: the last word; see ``settle``."""
        if self.readings:
            return self.readings[-1].verdict
        return UNPROVEN if self.dead else NEW

    @property
    def verdict(self) -> str:
        """The difference, or whether a slow-down that was made on purpose was seen.

        MISSED is the gate's fault: it called the slow-down what it surely is not, or did not know
        though its interval was narrow. What a noisy machine blurs is UNPROVEN.
        """
        if not (self.injected and self.readings):
            return self.difference
        if self.difference == SLOWER:
            return SEEN
        return MISSED if self.difference in (SAME, FASTER) or self._sharp else UNPROVEN

    @property
    def _sharp(self) -> bool:
        """Whether all of the interval has room between the margin and what was injected."""
        last = self.readings[-1]
        room = (1 + self.injected) / (1 + MARGIN)
        return last.verdict != UNPROVEN and last.change.high / last.change.low < room

    def __str__(self) -> str:
        """Return a sentence that begins with the verdict and the change, as a line may be cut."""
        if not self.readings:
            return f"{self.verdict}: the old revision cannot run {self.case} ({self.reason})"
        last = self.readings[-1]
        said = f"{self.case}, null arm {last.null}, {last.rounds} rounds"
        why = EXPLAINED.get(self.verdict, "")
        if self.injected:
            why = f"; a slow-down of {self.injected:.0%} made on purpose {SAID[self.verdict]}"
        return f"{self.verdict} {last.change}: {said}{why}"


SAID = {
    SEEN: "was seen",
    MISSED: "was not seen",
    UNPROVEN: "was not seen on a machine as noisy as this one is now",
}
EXPLAINED = {
    SLOWER: f"; seen twice, each time surely more than {MARGIN:.0%}",
    AMBIGUOUS: f"; neither surely below {MARGIN:.0%} nor twice surely beyond it",
    UNPROVEN: "; the old revision differs from itself, so this machine tells nothing now",
}


def interval(logs: Sequence[float]) -> Interval:
    """Return the median ratio and its bootstrap interval; the same logs give the same interval.

    Args:
        logs: a logarithm of a ratio for each round.
    """
    values, draw = np.asarray(logs), np.random.default_rng(len(logs))
    drawn = values[draw.integers(0, len(values), (RESAMPLES, len(values)))]
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(np.median(drawn, axis=1), [tail, 1 - tail])
    return Interval(
        low=math.exp(low), median=math.exp(float(np.median(values))), high=math.exp(high)
    )


def read(collection: Collection) -> Reading:
    """Return what a collection says; the old revision's time in a round is the mean of its two."""
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
    """Collect until the verdict is settled: once for most, thrice at most.

    SAME and FASTER stand at once. Everything else is collected again, twice as long; and what then
    is SLOWER for the first time, once more, for SLOWER is the last word only at its second time.

    Args:
        collect: makes so many rounds.
        rounds: of the first collection.
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
    """Return pytest's status, or the gate's where pytest's would hide what must be known.

    Args:
        status: pytest's: 0, or 1 where something failed; others are returned as they are.
        outcomes: of all cases.
    """
    found = {outcome.verdict for outcome in outcomes}
    if status not in (0, 1):
        return status
    if MISSED in found:
        return EXIT_BROKEN
    if status == 1:
        return status
    return EXIT_UNPROVEN if UNPROVEN in found else EXIT_AMBIGUOUS if AMBIGUOUS in found else 0


def table(outcomes: Sequence[Outcome], against: str) -> str:
    """Return a Markdown table with a line for each case.

    Args:
        outcomes: in their order.
        against: what the old revision is called.
    """
    header = ["case", f"{against}, ms", "change (99%)", "null arm (99%)", "rounds", "verdict"]
    return markdown(
        Table(caption="", header=header, lines=[_line(outcome) for outcome in outcomes], rows=[])
    )


def _line(outcome: Outcome) -> list[str]:
    name = outcome.case + (f" {outcome.injected:+.0%}" if outcome.injected else "")
    if not outcome.readings:
        return [name, "", "", "", "", outcome.verdict]
    last = outcome.readings[-1]
    rounds = " + ".join(str(reading.rounds) for reading in outcome.readings)
    verdict = outcome.verdict + (f", attempt {outcome.attempts}" if outcome.attempts > 1 else "")
    return [name, ms(last.seconds), str(last.change), str(last.null), rounds, verdict]
