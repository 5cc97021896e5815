"""Tensor specs, which plans are made from, agree with PyTorch."""

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from flashattn.plan.spec import TensorSpec, rewrite
from flashattn.testing.layouts import LAYOUTS, shifted

SIZES = st.lists(st.integers(1, 3), min_size=4, max_size=4)


@hypothesis.settings(max_examples=200)
@hypothesis.given(
    sizes=SIZES,
    order=st.permutations(range(4)),
    steps=st.lists(st.sampled_from((1, 1, 1, 2)), min_size=4, max_size=4),
    expanded=st.sets(st.integers(0, 3), max_size=1),
)
def test_like_is_empty_like(sizes, order, steps, expanded):
    """``like`` is ``empty_like``: in any order of dimensions, with gaps, and expanded."""
    x = torch.empty([n * step for n, step in zip(sizes, steps, strict=True)])
    x = x[tuple(slice(None, None, step) for step in steps)].permute(*order)
    for dim in expanded:
        x = x.narrow(dim, 0, 1).expand(*(3 if i == dim else n for i, n in enumerate(x.shape)))
    like = torch.empty_like(x)
    assert TensorSpec.of(x).like().strides == like.stride()
    assert TensorSpec.of(x).like().shape == like.shape


@hypothesis.settings(max_examples=200)
@hypothesis.given(
    sizes=st.lists(st.integers(0, 3), min_size=3, max_size=4),
    step=st.sampled_from((1, 1, 2)),
    order=st.randoms(use_true_random=False),
)
def test_contiguous_is_of_pytorch(sizes, step, order):
    """``contiguous`` is PyTorch's: in any order of dimensions, with gaps, expanded, empty."""
    x = torch.empty([*sizes[:-1], sizes[-1] * step])[..., ::step]
    expanded = x[:1].expand(3 if sizes[0] else 0, *x.shape[1:])
    for each in (x, x.permute(order.sample(range(x.ndim), x.ndim)), expanded):
        assert TensorSpec.of(each).contiguous == each.is_contiguous()


@pytest.mark.parametrize("layout", [*LAYOUTS, "one off"])
@pytest.mark.parametrize("like_rows", [True, False])
def test_what_is_rewritten_is_aligned(layout, like_rows):
    """A copy keeps the values, has its spec's layout, and suits TMA; row statistics are dense."""
    x = LAYOUTS.get(layout, shifted)(torch.randn(2, 3, 5, 72, dtype=torch.float16))
    x = x if like_rows else x[..., 0]
    copy, spec = rewrite(x), TensorSpec.of(x).rewritten()
    assert torch.equal(copy, x)
    assert TensorSpec.of(copy) == spec
    assert spec.tma_compatible if like_rows else spec.contiguous
    if like_rows and x.stride(-1) == 1:
        assert spec.strides == torch.empty_like(x).stride()
