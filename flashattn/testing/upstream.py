"""Bugs of PyTorch on some machines, found by trying, so that tests can work around them."""

from __future__ import annotations

from collections.abc import Callable

import torch

INNER = (29, 38, 40, 47)  # inner dimensions; on every affected CPU, some of them mix rows


def products_mix_rows(
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.matmul,
) -> bool:
    """Return whether NaN in one row of a bf16 product shows in the row before, on this CPU.

    On CPUs with AMX, with few threads, oneDNN reads on into the next row if the inner dimension is
    not a multiple of 32, or on others not a multiple of 4, and multiplies what it reads by zero
    (oneDNN issue 5717). So if P has a row of NaN, o has one more than it should.
    ``torch.backends.mkldnn.enabled = False`` avoids this.
    """

    def mixes(inner: int) -> bool:
        left = torch.ones(2, 40, inner, dtype=torch.bfloat16)
        left[:, 13:] = torch.nan
        right = torch.ones(2, inner, 64, dtype=torch.bfloat16)
        return bool(product(left, right)[:, :13].isnan().any())

    return any(map(mixes, INNER))
