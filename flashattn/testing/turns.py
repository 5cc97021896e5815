"""Time all implementations of a problem in turns, so that a drift of the clock hits them alike.

A GPU at its power limit changes its clock within a tenth of a second. On an H200, the ratio of two
calls is uncertain by 5 to 8% if each is timed separately, and by 2% in turns (docs/tuning-log.md).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from flashattn.measure.timing import Clock, retaken, rounds_of, warm_up
from flashattn.testing.graph import Call
from flashattn.testing.sweep import group


@dataclass
class Turn:
    """The facts and samples from the turns of one case."""

    began: float  # host time when the group's turns began
    facts: dict[str, Any] = field(default_factory=dict)
    samples: list[float] = field(default_factory=list)


Prepare = Callable[[pytest.Item, dict[str, Any]], Call]  # fills in the facts
# The group that was timed last, and the turns of its cases.
TURNS = pytest.StashKey[tuple[tuple[str, ...], dict[str, Turn]]]()


def turn_of(
    item: pytest.Item, prepare: Prepare, clock: Clock, *, takes: Callable[[pytest.Item], bool]
) -> Turn | None:
    """Return the samples of a case; the first case of a group takes the turns of all.

    Args:
        item: the case.
        prepare: checks a case's results and returns its call, or raises.
        clock: the clock of the device.
        takes: whether a case of the group takes turns.

    Returns:
        None if the case has no turn. Run alone, it raises its error again, or has enough memory.
    """
    session, its = item.session, group(item)
    if session.stash.get(TURNS, ((), {}))[0] != its:
        beside = [x for x in session.items if group(x) == its and takes(x)]
        session.stash[TURNS] = its, _take(beside, prepare, clock)
    return session.stash[TURNS][1].pop(item.nodeid, None)


def _take(items: list[pytest.Item], prepare: Prepare, clock: Clock) -> dict[str, Turn]:
    """Time all cases that can be prepared; return none if anything fails meanwhile."""
    began = time.perf_counter()
    turns, calls = dict[str, Turn](), dict[str, Call]()
    for item in items:
        turn = Turn(began)
        with suppress(Exception, pytest.skip.Exception, pytest.xfail.Exception):
            calls[item.nodeid] = prepare(item, turn.facts)
            turns[item.nodeid] = turn
    with suppress(Exception):
        for name, seconds, tries, late in take_turns(calls, clock):
            turn = turns[name]
            turn.samples.append(seconds)
            turn.facts["retaken"] = turn.facts.get("retaken", 0) + tries
            turn.facts["late"] = turn.facts.get("late", 0) + late
        return turns
    return {}


def take_turns(calls: dict[str, Call], clock: Clock) -> Iterator[tuple[str, float, int, int]]:
    """Time calls in rounds, each in a random order of its own.

    Args:
        calls: by name; their results have been checked.
        clock: the clock of the device.

    Yields:
        A name, seconds, how often the sample was repeated for being late, and 1 if it still is.
    """
    if not calls:
        return
    paces = {name: warm_up(x.call, clock=clock, setup=x.setup) for name, x in calls.items()}
    lead = clock.cover(max(pace.launch for pace in paces.values()))
    drawn = random.Random(0)  # noqa: S311 - the same orders in each run
    seconds = sum(pace.wall + lead for pace in paces.values())
    for _ in range(rounds_of(seconds / len(calls))):
        for name in drawn.sample(list(calls), len(calls)):
            call, setup = calls[name]
            # If the launch takes longer than the lead, a repeated sample would be late again.
            again = setup if paces[name].launch < lead else None
            (sample,), _, tries = retaken(clock, call, setup(), again=again)
            yield name, sample, tries, clock.late
