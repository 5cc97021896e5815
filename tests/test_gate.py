"""The gate's statistics on simulated rounds, whose true difference is known."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from flashattn.report import gate
from flashattn.report.gate import (
    ARMS,
    Collection,
    Interval,
    Outcome,
    exit_status,
    interval,
    read,
    settle,
    table,
)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Draw fewer resamples, because many runs are simulated."""
    monkeypatch.setattr(gate, "RESAMPLES", 1000)


def made(rounds=60, *, seed=0, shift=0.0, null=0.0, noise=0.04, tail=0.0, drift=1.0, shocks=1.0):
    """Simulate rounds: log-normal noise for each arm, and effects that all arms share.

    The new revision is slower by ``shift``, and the old one's second process by ``null``. A
    fraction ``tail`` of an arm's samples takes three times as long. For all arms, the last round
    takes ``drift`` times as long as the first, and a third of the rounds ``shocks`` times as long.
    """
    draw = np.random.default_rng(seed)
    shared = drift ** np.linspace(0, 1, rounds) * np.where(draw.random(rounds) < 1 / 3, shocks, 1)
    means = {"new": 1 + shift, "ref": 1.0, "again": 1 + null}
    seconds = {
        arm: 0.005
        * means[arm]
        * shared
        * np.exp(noise * draw.standard_normal(rounds))
        * np.where(draw.random(rounds) < tail, 3, 1)
        for arm in ARMS
    }
    return Collection(**seconds)


def settled(seed, **how):
    """Return the verdict on a case that is collected as often as the gate asks."""
    seeds = itertools.count(1000 * seed)
    readings = settle(lambda rounds: made(rounds, seed=next(seeds), **how))
    return Outcome(case="made up", readings=readings).difference


MACHINES = {
    "quiet": {"noise": 0.01},
    "noisy": {"noise": 0.05},
    "drifting": {"drift": 2.0},
    "shocked": {"shocks": 5.0},
    "interrupted": {"tail": 0.05},
}


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(("shift", "verdict"), [(0.0, "SAME"), (0.08, "SLOWER"), (-0.08, "FASTER")])
def test_truth_is_found(machine, shift, verdict):
    """The verdict is right, whatever a machine does to all arms or to some rounds."""
    assert settled(1, shift=shift, **MACHINES[machine]) == verdict


@pytest.mark.parametrize(
    ("machine", "shift", "verdict", "least", "never"),
    [
        *[(machine, 0.0, "SAME", 30, "SLOWER") for machine in MACHINES],
        *[("usual", shift, "SAME", 0, "SLOWER") for shift in (0.02, 0.03)],  # within the margin
        *[
            (machine, 0.07, "SLOWER", 36, "SAME")
            for machine in ("noisy", "drifting", "interrupted")
        ],
    ],
)
def test_of_forty_runs_few_are_open_and_none_is_wrong(machine, shift, verdict, least, never):
    """A shift within the margin is never SLOWER, and one of 7% is never SAME."""
    found = [settled(seed, shift=shift, **MACHINES.get(machine, {})) for seed in range(40)]
    assert found.count(verdict) >= least
    assert never not in found


@pytest.mark.parametrize(("confidence", "least", "most"), [(0.99, 295, 300), (0.8, 235, 270)])
def test_interval_covers_the_truth(monkeypatch, confidence, least, most):
    """Of 300 intervals the claimed fraction contains the true ratio, and not many more."""
    monkeypatch.setattr(gate, "CONFIDENCE", confidence)
    draw, hits = np.random.default_rng(3), 0
    for _ in range(300):
        found = interval(0.05 + 0.04 * draw.standard_t(3, 60))
        hits += found.low <= np.exp(0.05) <= found.high
    assert least <= hits <= most


def test_second_process_counts_as_much_as_the_first():
    """The arms of the old revision are interchangeable, and a reading can be repeated."""
    rounds = made(null=0.02)
    swapped = Collection(new=rounds.new, ref=rounds.again, again=rounds.ref)
    assert read(rounds) == read(rounds)
    assert read(rounds).change == read(swapped).change


@pytest.mark.parametrize(
    ("low", "median", "high", "verdict"),
    [
        (0.98, 1.0, 1.02, "SAME"),
        (1.001, 1.01, 1.029, "SAME"),  # surely slower, and surely by less than the margin
        (1.031, 1.05, 1.10, "SLOWER"),
        (1.029, 1.05, 1.10, "AMBIGUOUS"),  # surely slower, but perhaps by less than the margin
        (0.99, 1.05, 1.10, "AMBIGUOUS"),
        (0.90, 0.95, 0.970, "FASTER"),
        (0.90, 0.95, 0.972, "SAME"),  # perhaps faster, and surely not slower
        (0.50, 0.90, 1.029, "SAME"),
        (0.90, 1.0, 1.10, "AMBIGUOUS"),
    ],
)
def test_verdict_of_an_interval(low, median, high, verdict):
    """SLOWER is surely slower by more than the margin; SAME is surely not."""
    assert Interval(low=low, median=median, high=high).verdict == verdict


SHIFTS = {"S": {"shift": 0.1}, "=": {}, "F": {"shift": -0.1}, "?": {"noise": 0.4}}
SHIFTS["U"] = {"null": 0.1}


