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
def test_both_passes_and_the_saved_lse(function, is_causal, device):
    """O and gradients are attention's; one saved tensor is (batch, N_q): the logsumexp."""
    qkv, grad_o = inputs(device)
    o, how = function.apply(*qkv, is_causal), {"mask": Mask.of(is_causal), "scale": D**-0.5}
    wanted, lse = (x[:, 0] for x in reference_attention(*(x[:, None] for x in qkv), **how))
    torch.testing.assert_close(o, wanted)
    (saved,) = (x for x in o.grad_fn.saved_tensors if x.shape == (BATCH, N_Q))
    torch.testing.assert_close(saved, lse)
    got, exact = (torch.autograd.grad(x, qkv, grad_o) for x in (o, wanted))
    torch.testing.assert_close(got, exact)


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
