"""A teaching example: a row-wise weighted sum as a Triton kernel in an autograd function.

It has the parts of the attention kernels in their smallest form: a forward tiled over rows and over
the reduced dimension, and a backward with an elementwise gradient and one reduced over all rows.
"""

from __future__ import annotations

from typing import Any

import torch


class WeightedSum(torch.autograd.Function):
    """``apply(x, w)`` without the checks of ``weighted_sum``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:  # noqa: D102
        from flashattn.kernels import weighted_sum as kernels  # noqa: PLC0415 - imports Triton

        rows, w = x.reshape(-1, x.shape[-1]).contiguous(), w.contiguous()
        ctx.save_for_backward(rows, w)
        ctx.shape = x.shape
        return kernels.forward(rows, w).view(x.shape[:-1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: D102
        from flashattn.kernels import weighted_sum as kernels  # noqa: PLC0415

        x, w = ctx.saved_tensors
        grad_x, grad_w = kernels.backward(x, w, grad_y.contiguous().view(-1))
        return grad_x.view(ctx.shape), grad_w


def weighted_sum(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Compute y[...] = sum over d of x[..., d] * w[d] in fp32.

    Args:
        x: [..., D] with D at least 1, fp32, fp16 or bf16, on a GPU, or on a CPU under
            TRITON_INTERPRET=1.
        w: [D], same dtype and device as x.

    Returns:
        y [...], in the dtype of x, once differentiable in x and w.

    Raises:
        ValueError: x or w has a wrong shape, dtype or device.
    """
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"x: wanted fp32, fp16 or bf16, got {x.dtype}")
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"x: wanted [..., D] with D at least 1, got shape {list(x.shape)}")
    for what, got, wanted in (
        ("shape", list(w.shape), [x.shape[-1]]),
        ("dtype", w.dtype, x.dtype),
        ("device", w.device, x.device),
    ):
        if got != wanted:
            raise ValueError(f"w: wanted {what} {wanted}, got {got}")
    return WeightedSum.apply(x, w)