@pytest.mark.parametrize(
    ("shown", "verdict", "collections"),
    [
        ("=", "SAME", 1),
        ("F", "FASTER", 1),
        ("SS", "SLOWER", 2),
        ("S=", "SAME", 2),
        ("S?", "AMBIGUOUS", 2),
        ("SU", "UNPROVEN", 2),
        ("?=", "SAME", 2),
        ("??", "AMBIGUOUS", 2),
        ("?SS", "SLOWER", 3),  # SLOWER fails at its second time, not at the second collection
        ("?S=", "SAME", 3),
        ("?S?", "AMBIGUOUS", 3),
        ("USS", "SLOWER", 3),
        ("UU", "UNPROVEN", 2),
    ],
)
def test_only_twice_slower_is_slower(shown, verdict, collections):
    """An open case is collected again, twice as long; only two SLOWER readings are SLOWER."""
    asked = []

    def collect(rounds):
        asked.append(rounds)
        return made(rounds, seed=5, **{"noise": 0.01} | SHIFTS[shown[len(asked) - 1]])

    outcome = Outcome(case="made up", readings=settle(collect))
    assert outcome.difference == verdict
    assert asked == [60, 120, 120][:collections]


def outcome(verdict):
    """Return an outcome with that verdict."""
    injected = 0.1 if verdict in ("MISSED", "SEEN") else 0.0
    if verdict in ("NEW", "DEAD"):
        return Outcome(case="a", reason="there was no such thing", dead=verdict == "DEAD")
    sign = {"SLOWER": "S", "MISSED": "=", "SEEN": "S", "SAME": "=", "FASTER": "F"}
    sign |= {"AMBIGUOUS": "?", "UNPROVEN": "U"}
    how = {"noise": 0.01} | SHIFTS[sign[verdict]]
    found = Outcome(case="a", readings=settle(lambda n: made(n, seed=5, **how)), injected=injected)
    assert found.verdict == verdict
    return found


@pytest.mark.parametrize(
    ("verdicts", "pytests", "status"),
    [
        (["SAME", "FASTER", "NEW", "SEEN"], 0, 0),
        ([], 0, 0),
        (["SLOWER", "SAME", "UNPROVEN"], 1, 1),
        (["AMBIGUOUS", "SAME"], 0, 10),
        (["AMBIGUOUS", "UNPROVEN"], 0, 11),
        (["SAME", "DEAD"], 0, 11),
        (["SLOWER", "MISSED", "SEEN"], 1, 12),
        (["MISSED"], 2, 2),  # interrupted
    ],
)
def test_exit_status_tells(verdicts, pytests, status):
    """Without a failure, the exit status still says whether something was not proven.

    A missed injected slowdown outranks everything but pytest's own errors.
    """
    assert exit_status(pytests, [outcome(verdict) for verdict in verdicts]) == status


@pytest.mark.parametrize(
    ("how", "injected", "verdict"),
    [
        ({"shift": 0.10, "noise": 0.01}, 0.10, "SEEN"),
        ({"noise": 0.01}, 0.10, "MISSED"),
        ({"shift": -0.10, "noise": 0.01}, 0.10, "MISSED"),
        ({"shift": 0.03, "noise": 0.005}, 0.05, "MISSED"),  # AMBIGUOUS, and sharply so
        ({"shift": 0.03, "noise": 0.1}, 0.05, "UNPROVEN"),  # so blurred that none could tell
        ({"shift": 0.03, "noise": 0.04}, 0.05, "UNPROVEN"),  # 5% is not clear of the margin
        ({"shift": 0.03, "noise": 0.04}, 0.10, "MISSED"),  # 10% would be
        ({"shift": 0.10, "null": 0.10, "noise": 0.01}, 0.10, "UNPROVEN"),
    ],
)
def test_a_slow_down_is_missed_only_where_it_had_to_be_seen(how, injected, verdict):
    """A slowdown is MISSED if the reading is wrong or sharp, and UNPROVEN if it is blurred."""
    readings = settle(lambda rounds: made(rounds, seed=5, **how))
    assert Outcome(case="a", readings=readings, injected=injected).verdict == verdict


def test_table_has_what_a_verdict_rests_on():
    """A row has the case, both intervals, the rounds of every collection and the verdict."""
    seen = replace(outcome("SEEN"), attempts=2)
    lines = table([outcome("SLOWER"), outcome("NEW"), seen], "v1").splitlines()
    assert "v1, ms" in lines[0]
    assert all(word in lines[2] for word in ("| a ", "+10.", "60 + 120", "SLOWER"))
    assert "NEW" in lines[3]
    assert "| a +10% " in lines[4]
    assert "SEEN, attempt 2 |" in lines[4]


@pytest.mark.parametrize(
    ("verdict", "begins", "said"),
    [
        ("SLOWER", "SLOWER +9.9% (+9.", "seen twice"),
        ("AMBIGUOUS", "AMBIGUOUS ", "neither surely"),
        ("UNPROVEN", "UNPROVEN ", "differs from itself"),
        ("NEW", "NEW: ", "there was no such thing"),
        ("DEAD", "UNPROVEN: ", "there was no such thing"),
    ],
)
def test_a_verdict_is_a_short_sentence(verdict, begins, said):
    """A verdict is explained in one short line that begins with it."""
    text = str(outcome(verdict))
    assert text.startswith(begins)
    assert said in text
    assert len(text) < 250
    assert "\n" not in text
