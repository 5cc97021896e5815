"""Check the arguments of ``attention`` and ``explain``, and convert them for implementations."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad

from flashattn.problem import Problem
from flashattn.score import Relative, check_alibi_slopes, check_bias, check_sink, dimensions


def scored_by(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    alibi_slopes: torch.Tensor | None,
    bias: torch.Tensor | Relative | None,
    sink: torch.Tensor | None,
    *,
    packed: bool,
) -> dict[str, torch.Tensor]:
    """Check ALiBi slopes, bias and sink, and return them by name, as implementations take them.

    Raises:
        ValueError: one does not fit, or there are slopes with packed documents.
    """
    check_sizes(q, k, v)
    found, heads = {}, 1 if q.ndim == 3 else q.shape[1]  # noqa: PLR2004 - [B, T, D]
    if alibi_slopes is not None:
        if packed:
            raise ValueError("alibi_slopes: not with documents: positions are those of the whole")
        slopes = check_alibi_slopes(alibi_slopes, q.shape[0], heads, q.device)
        found["alibi_slopes"] = slopes
    if bias is not None:
        found["bias"] = check_bias(bias, (q.shape[0], heads, q.shape[-2], k.shape[-2]), q)
    if sink is not None:
        found["sink"] = check_sink(sink, heads, q)
    return found


def facts_of(tensors: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a ``Problem`` that describe bounds, ALiBi slopes, bias and sink."""
    return {
        "documents": "unknown" if "bounds" in tensors else None,
        "alibi": "alibi_slopes" in tensors,
        "bias": dimensions(tensors.get("bias")),
        "sink": "sink" in tensors,
    }


def check_sizes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Check that q and k have the dimensions that the checks of other arguments rely on."""
    if not all(isinstance(x, torch.Tensor) and x.ndim in (3, 4) for x in (q, k)):
        Problem.of(q, k, v)  # raises, and says what is wrong


def only_v_differs_in_width(*tensors: torch.Tensor) -> bool:
    """Return whether q, k and v fit except for the width of v."""
    if not all(isinstance(x, torch.Tensor) and not x.is_nested and x.ndim > 1 for x in tensors):
        return False  # not a tensor: left for the check that follows
    q, k, v = (x.shape for x in tensors)
    return q[-1] == k[-1] != v[-1] > 0 and k[:-1] == v[:-1]


def of_one_width(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return views that are all as wide as the widest tensor, for checks that read no values."""
    width = max(x.shape[-1] for x in tensors)
    return [
        x if x.shape[-1] == width else x.narrow(-1, 0, 1).expand(*x.shape[:-1], width)
        for x in tensors
    ]


def widened(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pad the narrower tensors with columns of zeros, which change no score."""
    more = v.shape[-1] - k.shape[-1]
    return (pad(q, (0, more)), pad(k, (0, more)), v) if more > 0 else (q, k, pad(v, (0, -more)))


def autocast_dtype(x: object) -> torch.dtype | None:
    """Return the dtype that autocast gives x, or None; as in PyTorch, meta tensors are not cast."""
    if not isinstance(x, torch.Tensor) or x.is_meta:
        return None  # not a tensor: left for the check that follows
    kind = "cuda" if x.is_cuda else x.device.type  # on a GPU device.type is slow
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def cast(dtype: torch.dtype, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cast tensors as autocast does; anything else is left for the check that follows."""
    return tuple(
        x.to(dtype)
        if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype != torch.float64
        else x
        for x in tensors
    )


def cast_bias(dtype: torch.dtype, bias: Any) -> Any:
    """Cast a bias as ``cast`` does, unless it is fp32, which goes with every dtype of q."""
    if isinstance(bias, Relative):
        return Relative(cast_bias(dtype, bias.vector))
    if isinstance(bias, torch.Tensor) and bias.dtype == torch.float32:
        return bias
    return cast(dtype, bias)[0]
