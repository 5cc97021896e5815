"""Shrinking: the smallest question that still fails."""

from __future__ import annotations

import dataclasses
import time

import pytest

from flashattn.problem import Problem
from flashattn.testing.accuracy import Question
from flashattn.testing.shrink import STEPS, shrink

LARGE = Question(
    problem=Problem(
        batch=3, heads=6, kv_heads=2, seq_q=129, seq_kv=300, head_dim=80, dtype="bfloat16",
        causal="bottom_right",
    ),
    values="negative", layout="packed", scale=0.3, seed=7,
)  # fmt: skip
LEAST = Problem(seq_q=1, head_dim=1)


@pytest.mark.parametrize(
    ("fails", "least"),
    [
        (lambda q: True, {}),
        (lambda q: q.problem.seq_q >= 70 or q.problem.dtype == "float32", {}),  # a second round
        (lambda q: q.problem.seq_q >= 70, {"seq_q": 70, "seq_kv": 1}),
        (lambda q: q.problem.heads != q.problem.kv_heads, {"heads": 2, "kv_heads": 1}),
        (lambda q: q.problem.causal, {"causal": "top_left"}),
        (lambda q: q.problem.dtype == "bfloat16", {"dtype": "bfloat16"}),
        (lambda q: q.problem.seq_q * q.problem.seq_kv >= 64 * 65, {"seq_q": 14, "seq_kv": 298}),
    ],
)
def test_only_what_matters_is_kept(fails, least):
    """Everything that the failure does not need is as small and plain as can be."""
    found = shrink(LARGE, fails)
    assert found == Question(problem=dataclasses.replace(LEAST, **least))


@pytest.mark.parametrize("name", ["values", "layout", "scale", "seed"])
def test_unusual_inputs_are_kept_where_they_matter(name):
    """Values, layout, scale and seed become the usual ones, but for those that it fails by."""
    found = shrink(LARGE, lambda q: getattr(q, name) == getattr(LARGE, name))
    assert found == Question(problem=LEAST, **{name: getattr(LARGE, name)})


def test_nothing_is_simpler_than_the_least():
    """The end is an end: no candidate, so no round that goes on for ever."""
    assert [found for step in STEPS for found in step(Question(problem=LEAST))] == []


def test_a_slow_failure_is_shrunk_for_a_while_only():
    """When the time is over, what was found by then is returned."""
    tried = []

    def fails(question):
        tried.append(question)
        time.sleep(0.02)
        return True

    assert fails(shrink(LARGE, fails, seconds=0.05))
    assert 2 <= len(tried) <= 5
