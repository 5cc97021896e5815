"""Run PyTorch's scaled_dot_product_attention on our kernels: both passes, eager and compiled."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

from flashattn.integrations import sdpa


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Call attention as the layer of a model does; nothing here names flashattn."""
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def main() -> None:
    """Run both passes on PyTorch's kernels and on ours; print how far apart the results are."""
    torch.manual_seed(0)
    inputs = [torch.randn(1, 2, 64, 32, device=DEVICE, requires_grad=True) for _ in range(3)]

    def both_passes(function: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        o = function(*inputs)
        return [o, *torch.autograd.grad(o.sum(), inputs)]

    wanted = both_passes(attend)
    with sdpa.enabled(DEVICE):
        for name, function in {"eager": attend, "compiled": torch.compile(attend)}.items():
            got = both_passes(function)
            apart = max((x - y).abs().max().item() for x, y in zip(got, wanted, strict=True))
            print(f"{name}: o and gradients differ from PyTorch's by at most {apart:.1e}")


if __name__ == "__main__":
    main()
