"""Turns: a drift of the clock hits all calls alike."""

from statistics import median
from types import SimpleNamespace

import torch

from flashattn.measure import timing
from flashattn.testing.graph import Call
from flashattn.testing.turns import _take, take_turns


class DriftingClock(timing.Clock):
    """A clock for calls that return their seconds, on a device that gets slower with each."""

    def __init__(self, lates=()):
        """Set the numbers of the samples that are late."""
        super().__init__()
        self.lates, self.taken, self.lead = set(lates), 0, None

    def cover(self, launch):
        """Record the launch that is to be covered."""
        self.lead = launch
        return 1.0

    def samples(self, call, calls):
        """Return what the calls return, plus 1% for each sample before."""
        self.taken += 1
        self.late = int(self.taken in self.lates)
        return [call() * (1 + self.taken / 100)] * calls, None


def test_a_drift_hits_all_alike(monkeypatch):
    """A call twice as long takes 2 times as long in turns, over 3 times one after the other."""
    monkeypatch.setattr(timing, "WARM_UP", 0.0)
    monkeypatch.setattr(timing, "BUDGET", 1e9)
    calls = {"short": Call(lambda: 1.0), "long": Call(lambda seconds: seconds, lambda: (2.0,))}
    clock = DriftingClock()
    alone = {
        name: [clock.samples(lambda x=x: x, 1)[0][0] for _ in range(100)]
        for name, x in {"short": 1.0, "long": 2.0}.items()
    }
    assert median(alone["long"]) / median(alone["short"]) > 3
    taken = list(take_turns(calls, DriftingClock()))
    samples = {name: [x for of, x, *_ in taken if of == name] for name in calls}
    assert len(samples["short"]) == len(samples["long"]) == timing.MOST_ROUNDS
    assert abs(median(samples["long"]) / median(samples["short"]) - 2) < 0.05
    rounds = {(taken[i][0], taken[i + 1][0]) for i in range(0, len(taken), 2)}
    assert rounds == {("short", "long"), ("long", "short")}


def test_late_turns_are_taken_again(monkeypatch):
    """A late sample is taken again; one that stays late is kept and reported."""
    monkeypatch.setattr(timing, "WARM_UP", 0.0)
    monkeypatch.setattr(timing, "MOST_ROUNDS", 5)
    stays = range(4, 5 + timing.RETAKES)
    clock = DriftingClock([2, *stays])
    taken = list(take_turns({"call": Call(lambda: 1e-9)}, clock))
    assert [(again, late) for *_, again, late in taken] == [
        (0, 0),
        (1, 0),
        (timing.RETAKES, 1),
        (0, 0),
        (0, 0),
    ]


def test_no_call_has_no_turn():
    """Without calls there are no turns: all cases of a group may be left out."""
    assert list(take_turns({}, DriftingClock())) == []


def test_what_has_no_memory_beside_others_is_timed_alone(monkeypatch):
    """If one call runs out of memory while they are timed, or otherwise fails, none has a turn."""
    monkeypatch.setattr(timing, "WARM_UP", 0.0)
    calls = iter(range(100))

    def greedy():
        if next(calls) > 5:
            raise torch.OutOfMemoryError
        return 1.0

    def prepare(item, facts):
        facts["name"] = item.nodeid
        return Call(greedy if item.nodeid == "greedy" else lambda: 1.0)

    items = [SimpleNamespace(nodeid=name) for name in ("greedy", "modest")]
    assert _take(items, prepare, DriftingClock()) == {}
    assert next(calls) == 7, "it was timed before"
