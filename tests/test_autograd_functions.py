"""FlashAttentionPyTorch and FlashAttentionTriton: apply(Q, K, V, is_causal) on (batch, N, d)."""

import pytest
import torch

from flashattn import FlashAttentionPyTorch, FlashAttentionTriton
from flashattn.mask import Mask
from flashattn.reference import reference_attention

BOTH = pytest.mark.parametrize("function", [FlashAttentionPyTorch, FlashAttentionTriton])
BATCH, N_Q, N_K, D = 4, 96, 64, 32


def inputs(device):
    """Return Q, K, V and a gradient of O."""
    generator = torch.Generator(device).manual_seed(0)
    shapes = [(BATCH, N_Q, D), (BATCH, N_K, D), (BATCH, N_K, D), (BATCH, N_Q, D)]
    tensors = [torch.randn(shape, generator=generator, device=device) for shape in shapes]
    return [x.requires_grad_() for x in tensors[:3]], tensors[3]


@BOTH
@pytest.mark.parametrize("is_causal", [False, True])
def test_forward_and_saved_lse(function, is_causal, device):
    """O is attention, and exactly one saved tensor has shape (batch, N_q): the logsumexp."""
    (q, k, v), _ = inputs(device)
    o = function.apply(q, k, v, is_causal)
    mask = Mask.of(is_causal)
    wanted, wanted_lse = (
        x[:, 0]
        for x in reference_attention(q[:, None], k[:, None], v[:, None], mask=mask, scale=D**-0.5)
    )
    torch.testing.assert_close(o, wanted)
    saved = [x for x in o.grad_fn.saved_tensors if x.shape == (BATCH, N_Q)]
    assert len(saved) == 1
    torch.testing.assert_close(saved[0], wanted_lse)


@BOTH
@pytest.mark.parametrize("is_causal", [False, True])
def test_backward(function, is_causal, device):
    """The gradients are those of the reference, and is_causal gets none."""
    (q, k, v), grad_o = inputs(device)
    got = torch.autograd.grad(function.apply(q, k, v, is_causal), (q, k, v), grad_o)
    mask = Mask.of(is_causal)
    o, _ = reference_attention(q[:, None], k[:, None], v[:, None], mask=mask, scale=D**-0.5)
    wanted = torch.autograd.grad(o[:, 0], (q, k, v), grad_o)
    torch.testing.assert_close(got, wanted)


@BOTH
def test_is_not_causal_by_default(function, device):
    """``is_causal`` is False by default."""
    (q, k, v), _ = inputs(device)
    assert torch.equal(function.apply(q, k, v), function.apply(q, k, v, False))
    assert not torch.equal(function.apply(q, k, v), function.apply(q, k, v, True))


@BOTH
def test_bad_input(function, device):
    """Tensors that do not fit are refused by name."""
    (q, k, v), _ = inputs(device)
    with pytest.raises(ValueError, match=r"v: wanted shape \[4, 64, 32\], got \[4, 63, 32\]"):
        function.apply(q, k, v[:, 1:])
    with pytest.raises(ValueError, match="k: wanted q's dtype"):
        function.apply(q, k.half(), v)


@BOTH
def test_second_derivative(function, device):
    """A second derivative is an error that names the reference, not a zero."""
    (q, k, v), _ = inputs(device)
    (dq,) = torch.autograd.grad(function.apply(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match='impl="reference"'):
        dq.sum().backward()
