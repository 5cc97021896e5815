"""The form of results, the one line about them, and calls that never return."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from flashattn import registry
from flashattn.testing.conforms import Tally
from flashattn.testing.form import FormError, check_form
from flashattn.testing.seed import Seed, chance

ROOT = Path(registry.__file__).parents[1]


def wrong_results(q):
    """Return results that are no answer, by what is said of them."""
    return {
        "o: NoneType, wanted a tensor": {"o": None},
        "o: shape": {"o": q[:, :, 1:].clone()},
        "o: dtype torch.float32, wanted torch.bfloat16": {"o": q.float()},
        "o: device meta": {"o": q.to("meta")},
        "o: layout torch.sparse_coo": {"o": q.to_sparse()},
        "lse: dtype torch.bfloat16, wanted torch.float32": {"lse": q[..., 0].clone()},
        "dk: several elements share a place": {"dk": q.new_zeros(1).expand_as(q)},
        "o: lies in the memory of an input": {"o": q.view(q.shape)},
    }


@pytest.mark.parametrize("words", wrong_results(torch.ones(1, 2, 3, 4, dtype=torch.bfloat16)))
def test_what_is_no_answer(words):
    """It is said in one sentence, and what is one passes."""
    q, k, v = (torch.ones(1, 2, 3, 4, dtype=torch.bfloat16) for _ in range(3))
    with pytest.raises(FormError, match=words):
        check_form((q, k, v), wrong_results(q)[words])
    check_form((q, k, v), {"o": q.clone(), "lse": q[..., 0].float(), "dk": k.mT.clone().mT})


def test_a_result_has_a_gradient():
    """Where one is asked for."""
    q = torch.ones(1, 2, 3, 4)
    with pytest.raises(FormError, match="o: has no gradient"):
        check_form((q, q, q), {"o": q.clone()}, grad=True)


def test_one_line():
    """It has the numbers that repeat it."""
    tally = Tally({"test_a": True, "test_b": True}, 7)
    assert tally.line("mine") == f"mine conforms: 2 clauses, 7 examples, seed {Seed.value}"
    tally.clauses["test_b"] = False
    assert tally.line("mine").startswith("mine does not conform: test_b; of 2 clauses, 7")


def test_chance_is_the_seeds(monkeypatch):
    """The same seed and names draw the same."""
    monkeypatch.setattr(Seed, "value", 5)
    assert chance("a").random() == chance("a").random() != chance("b").random()
    first = chance("a").random()
    monkeypatch.setattr(Seed, "value", 6)
    assert chance("a").random() != first


HANGS = """
def attention(q, k, v, *, causal, scale):
    while q.shape[2] == 129:
        pass
    return q.clone()
"""


def test_a_kernel_that_hangs(pytester):
    """It fails that test, and the others are run."""
    for name in ("conftest.py", "pyproject.toml", "tests/test_impls.py"):
        shutil.copy(ROOT / name, pytester.path)
    pytester.makepyfile(hangs=HANGS)
    chosen = ("-k", "test_cases and (q129 or q64)", "-o", "timeout=3", "test_impls.py")
    result = pytester.runpytest_subprocess(
        "--impl", "hangs.py", "--hypothesis-seed=5", *chosen, timeout=100
    )
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(
        [
            "*hangs does not conform: test_cases; of 1 clauses, 2 examples, seed 5",
            "FAILED test_impls.py::test_cases*q129*: T*",
        ]
    )
