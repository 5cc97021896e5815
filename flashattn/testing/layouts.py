"""Memory layouts of inputs and gradients, by name: different strides, with poison in the gaps."""

from __future__ import annotations

from collections.abc import Callable

import torch

from flashattn.testing.poison import poisoned


def _embedded(x: torch.Tensor) -> torch.Tensor:
    batch, heads, rows, d = x.shape
    buffer = poisoned(x, (batch + 2, heads + 2, rows + 80, d + 16))
    return buffer[1:-1, 1:-1, 40:-40, 8:-8].copy_(x)


def _sliced(x: torch.Tensor) -> torch.Tensor:
    longer = poisoned(x, (*x.shape[:2], 2 * x.shape[2], x.shape[3]))
    return longer[..., 1::2, :].copy_(x)


def _pitched(x: torch.Tensor) -> torch.Tensor:
    pitch = -(-x.shape[3] // 16) * 16 + 16
    return poisoned(x, (*x.shape[:3], pitch))[..., : x.shape[3]].copy_(x)


def shifted(x: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy that begins one element past an aligned address."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def scattered(x: torch.Tensor) -> torch.Tensor:
    """Return a copy whose columns are dense, and whose rows are not."""
    return x.mT.contiguous().mT


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    # [B, T, H, D] in memory, as a projection writes it.
    "sequence_first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    # Every third row of a larger buffer, as a fused qkv projection writes it.
    "packed": lambda x: poisoned(x, (*x.shape[:3], 3, x.shape[3]))[..., 1, :].copy_(x),
    # A window of a buffer that is larger in every dimension.
    "embedded": _embedded,
    # Every other row of a longer sequence, from the second row on.
    "sliced": _sliced,
    # One element past an aligned address, row stride D + 1: not TMA-compatible.
    "misaligned": lambda x: poisoned(x, (*x.shape[:3], x.shape[3] + 1))[..., 1:].copy_(x),
    # Rows start at multiples of 32 bytes or more, whatever their length.
    "pitched": _pitched,
    # Head dimension with stride 2: not dense.
    "strided": lambda x: poisoned(x, (*x.shape, 2))[..., 0].copy_(x),
    # All heads, or batches, read the first one through stride 0 (this changes the values).
    "expanded": lambda x: x[:, :1].expand_as(x) if x.shape[1] else x,
    "expanded_batch": lambda x: x[:1].expand_as(x) if x.shape[0] else x,
}
# The gradient of a sum over some or all dimensions is expanded: one element is read repeatedly.
GRAD_LAYOUTS = LAYOUTS | {
    "expanded_rows": lambda x: x[:, :, :1].expand_as(x) if x.shape[2] else x,
    "expanded_columns": lambda x: x[..., :1].expand_as(x),
    "one_number": lambda x: x[:1, :1, :1, :1].expand_as(x) if x.numel() else x,
}
