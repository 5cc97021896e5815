"""Claims: flags, reasons for what is not claimed, and problems that fit."""

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from flashattn.claims import Claims
from flashattn.problem import Problem
from flashattn.testing.strategies import problems

MORE = ("windows", "intervals", "softcap", "alibi", "bias", "sink", "narrow_values")
CLAIMED = Claims(**dict.fromkeys(MORE, True))
CPU = torch.device("cpu")
FLAGS = (
    "bottom_right",
    "windows",
    "intervals",
    "softcap",
    "alibi",
    "bias",
    "sink",
    "narrow_values",
    "grouped",
    "empty",
    "fully_masked_rows",
)


@pytest.mark.parametrize("scale", [None, 2.0**-64, 2.0**-65, 0.0, -1.0])
def test_scales(scale):
    """Without ``any_scale`` a scale must be at least 2^-64."""
    assert Claims().takes_scale(scale)
    assert Claims(any_scale=False).takes_scale(scale) == (scale in (None, 2.0**-64))


@pytest.mark.parametrize(
    ("claims", "problem", "words"),
    [
        ({"bottom_right": False}, {"causal": "bottom_right"}, "claims no bottom-right mask"),
        ({"windows": False}, {"window": (3, 0)}, "takes no sliding windows"),
        ({"intervals": False}, {"documents": ((3, 3),)}, "takes no documents and no mask but"),
        ({"intervals": False}, {"prefix": 3}, "takes no documents and no mask but a window"),
        ({"softcap": False}, {"softcap": 2.0}, "takes no softcap"),
        ({"alibi": False}, {"alibi": True}, "takes no ALiBi"),
        ({"bias": False}, {"bias": "1hts"}, "takes no bias"),
        ({"sink": False}, {"sink": True}, "takes no sink, and returns no logsumexp"),
        ({"grouped": False}, {"heads": 4, "kv_heads": 2}, "claims no grouped heads"),
        ({"empty": False}, {"batch": 0}, "claims no empty problems"),
        ({"empty": False}, {"seq_q": 0, "seq_kv": 8}, "claims no empty problems"),
        (
            {"fully_masked_rows": False},
            {"seq_q": 8, "seq_kv": 4, "causal": "bottom_right"},
            "claims nothing for queries that see no key",
        ),
        ({}, {"value_dim": 8}, "takes no values narrower than keys"),
        ({"dtypes": ("float16",)}, {"dtype": "float32"}, "takes dtypes float16"),
        ({"head_dims": (64, 128)}, {"head_dim": 80}, "takes head dimensions 64, 128"),
        ({"head_dims": range(8, 257, 8)}, {"head_dim": 1}, r"takes head dimensions range\(8"),
        ({"devices": ("cuda",)}, {}, "runs on cuda"),
    ],
)
def test_sentences(claims, problem, words):
    """A problem that needs what is not claimed gets a reason; a claimed one gets none."""
    with pytest.raises(AssertionError, match=words):
        assert not Claims(**claims).unclaimed(Problem(**problem), CPU)
    assert CLAIMED.unclaimed(Problem(**problem), CPU) is None


@hypothesis.given(
    problem=problems(
        packed=(False, True),
        prefixed=(False, True),
        sloped=(False, True),
        biases=("", "1hts"),
        sunk=(False, True),
        narrowed=(False, True),
    ),
    flags=st.fixed_dictionaries({name: st.booleans() for name in FLAGS}),
    dtypes=st.sampled_from((None, ("float16", "bfloat16"))),
    head_dims=st.sampled_from((None, (64, 128), range(8, 17, 8))),
)
def test_a_fitted_problem_is_claimed(problem, flags, dtypes, head_dims):
    """``fit`` turns any problem into a claimed one, and keeps one that is claimed already."""
    claims = Claims(**flags, dtypes=dtypes, head_dims=head_dims)
    fitted = claims.fit(problem)
    assert claims.unclaimed(fitted, CPU) is None
    if claims.unclaimed(problem, CPU) is None:
        assert fitted == problem
