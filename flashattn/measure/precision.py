"""Effects of low precision: stagnating sums, dtypes under autocast, and LayerNorm in 16 bits."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the conventional name

CASTS = ("none", "implicit", "explicit")
POINTS = 100  # points of a curve


def partial_sums(
    value: float, count: int, *, accumulator: torch.dtype, addend: torch.dtype, cast: str = "none"
) -> list[tuple[int, float]]:
    """Add ``value``, rounded once to the dtype ``addend``, to an accumulator ``count`` times.

    The ``cast`` "explicit" casts the addend to the accumulator's dtype beforehand; "implicit"
    leaves the cast to the addition; "none" is for equal dtypes.

    Returns:
        About ``POINTS`` pairs (number of additions, sum); the last is the result.

    Raises:
        ValueError: ``cast`` is unknown, or "none" with two dtypes.
    """
    if cast not in CASTS or (cast == "none" and accumulator != addend):
        raise ValueError(f"cast: wanted implicit or explicit for two dtypes, got {cast!r}")
    total, x = torch.tensor(0.0, dtype=accumulator), torch.tensor(value, dtype=addend)
    if cast == "explicit":
        x = x.to(accumulator)
    every, curve = max(1, count // POINTS), []
    for n in range(1, count + 1):
        total += x
        if n % every == 0 or n == count:
            curve.append((n, total.item()))
    return curve


class Toy(nn.Module):
    """Two linear layers around a LayerNorm."""

    def __init__(self) -> None:
        """Make the layers."""
        super().__init__()
        self.first = nn.Linear(32, 64, bias=False)
        self.norm = nn.LayerNorm(64)
        self.second = nn.Linear(64, 10, bias=False)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Map x [B, 32] to logits [B, 10]; return every intermediate tensor."""
        first = self.first(x)
        norm = self.norm(F.relu(first))
        return {"first linear": first, "LayerNorm": norm, "logits": self.second(norm)}


def autocast_dtypes(dtype: torch.dtype, device: torch.device | str) -> dict[str, str]:
    """Return the dtype of each tensor in a training step of a toy model under autocast.

    Autocast casts different operators on CPU and CUDA.
    """
    device = torch.device(device)
    model = Toy().to(device)
    x, labels = torch.randn(8, 32, device=device), torch.arange(8, device=device)
    with torch.autocast(device.type, dtype=dtype):
        tensors = model(x)
        loss = F.cross_entropy(tensors["logits"], labels)
    loss.backward()
    named = {"parameters": model.first.weight, **tensors, "loss": loss}
    grad = model.first.weight.grad
    assert grad is not None  # noqa: S101 - backward has set it
    named["gradients"] = grad
    return {name: str(x.dtype).removeprefix("torch.") for name, x in named.items()}


QUANTITIES = (
    "mean",
    "largest square",
    "sum of squares",
    "variance",
    "1 / deviation",
    "largest output",
)


def layernorm(
    dtype: torch.dtype, scale: float, *, device: torch.device | str = "cpu"
) -> tuple[dict[str, float], dict[str, float]]:
    """Normalize a row of mean and deviation ``scale`` in fp64, and with each step in ``dtype``.

    The errors show why fused kernels keep the statistics in fp32.

    Returns:
        The ``QUANTITIES`` in fp64, and in ``dtype``; the latter may be infinite or NaN.
    """
    normal = torch.randn(1024, generator=torch.Generator().manual_seed(0))
    row = ((normal + 1) * scale).to(device=device, dtype=dtype)
    return _quantities(row.double()), _quantities(row)


def _quantities(x: torch.Tensor) -> dict[str, float]:
    mean = x.sum() / x.numel()
    squares = (x - mean) ** 2
    variance = squares.sum() / x.numel()
    inverse = (variance + 1e-5).rsqrt()
    output = (x - mean) * inverse
    found = (mean, squares.max(), squares.sum(), variance, inverse, output.abs().max())
    return {name: value.item() for name, value in zip(QUANTITIES, found, strict=True)}
