"""Problems: their checks, their names and their exact costs."""

import dataclasses

import hypothesis
import pytest
import torch

from flashattn.checks import check_scale
from flashattn.problem import DTYPES, Problem
from flashattn.testing.inputs import make_inputs
from flashattn.testing.sample import Case
from flashattn.testing.strategies import problems


@hypothesis.example(problem=Problem(seq_q=9, seq_kv=7, prefix=3))
@hypothesis.given(problem=problems(longest=40, prefixed=(False, True)))
def test_pairs_and_rows(problem):
    """Pairs are the visible pairs of all heads; fully masked rows are those of one head."""
    t, s = torch.arange(problem.seq_q)[:, None], torch.arange(problem.seq_kv)[None, :]
    seen = problem.band.sees(t, s).expand(problem.seq_q, problem.seq_kv)
    if problem.prefix is not None:
        seen = seen & ((s <= t) | (s < problem.prefix))
    assert torch.equal(Case(problem=problem, inputs=make_inputs(problem), scale=1.0).seen, seen)
    assert problem.pairs == problem.batch * problem.heads * int(seen.sum())
    assert problem.fully_masked_rows == int((~seen.any(-1)).sum())


def test_costs():
    """The flops and bytes of one head of 2 x 3 x 4 fp32 are those counted by hand."""
    problem = Problem(seq_q=2, seq_kv=3, head_dim=4)
    assert problem.flops() == 2 * 2 * (2 * 3) * 4
    assert problem.flops("backward") == 2.5 * problem.flops()
    q, kv, lse = 2 * 4 * 4, 3 * 4 * 4, 2 * 4
    assert problem.bytes() == q + 2 * kv + lse + q
    assert problem.bytes("backward") == (3 * q + 2 * kv + lse) + (q + 2 * kv)
    narrow = dataclasses.replace(problem, value_dim=1)
    assert narrow.flops() == 2 * (2 * 3) * (4 + 1)
    assert narrow.flops("backward") == 2 * (2 * 3) * (3 * 4 + 2 * 1)  # S, dK, dQ; dP, dV
    k, v, o = kv, 3 * 1 * 4, 2 * 1 * 4
    assert narrow.bytes() == q + k + v + lse + o
    assert narrow.bytes("backward") == (q + k + v + 2 * o + lse) + (q + k + v)


def test_values_as_wide_as_keys_are_not_narrow():
    """A ``value_dim`` equal to ``head_dim`` gives the same problem as none."""
    assert Problem(head_dim=64, value_dim=64) == Problem(head_dim=64)
    assert str(Problem(head_dim=64, value_dim=8)) == "fp32-b1h1-q128-d64v8-full"


def test_masks_have_one_form():
    """Equal masks make equal problems with one name, however the masks are given."""
    window = Problem(causal=True, window=(3, None))
    assert window == Problem(window=(3, 0)) == Problem(causal="top_left", window=[3, 9])
    assert str(window) == "fp32-b1h1-q128-d64-window3+0"
    assert window.keywords == {"causal": "top_left", "window": (3, None)}
    assert Problem(window=(None, 0)) == Problem(causal=True)
    assert Problem(causal=True).keywords == {"causal": "top_left"}
    assert Problem(softcap=2).keywords == {"causal": False, "softcap": 2.0}


@hypothesis.given(problem=problems())
def test_problem_of_its_own_inputs(problem):
    """The problem of some inputs is the one that made them."""
    assert Problem.of(*make_inputs(problem), **problem.keywords) == problem


def test_names_are_unique():
    """Different problems have different names."""
    base = Problem(batch=2, heads=4, kv_heads=2, seq_q=5, seq_kv=7, head_dim=8, causal=True)
    others = {"batch": 3, "heads": 6, "kv_heads": 1, "seq_q": 6, "seq_kv": 8, "head_dim": 9}
    others |= {"causal": "bottom_right", "window": (3, None), "softcap": 50, "dtype": "float16"}
    others |= {"alibi": True, "bias": "1hts", "sink": True}
    changed = [dataclasses.replace(base, **{name: value}) for name, value in others.items()]
    assert len({str(problem) for problem in [base, *changed]}) == 1 + len(others)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"batch": -1}, "batch: wanted at least 0, got -1"),
        ({"head_dim": 0}, "head_dim: wanted at least 1, got 0"),
        ({"value_dim": 0}, "value_dim: wanted 1 to 64, got 0"),
        ({"value_dim": 65}, "value_dim: wanted 1 to 64, got 65"),
        ({"heads": 3, "kv_heads": 2}, "kv_heads: wanted a divisor of the 3 query heads, got 2"),
        ({"heads": 3, "kv_heads": 0}, "kv_heads: wanted a divisor of the 3 query heads, got 0"),
        ({"dtype": "int8"}, "dtype: wanted one of float64, float32, .*, got 'int8'"),
        ({"causal": "middle"}, "causal: wanted False, True"),
        ({"bias": "ts"}, "bias: wanted dimensions like 1hts"),
        ({"softcap": 0.0}, "softcap: wanted a number from 1e-06 to 1000000 or None, got 0.0"),
        ({"prefix": -1}, "prefix: wanted at least 0, .* got -1"),
        ({"prefix": 3, "causal": True}, "prefix: wanted .* no causal, right bound or documents"),
        ({"prefix": 3, "window": (None, 2)}, "prefix: wanted .* no causal, right bound"),
        ({"prefix": 3, "documents": ((1, 1),)}, "prefix: wanted .* documents beside it, got 3"),
        ({"window": (3, -1)}, r"window: wanted \(left, right\), each an int"),
    ],
)
def test_impossible_problems(wrong, words):
    """An impossible problem is refused by name."""
    with pytest.raises(ValueError, match=words):
        Problem(**wrong)


def test_default_scale():
    """The default scale is one over the root of the head dimension."""
    assert check_scale(None, 64) == 0.125


@hypothesis.given(
    problem=problems(dtypes=tuple(DTYPES), prefixed=(False, False, True), narrowed=(False, True))
)
def test_names_are_read_back(problem):
    """Parsing the name of a problem gives the same problem."""
    assert Problem.parse(str(problem)) == problem


def test_documents_of_one_length_are_counted():
    """A name counts successive documents of one length, and parses back."""
    documents = ((40, 40), (30, 20), (64, 64), (64, 64), (64, 64), (1, 0))
    problem = Problem(seq_q=300, documents=documents)
    assert str(problem).endswith("-docs40+30x20+3of64+1x0")
    assert Problem.parse(str(problem)) == problem


@pytest.mark.parametrize(
    "name",
    ["", "fp32", "fp8-b1h1-q1-d1-full", "fp32-b1h1-q1-d1-sliding", "fp32-b1h1-q1-d1-full-cap0"],
)
def test_names_of_no_problem(name):
    """An invalid name is refused, with an example of a valid one."""
    with pytest.raises(ValueError, match=r"problem: wanted a name like .*, got"):
        Problem.parse(name)
