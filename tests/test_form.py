"""The form of results, and seeded random numbers."""

import pytest
import torch

from flashattn.testing.form import FormError, check_form
from flashattn.testing.seed import Seed, chance


def wrong_results(q):
    """Return malformed results by the message about them."""
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
    """A malformed result is refused with a message, and a good one passes."""
    q, k, v = (torch.ones(1, 2, 3, 4, dtype=torch.bfloat16) for _ in range(3))
    with pytest.raises(FormError, match=words):
        check_form((q, k, v), wrong_results(q)[words])
    check_form((q, k, v), {"o": q.clone(), "lse": q[..., 0].float(), "dk": k.mT.clone().mT})


def test_a_result_has_a_gradient():
    """A result must have a gradient if one is asked for."""
    q = torch.ones(1, 2, 3, 4)
    with pytest.raises(FormError, match="o: has no gradient"):
        check_form((q, q, q), {"o": q.clone()}, grad=True)


def test_chance_is_the_seeds(monkeypatch):
    """The same seed and name draw the same numbers; another seed or name draws others."""
    monkeypatch.setattr(Seed, "value", 5)
    assert chance("a").random() == chance("a").random() != chance("b").random()
    first = chance("a").random()
    monkeypatch.setattr(Seed, "value", 6)
    assert chance("a").random() != first
