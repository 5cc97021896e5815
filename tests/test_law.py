"""The law decorator: strict implementations fail, peers xfail, inapplicable laws are skipped."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import hypothesis
import pytest
import torch

from flashattn import registry
from flashattn.problem import Problem
from flashattn.testing.accuracy import Sample
from flashattn.testing.examples import Count
from flashattn.testing.law import clause, kinds_of, law, share
from flashattn.testing.results import ask, assert_agree, assert_same_bits, assert_within
from flashattn.testing.seed import Seed, chance
from flashattn.testing.strategies import KINDS

REFERENCE = registry.get("reference")
CPU = torch.device("cpu")
SAMPLE = Sample(problem=Problem(batch=2, heads=4, kv_heads=2, seq_q=20, head_dim=16))


@pytest.fixture(autouse=True)
def _forgetful():
    """Keep the failures of these laws out of Hypothesis's database."""
    before = hypothesis.settings()
    hypothesis.settings.register_profile("forgetful", before, database=None)
    hypothesis.settings.load_profile("forgetful")
    yield
    hypothesis.settings.register_profile("before", before)
    hypothesis.settings.load_profile("before")


@law()
def holds(impl, sample):
    """Hold."""
    assert impl
    assert sample.problem.seq_q


@law(needs="lse")
def fails(impl, sample):
    """Fail from nine queries on."""
    assert sample.problem.seq_q < 9, f"{impl.name} fails"


def test_a_law_that_fails_is_shrunk():
    """A strict implementation that breaks a law fails, with the smallest failing sample."""
    with pytest.raises(AssertionError) as failed:
        fails(REFERENCE, CPU)
    assert "seq_q=9" in "\n".join(failed.value.__notes__)


@law()
def breaks(impl, sample):
    """Raise an error as PyTorch does."""
    del impl, sample
    msg = "no kernel"
    raise RuntimeError(msg)


def test_a_peer_is_excused():
    """An implementation that does not claim the contract xfails, with the failure's message."""
    peer = replace(REFERENCE, name="peer", strict=False)
    with pytest.raises(pytest.xfail.Exception, match="peer: peer fails"):
        fails(peer, CPU)
    with pytest.raises(pytest.xfail.Exception, match="peer: no kernel"):
        breaks(peer, CPU)
    with pytest.raises(RuntimeError, match="no kernel"):
        breaks(REFERENCE, CPU)


@pytest.mark.parametrize("strict", [False, True])
def test_a_peer_is_asked_the_same_in_each_run(strict, monkeypatch):
    """A clause draws by the run's seed; a peer gets the same draws in every run."""
    drawn = []

    @clause()
    def draws(impl, device):
        """Draw."""
        del impl, device
        drawn.append(chance("x").random())

    for seed in (1, 2):
        monkeypatch.setattr(Seed, "value", seed)
        draws(replace(REFERENCE, strict=strict), CPU)
        assert Seed.value == seed
    assert (drawn[0] == drawn[1]) is not strict


@pytest.mark.parametrize("strict", [False, True])
def test_what_fails_at_times_has_failed(strict):
    """Breaking a law on some calls only, as unordered sums may do, is excused only in a peer."""
    calls = []

    @law()
    def breaks_once(impl, sample):
        """Fail at the first call only."""
        calls.append(sample)
        assert len(calls) > 1, f"{impl.name} differs"

    failure = hypothesis.errors.FlakyFailure if strict else pytest.xfail.Exception
    with pytest.raises(failure, match="unreliable"):
        breaks_once(replace(REFERENCE, strict=strict), CPU)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        ({"lse": False}, "peer does not return the logsumexp"),
        ({"compiles": True}, "peer compiles for seconds at every new shape"),
        ({"limits": lambda problem, device: "peer is away"}, "peer is away"),
    ],
)
def test_what_cannot_be_asked_is_left_out(change, words):
    """A law is left out, with the reason, where an implementation lacks what it needs."""
    why_not = fails.pytestmark[0].args[0]
    assert why_not(replace(REFERENCE, name="peer", **change)) == words


def test_a_law_about_other_problems_is_skipped():
    """A law about full attention is skipped, with the reason, for a causal-only implementation."""

    @law(asked={"masks": (False,), "windowed": (False,)})
    def full(impl, sample):
        """Hold."""
        assert impl
        assert sample

    limits = {"limits": lambda problem, device: None if problem.causal else "only causal"}
    with pytest.raises(pytest.skip.Exception, match="peer takes no problem that this law is about"):
        full(replace(REFERENCE, name="peer", **limits), CPU)


