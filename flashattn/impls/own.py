"""Ours, and the definition compiled: reference, tiled, triton, compiled."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from flashattn import ops, tiled
from flashattn.problem import Causal, Problem, check_scale, diagonal
from flashattn.reference import reference_attention
from flashattn.registry import register

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

Pair = tuple["torch.Tensor", "torch.Tensor"]


@register("triton", why_not=ops.why_not, lse=True)
def triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: Causal = False,
    scale: float | None = None,
    precision: str = "auto",
) -> Pair:
    """FlashAttention-2 in Triton; ``precision`` says how fp32 products are made (see ``ops``)."""
    return ops.triton_attention(q, k, v, causal=causal, scale=scale, precision=precision)


@register("tiled", lse=True)
def _tiled(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: Causal = False,
    scale: float | None = None,
) -> Pair:
    return tiled.tiled_attention(q, k, v, causal=causal, scale=scale)


@register("reference", lse=True)
def _reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: Causal = False,
    scale: float | None = None,
) -> Pair:
    last = diagonal(causal, q.shape[-2], k.shape[-2])
    return reference_attention(q, k, v, diagonal=last, scale=check_scale(scale, q.shape[-1]))


@cache
def _compiled_reference() -> Callable[..., Pair]:
    import torch  # noqa: PLC0415

    return torch.compile(reference_attention, dynamic=True)


def _compiled_limits(problem: Problem, device: torch.device) -> str | None:
    del device
    if 0 in (problem.batch, problem.heads, problem.seq_q, problem.seq_kv):
        return "compiled is not asked for empty problems: the compiler specialises on zero sizes"
    return None


@register("compiled", why_not=_compiled_limits, lse=True, strict=False, compiles=True)
def _compiled(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: Causal = False,
    scale: float | None = None,
) -> Pair:
    last = diagonal(causal, q.shape[-2], k.shape[-2])
    return _compiled_reference()(q, k, v, diagonal=last, scale=check_scale(scale, q.shape[-1]))
