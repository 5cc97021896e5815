"""flash-attn's bert_padding: unpadding packs the tokens, and padding puts them back."""

import torch

from flashattn.integrations.bert_padding import (
    index_first_axis,
    index_put_first_axis,
    pad_input,
    unpad_input,
)

SHOWN = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 1], [0, 0, 0, 0]])
UNUSED = torch.tensor([[0, 0, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0]])


def test_there_and_back(device):
    """Unpadding takes the mask's tokens in order; padding gives 0 elsewhere, also gradients."""
    shown = SHOWN.to(device)
    x = torch.randn(3, 4, 2, 5, device=device, requires_grad=True)
    tokens, indices, cu_seqlens, longest, used = unpad_input(x, shown)
    assert torch.equal(tokens, x[shown.bool()])
    assert indices.tolist() == [0, 1, 5, 6, 7]
    assert (cu_seqlens.tolist(), cu_seqlens.dtype) == ([0, 2, 5, 5], torch.int32)
    assert (longest, used.tolist()) == (3, [2, 3, 0])
    back = pad_input(tokens, indices, 3, 4)
    wanted = x * shown[..., None, None]
    assert torch.equal(back, wanted)
    grad = torch.randn_like(back)
    got, exact = (torch.autograd.grad(y, x, grad)[0] for y in (back, wanted))
    assert torch.equal(got, exact)


def test_tokens_that_are_not_used(device):
    """Unused tokens are kept and count in the lengths, but not among those used."""
    shown, unused = SHOWN.to(device), UNUSED.to(device)
    x = torch.arange(12.0, device=device).view(3, 4, 1)
    tokens, indices, cu_seqlens, longest, used = unpad_input(x, shown, unused)
    assert tokens.flatten().tolist() == indices.tolist() == [0, 1, 2, 5, 6, 7, 8]
    assert cu_seqlens.tolist() == [0, 3, 6, 7]
    assert (longest, used.tolist()) == (3, [2, 3, 0])


def test_rows(device):
    """Only the first dimension is indexed."""
    x, rows = torch.arange(6.0, device=device).view(3, 2), torch.tensor([2, 0], device=device)
    assert index_first_axis(x, rows).tolist() == [[4, 5], [0, 1]]
    for indices in (rows, rows.int()):
        put = index_put_first_axis(x[:2], indices, 4)
        assert put.tolist() == [[2, 3], [0, 0], [0, 1], [0, 0]]
