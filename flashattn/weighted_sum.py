"""The teaching operation: a row-wise weighted sum as a Triton kernel inside an autograd function.

The smallest thing that has all the parts of the attention kernels: a forward tiled over rows and
over the summed dimension, a backward that writes one gradient per element and one that is a sum
over all rows, and a ``torch.autograd.Function`` around them.
"""

from __future__ import annotations

from typing import Any

import torch


class WeightedSum(torch.autograd.Function):
    """``apply(x, w)``: see ``weighted_sum``, which checks what this takes for granted."""

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
    """Compute y[..., i] = sum over d of x[..., i, d] * w[d], summed in fp32.

    Args:
        x: [..., D], D at least 1, fp32, fp16 or bf16, on a GPU, or on a CPU under
            TRITON_INTERPRET=1.
        w: [D], of x's dtype and device.

    Returns:
        y [...], in x's dtype, differentiable once in x and w.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        msg = f"x: wanted fp32, fp16 or bf16, got {x.dtype}"
        raise ValueError(msg)
    if x.ndim == 0 or x.shape[-1] == 0:
        msg = f"x: wanted [..., D] with D at least 1, got shape {list(x.shape)}"
        raise ValueError(msg)
    for what, got, wanted in (
        ("shape", list(w.shape), [x.shape[-1]]),
        ("dtype", w.dtype, x.dtype),
        ("device", w.device, x.device),
    ):
        if got != wanted:
            msg = f"w: wanted {what} {wanted}, got {got}"
            raise ValueError(msg)
    return WeightedSum.apply(x, w)
