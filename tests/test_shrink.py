"""Shrinking: the smallest sample that still fails."""

import dataclasses
from types import SimpleNamespace

import pytest

from flashattn.problem import Problem
from flashattn.testing import shrink as module
from flashattn.testing.accuracy import Sample
from flashattn.testing.shrink import shrink

SIZES = {"batch": 3, "heads": 6, "kv_heads": 2, "seq_q": 129, "seq_kv": 300, "head_dim": 80}
PROBLEM = Problem(**SIZES, dtype="bfloat16", causal="bottom_right")
LARGE = Sample(problem=PROBLEM, values="negative", layout="packed", scale=0.3, seed=7)
LEAST = Problem(seq_q=1, head_dim=1)


@pytest.mark.parametrize(
    ("fails", "least"),
    [
        (lambda q: True, {}),
        (lambda q: q.problem.seq_q >= 70 or q.problem.dtype == "float32", {}),
        (lambda q: q.problem.seq_q >= 70, {"seq_q": 70, "seq_kv": 1}),
        (lambda q: q.problem.heads != q.problem.kv_heads, {"heads": 2, "kv_heads": 1}),
        (lambda q: q.problem.causal, {"causal": "top_left"}),
        (lambda q: q.problem.dtype == "bfloat16", {"dtype": "bfloat16"}),
        (
            lambda q: q.problem.fully_masked_rows,
            {"seq_q": 2, "seq_kv": 1, "causal": "bottom_right"},
        ),
        (lambda q: q.problem.seq_q * q.problem.seq_kv >= 64 * 65, {"seq_q": 33, "seq_kv": 127}),
    ],
)
def test_only_what_matters_is_kept(fails, least):
    """Shrinking makes all that the failure does not need as small and plain as possible."""
    assert shrink(LARGE, fails) == Sample(problem=dataclasses.replace(LEAST, **least))


@pytest.mark.parametrize("name", ["values", "layout", "scale", "seed"])
def test_unusual_inputs_are_kept_where_they_matter(name):
    """Values, layout, scale and seed become the usual ones, except those that the failure needs."""
    found = shrink(LARGE, lambda q: getattr(q, name) == getattr(LARGE, name))
    assert found == Sample(problem=LEAST, **{name: getattr(LARGE, name)})


@pytest.mark.parametrize(
    "problem", [LEAST, LARGE.problem, Problem(batch=0, heads=0, seq_q=0, seq_kv=0, head_dim=3)]
)
def test_what_cannot_be_smaller_stays(problem):
    """A sample that alone fails is found again, and nothing in it becomes negative."""
    sample = dataclasses.replace(LARGE, problem=problem)
    assert shrink(sample, lambda q: q == sample) == sample


@pytest.mark.parametrize("limit", ["TRIES", "SECONDS"])
def test_a_slow_failure_is_shrunk_for_a_while_only(monkeypatch, limit):
    """After a number of tries or seconds the best sample is returned; none is tried twice."""
    tried = []
    clock = SimpleNamespace(perf_counter=lambda: float(len(tried)))  # a second for each
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(module, limit, 5)

    def fails(sample):
        tried.append(sample)
        return sample.problem.seq_q >= 70

    found = shrink(LARGE, fails)
    assert found in (LARGE, *tried)
    assert found.problem.seq_q >= 70
    assert len(set(tried)) == len(tried) == 5
