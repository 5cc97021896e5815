"""Values: each maker does what its name says, in every dtype."""

from contextlib import nullcontext
from random import Random

import hypothesis
import pytest
import torch

from flashattn.problem import Problem
from flashattn.testing.inputs import make_inputs
from flashattn.testing.strategies import samples
from flashattn.testing.values import VALUES

DTYPES = ["float16", "bfloat16", "float32"]


def scores(name, dtype="float32", scale=None):
    """Return a causal problem's scores for some values [B, H, T, S], exactly."""
    problem = Problem(heads=2, seq_q=70, head_dim=16, causal=True, dtype=dtype)
    q, k, _ = make_inputs(problem, values=name)
    exact = q.double() @ k.double().mT * (scale or 0.25)
    return exact.masked_fill(~torch.ones(70, 70, dtype=torch.bool).tril(), -torch.inf)


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_do_what_they_say(dtype):
    """Scores are large, far below zero, rising, tied, uniform or of one key, as the names say."""
    assert scores("extreme", dtype).nan_to_num(neginf=0).abs().max() > 100
    assert scores("negative", dtype).logsumexp(-1).max() < -88.7
    rising = scores("rising", dtype).nan_to_num(neginf=-1e9)[:, :, -1]
    assert (rising[..., 64:].amax(-1) > rising[..., :64].amax(-1)).all()
    ties = scores("ties", dtype)[:, :, -1]
    assert len(ties.unique()) <= 17
    for name in ("zeros", "denormal"):
        assert (scores(name, dtype)[:, :, -1].softmax(-1) - 1 / 70).abs().max() < 1e-6
    assert (scores("one_hot", dtype, scale=1.0).logsumexp(-1) == 0).all()


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_finite(name, dtype):
    """Every maker gives finite values in every dtype, at any shape."""
    for sizes in ({"seq_q": 70, "head_dim": 128}, {"seq_q": 3, "seq_kv": 1, "head_dim": 1}):
        problem = Problem(heads=2, **sizes, dtype=dtype)
        assert all(x.isfinite().all() for x in make_inputs(problem, values=name))
    for sizes in ({"seq_q": 0}, {"seq_kv": 0}, {"batch": 0}):
        make_inputs(Problem(**sizes, dtype=dtype), values=name)


@pytest.mark.parametrize(
    ("asked", "grad", "huge"),
    [
        ({"biases": ("bhts",)}, True, True),
        ({"biases": ("b11s",)}, True, False),
        ({"biases": ("bhr",)}, True, False),
        ({"sunk": (True,)}, True, False),
        ({"sunk": (True,)}, False, True),
    ],
)
def test_sums_over_rows_stay_in_fp16(asked, grad, huge):
    """Samples of fp16 have huge values unless a gradient of a bias or sink sums their rows."""
    drawn = samples("cpu", bool, asked={"dtypes": ("float16",), **asked}, grad=grad)
    with nullcontext() if huge else pytest.raises(hypothesis.errors.NoSuchExample):
        how = {"settings": hypothesis.settings(max_examples=300, database=None)}
        hypothesis.find(drawn, lambda x: x.values == "huge_v", **how, random=Random(0))  # noqa: S311
