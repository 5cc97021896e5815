"""weighted_sum: the teaching kernel."""

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from flashattn import weighted_sum

EPS = torch.finfo(torch.float32).eps


def assert_within(got, exact, bound):
    """Check fp32 results against a bound on their rounding."""
    assert got.dtype == torch.float32
    assert ((got.double() - exact).abs() <= bound).all()


@hypothesis.given(
    shape=st.lists(st.integers(0, 5), max_size=3),
    cols=st.integers(1, 150),
    seed=st.integers(0, 2**31),
)
def test_weighted_sum(device, shape, cols, seed):
    """Values and gradients are those of x @ w, within n * eps of the sum of magnitudes (Higham)."""
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn((*shape, cols), generator=generator, device=device, requires_grad=True)
    w = torch.randn(cols, generator=generator, device=device, requires_grad=True)
    grad = torch.randn(shape, generator=generator, device=device)
    y = weighted_sum(x, w)
    dx, dw = torch.autograd.grad(y, (x, w), grad)
    x, w, grad = x.detach().double(), w.detach().double(), grad.double()
    assert_within(y, (x * w).sum(-1), cols * EPS * (x * w).abs().sum(-1))
    assert_within(dx, grad[..., None] * w, EPS * (grad[..., None] * w).abs())
    terms = (x * grad[..., None]).reshape(-1, cols)
    assert_within(dw, terms.sum(0), len(terms) * EPS * terms.abs().sum(0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_in_fp32(device, dtype):
    """Half-precision inputs are summed in fp32: 4096 ones give 4096, which bf16 cannot count to."""
    x = torch.ones(3, 4096, device=device, dtype=dtype)
    assert weighted_sum(x, x[0]).tolist() == [4096.0] * 3


@pytest.mark.parametrize(
    "change", [lambda x: x.T, lambda x: x[:, ::2], lambda x: x[:1].expand(4, -1)]
)
def test_strides(device, change):
    """Transposed, strided and expanded inputs are taken as they are."""
    x = change(torch.randn(6, 6, device=device))
    w = torch.randn(x.shape[-1], device=device)
    torch.testing.assert_close(weighted_sum(x, w), x @ w)


@pytest.mark.parametrize(
    ("x", "w", "words"),
    [
        (torch.ones(2, 3), torch.ones(2), r"w: wanted shape \[3\], got \[2\]"),
        (torch.ones(2, 3), torch.ones(3).half(), "w: wanted dtype"),
        (torch.ones(2, 3), torch.ones(3, device="meta"), "w: wanted device"),
        (torch.ones(2, 3).double(), torch.ones(3).double(), "x: wanted fp32, fp16 or bf16"),
        (torch.ones(2, 0), torch.ones(0), r"x: wanted \[..., D\] with D at least 1"),
    ],
)
def test_bad_input(x, w, words):
    """Arguments that do not fit are refused by name."""
    with pytest.raises(ValueError, match=words):
        weighted_sum(x, w)