def test_limits_are_kept():
    """An implementation gets only problems within its limits, and no backward without gradients."""
    asked = []

    @law()
    def remembers(impl, sample):
        """Remember."""
        assert impl is narrow
        asked.append(sample)

    narrow = replace(
        REFERENCE,
        limits=lambda problem, device: None if problem.causal else "only causal",
        grad=False,
        strict=False,
    )
    remembers(narrow, CPU)
    assert all(sample.problem.causal and not sample.grad for sample in asked)
    assert {(sample.values, sample.layout) for sample in asked} == {("normal", "contiguous")}


def test_shares(monkeypatch):
    """The interpreter gets an eighth of the profile's examples, and a peer a quarter."""
    most = hypothesis.settings().max_examples
    for name, part in {"triton": 8, "tiled": 1, "sdpa": 4}.items():
        assert share(registry.get(name), CPU) == max(1, most // part)
    for peer in (REFERENCE, replace(REFERENCE, name="peer", strict=False)):
        monkeypatch.setattr(Count, "passed", 0)
        holds(peer, CPU)
        assert Count.passed == share(peer, CPU)


@pytest.mark.parametrize("name", ["o", "lse", "dq", "dk", "dv"])
def test_disagreement_is_seen(name):
    """Results that differ by rounding agree, and an output off by a thousandth is reported."""
    one, other = ask(REFERENCE, SAMPLE), ask(REFERENCE, SAMPLE)
    other.got[name] = one.got[name] * (1 + 1e-7)
    assert_agree(one, other)
    other.got[name] = one.got[name] * 1.001
    with pytest.raises(AssertionError, match=rf"{name}: differs by .* \((max|mean)\), budget"):
        assert_agree(one, other)


def test_sums_have_larger_budgets():
    """Several budgets add up, and a budget that is not needed is not evaluated."""
    result = ask(REFERENCE, SAMPLE)
    budget = result.budget("dk")["max"]
    off = partial(torch.full, (9,), dtype=torch.float64)
    for more in ({"max": 2 * budget}, lambda: {"max": 2 * budget}):
        assert_within("dk", off(2.9 * budget), {"max": budget}, more)
        with pytest.raises(AssertionError, match="dk: differs"):
            assert_within("dk", off(3.1 * budget), {"max": budget}, more)
    assert_within("dk", off(0.9 * budget), {"max": budget}, pytest.fail)


def test_infinities_must_agree():
    """An element that is infinite or NaN in only one result is reported."""
    one, other = ask(REFERENCE, SAMPLE), ask(REFERENCE, SAMPLE)
    for wrong in (torch.inf, torch.nan):
        other.got["dv"][0, 0, 0, 0] = wrong
        for pair in ((one, other), (other, one)):
            with pytest.raises(AssertionError, match="dv: infinite or NaN"):
                assert_agree(*pair)


def test_bits():
    """The first element whose bits differ is reported, and NaN does not equal NaN."""
    x = torch.arange(6.0).view(2, 3)
    assert_same_bits("o", x, x.clone())
    y = x.clone()
    y[1, 0] += 1e-6
    with pytest.raises(AssertionError, match=r"o: 1 elements differ, the first at \[1, 0\]: 3.0"):
        assert_same_bits("o", x, y)
    with pytest.raises(AssertionError, match="o: 1 elements"):
        assert_same_bits("o", torch.tensor([torch.nan]), torch.tensor([torch.nan]))


@pytest.mark.parametrize(
    ("examples", "asked"), [(100, {"triton": 1, "sdpa": KINDS}), (1000, {"triton": KINDS})]
)
def test_laws_share_the_kinds_of_problems(monkeypatch, examples, asked):
    """One asks ours for one kind in all but the thorough profile, and many ask for each."""
    settings = SimpleNamespace(max_examples=examples)
    monkeypatch.setattr(hypothesis, "settings", lambda: settings)
    for name, most in asked.items():
        groups = [kinds_of(f"law {i}", registry.get(name)) for i in range(40)]
        assert {len(first) for first, *_ in groups} == {most}
        assert {kind for first, *_ in groups for kind in first} == set(range(KINDS))
        every = [sorted(kind for group in x for kind in group) for x in groups]
        assert all(x == list(range(KINDS)) for x in every)  # tried until one can be solved
