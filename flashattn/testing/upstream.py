"""What PyTorch gets wrong on some machines, found by trying: it is not to be held against us."""

from __future__ import annotations

from collections.abc import Callable

import torch

INNER = (29, 38, 40, 47)  # dimensions of products, some of which mix rows on each CPU that does


def products_mix_rows(
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.matmul,
) -> bool:
    """Return whether NaN in a row of a bf16 product shows in the row before, on this CPU.

    On CPUs with AMX, with few threads, oneDNN reads on into the next row where the inner dimension
    is no multiple of 32, or on others no multiple of 4, and multiplies what it finds by zero (its
    issue 5717). So o has a row of NaN more than it should have, if P has one.
    ``torch.backends.mkldnn.enabled = False`` helps.
    """

    def mixes(inner: int) -> bool:
        left = torch.ones(2, 40, inner, dtype=torch.bfloat16)
        left[:, 13:] = torch.nan
        right = torch.ones(2, inner, 64, dtype=torch.bfloat16)
        return bool(product(left, right)[:, :13].isnan().any())

    return any(map(mixes, INNER))
