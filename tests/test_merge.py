"""Merging attention over two sets of keys gives attention over both."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashattn.kernels.portable import merge
from flashattn.parallel.exchange import copy_rows
from flashattn.parallel.keys import TILED, Kernels

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def parts(device, dtype, batch, heads, rows, head_dim):
    """Return o and lse of two parts, as views of larger tensors; some rows are fully masked."""
    generator = torch.Generator().manual_seed(rows)
    found = []
    for part in range(2):
        o = torch.randn(batch, heads + 1, rows + 2, head_dim, generator=generator)
        lse = 4 * torch.randn(batch, heads + 1, rows + 2, generator=generator)
        lse[..., part :: 3 + part] = -torch.inf
        o[lse == -torch.inf] = 0
        found += [o.to(device, dtype)[:, 1:, 1:-1], lse.to(device)[:, 1:, 1:-1]]
    return found


@given(
    dtype=st.sampled_from(DTYPES),
    sizes=st.tuples(*(st.integers(1, most) for most in (2, 3, 70, 72))),
)
def test_merged_is_the_whole(device, dtype, sizes):
    """Parts are weighted by the softmax over both, and nothing around the rows is written."""
    o, lse, o_more, lse_more = parts(device, dtype, *sizes)
    whole = torch.logaddexp(lse.double(), lse_more.double())
    finite = whole.masked_fill(whole == -torch.inf, 0)
    weights = [(x.double() - finite).exp()[..., None] for x in (lse, lse_more)]
    expected = weights[0] * o.double() + weights[1] * o_more.double()
    outside = o._base.clone()
    merge.launch(o, lse, o_more, lse_more)
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(o.double(), expected, rtol=unit, atol=1e-6)
    torch.testing.assert_close(lse.double(), whole, rtol=1e-6, atol=1e-5)
    inside = torch.zeros_like(outside, dtype=torch.bool)
    inside[:, 1:, 1:-1] = True
    assert torch.equal(o._base[~inside], outside[~inside])


def test_unseen_rows_stay_to_the_bit(device):
    """A row that sees none of the added keys keeps its bits, whatever the added part holds."""
    o, lse, o_more, lse_more = parts(device, torch.bfloat16, 1, 2, 40, 16)
    hidden = lse_more == -torch.inf
    o_more[hidden] = torch.nan
    before = o.clone(), lse.clone()
    merge.launch(o, lse, o_more, lse_more)
    assert torch.equal(o[hidden], before[0][hidden])
    assert torch.equal(lse[hidden], before[1][hidden])
    assert not o.isnan().any()


def test_nan_is_kept(device):
    """A row with a NaN in its part is NaN, and no other row is."""
    o, lse, o_more, lse_more = parts(device, torch.float32, 1, 1, 8, 16)
    o_more[0, 0, 5], lse_more[0, 0, 5] = torch.nan, torch.nan
    merge.launch(o, lse, o_more, lse_more)
    assert o.isnan().any(-1)[0, 0].tolist() == [row == 5 for row in range(8)]
    assert lse.isnan()[0, 0].tolist() == [row == 5 for row in range(8)]


@given(sizes=st.tuples(*(st.integers(1, most) for most in (2, 3, 20, 40))))
def test_merges_as_pytorch_does(device, sizes):
    """The kernel and the PyTorch code of ``tiled`` agree."""
    ours, theirs = ([x.clone() for x in parts(device, torch.float32, *sizes)] for _ in range(2))
    merge.launch(*ours)
    Kernels(TILED, 1.0, None, "auto", deterministic=True).merge(*theirs[:2], tuple(theirs[2:]))
    torch.testing.assert_close(ours[:2], theirs[:2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("columns", [1, 3, 4, 64])
@pytest.mark.parametrize("offset", [0, 1, 4])
def test_copied_rows_are_equal(device, dtype, columns, offset):
    """Copied rows are equal, in words or one by one, and nothing beside them is written."""
    y = torch.arange(5.0 * 3 * 72, device=device).to(dtype).view(5, 3, 72).transpose(0, 1)
    y = y[..., offset : offset + columns]
    x = torch.full((3, 5, 80), -1.0, device=device, dtype=dtype)
    copy_rows(x[..., offset : offset + columns], y)
    assert torch.equal(x[..., offset : offset + columns], y)
    assert (x[..., :offset] == -1).all()
    assert (x[..., offset + columns :] == -1).all()
