"""Layouts of inputs and gradients, by name: same values, other strides, poison in the gaps."""

from __future__ import annotations

from collections.abc import Callable

import torch

from flashattn.testing.poison import poisoned


def _sequence_first(x: torch.Tensor) -> torch.Tensor:
    """[B, T, H, D] in memory: how a projection leaves it."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _packed(x: torch.Tensor) -> torch.Tensor:
    """Every third row of a larger buffer: how a fused qkv projection leaves it."""
    view = poisoned(x, (*x.shape[:3], 3, x.shape[3]))[..., 1, :]
    return view.copy_(x)


def _embedded(x: torch.Tensor) -> torch.Tensor:
    """A window of a larger buffer, which goes on in every direction."""
    batch, heads, rows, d = x.shape
    buffer = poisoned(x, (batch + 2, heads + 2, rows + 80, d + 16))
    return buffer[1:-1, 1:-1, 40:-40, 8:-8].copy_(x)


def _sliced(x: torch.Tensor) -> torch.Tensor:
    """Every other row, from the second on, of a longer sequence."""
    view = poisoned(x, (*x.shape[:2], 2 * x.shape[2], x.shape[3]))[..., 1::2, :]
    return view.copy_(x)


def _misaligned(x: torch.Tensor) -> torch.Tensor:
    """One element past an aligned address, rows of odd length: no descriptor can address it."""
    return poisoned(x, (*x.shape[:3], x.shape[3] + 1))[..., 1:].copy_(x)


def _pitched(x: torch.Tensor) -> torch.Tensor:
    """Rows that begin at multiples of 32 bytes or more, whatever their length."""
    pitch = -(-x.shape[3] // 16) * 16 + 16
    return poisoned(x, (*x.shape[:3], pitch))[..., : x.shape[3]].copy_(x)


def _strided(x: torch.Tensor) -> torch.Tensor:
    """The head dimension with stride 2: not dense."""
    return poisoned(x, (*x.shape, 2))[..., 0].copy_(x)


def _expanded(x: torch.Tensor) -> torch.Tensor:
    """One head read by all of them through stride 0 (changes the values)."""
    return x[:, :1].expand_as(x) if x.shape[1] else x


def _expanded_batch(x: torch.Tensor) -> torch.Tensor:
    """One batch read as all of them through stride 0 (changes the values)."""
    return x[:1].expand_as(x) if x.shape[0] else x


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "sequence_first": _sequence_first,
    "packed": _packed,
    "embedded": _embedded,
    "sliced": _sliced,
    "misaligned": _misaligned,
    "pitched": _pitched,
    "strided": _strided,
    "expanded": _expanded,
    "expanded_batch": _expanded_batch,
}
# The gradient of a sum over some dimensions, or all, is one number that is read again and again.
GRAD_LAYOUTS = LAYOUTS | {
    "expanded_rows": lambda x: x[:, :, :1].expand_as(x) if x.shape[2] else x,
    "expanded_columns": lambda x: x[..., :1].expand_as(x),
    "one_number": lambda x: x[:1, :1, :1, :1].expand_as(x) if x.numel() else x,
}
