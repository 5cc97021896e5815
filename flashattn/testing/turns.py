"""Turns: implementations of one problem are timed in turns, so that a drift hits them all alike.

A GPU at its power limit changes its clock within a tenth of a second, so ratios of calls that are
timed one behind the other are uncertain by 5 to 8%, and by 2% in turns (docs/tuning-log.md).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from traceback import clear_frames
from typing import Any

import pytest

from flashattn.measure.device import out_of_memory
from flashattn.measure.timing import Clock, retaken, rounds_of, warm_up
from flashattn.testing.graph import Call
from flashattn.testing.sweep import group


@dataclass
class Turn:
    """What the turns of one case gave: samples, or what it raised, to be raised in its own run."""

    began: float  # on the host's clock, the turns of all
    facts: dict[str, Any] = field(default_factory=dict)
    samples: list[float] = field(default_factory=list)
    raised: BaseException | None = None


Prepare = Callable[[pytest.Item, dict[str, Any]], Call]  # fills in the facts
TURNS = pytest.StashKey[dict[str, Turn | None]]()  # of the group that was timed last, by case


def turn_of(
    item: pytest.Item, prepare: Prepare, clock: Clock, *, takes: Callable[[pytest.Item], bool]
) -> Turn | None:
    """Return what the turns of a case gave; the first of a group takes those of all.

    Args:
        item: the case.
        prepare: checks a case's results and returns its call, or raises.
        clock: of the device.
        takes: which cases of a group take turns.

    Returns:
        None if there was no memory for all calls at once: the case is to be timed alone.
    """
    session = item.session
    taken = session.stash.get(TURNS, {})
    if item.nodeid not in taken:
        beside = [x for x in session.items if group(x) == group(item) and takes(x)]
        taken = session.stash[TURNS] = _take(beside, prepare, clock)
    return taken.pop(item.nodeid)


def _take(items: list[pytest.Item], prepare: Prepare, clock: Clock) -> dict[str, Turn | None]:
    """Prepare all cases, then time them; those that run out of memory have no turn."""
    found, calls = {item.nodeid: Turn(time.perf_counter()) for item in items}, dict[str, Call]()
    alone = set()
    for item in items:
        turn = found[item.nodeid]
        try:
            calls[item.nodeid] = prepare(item, turn.facts)
        except (pytest.skip.Exception, pytest.xfail.Exception) as verdict:
            turn.raised = verdict.with_traceback(None)
        except Exception as error:  # noqa: BLE001 - raised again
            clear_frames(error.__traceback__)  # of the tensors that they hold
            turn.raised = error
            if out_of_memory(error):
                alone.add(item.nodeid)
    try:
        for name, seconds, again, late in take_turns(calls, clock):
            turn = found[name]
            turn.samples.append(seconds)
            turn.facts["retaken"] = turn.facts.get("retaken", 0) + again
            turn.facts["late"] = turn.facts.get("late", 0) + late
    except Exception as error:
        if not out_of_memory(error):
            raise
        alone |= calls.keys()
    return {name: None if name in alone else turn for name, turn in found.items()}


def take_turns(calls: dict[str, Call], clock: Clock) -> Iterator[tuple[str, float, int, int]]:
    """Time calls in rounds, each in an order of its own.

    Args:
        calls: by name; their results have been checked.
        clock: of the device.

    Yields:
        A name, seconds, how often the sample was repeated as it was late, and whether it stayed so.
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
            # If the launch outlasts every lead, each sample would be late again.
            again = setup if paces[name].launch < lead else None
            (sample,), _, tries = retaken(clock, call, setup(), again=again)
            yield name, sample, tries, clock.late
