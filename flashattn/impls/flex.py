"""FlexAttention, compiled: masks become block masks; softcap, ALiBi and bias a score_mod."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import TYPE_CHECKING

import torch

from flashattn import score
from flashattn.bounds import Bounds
from flashattn.claims import MASKS_AND_SCORES
from flashattn.mask import FULL, UNBOUNDED, Band, Causal, Mask, Window
from flashattn.problem import Problem
from flashattn.registry import register

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


@cache
def _flex() -> Callable[..., torch.Tensor]:
    from torch.nn.attention.flex_attention import flex_attention  # noqa: PLC0415 - seconds to import

    return torch.compile(flex_attention, dynamic=False)


@cache
@torch.inference_mode(mode=False)  # a later call may save it for its backward
def _block_mask(band: Band, device: torch.device) -> BlockMask:
    from torch.nn.attention.flex_attention import create_block_mask  # noqa: PLC0415

    def seen(b: torch.Tensor, h: torch.Tensor, t: torch.Tensor, s: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
        return band.sees(t, s)

    return create_block_mask(seen, None, None, band.seq_q, band.seq_kv, device=device)


@lru_cache(maxsize=4)  # making one takes as long as attention
@torch.inference_mode(mode=False)
def _block_mask_of(bounds: Bounds, batch: int) -> BlockMask:
    from torch.nn.attention.flex_attention import create_block_mask  # noqa: PLC0415

    (of_batches, seq_q, _), seq_kv = bounds.keys.shape, bounds.queries.shape[1]

    def seen(b: torch.Tensor, h: torch.Tensor, t: torch.Tensor, s: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
        low, high = bounds.keys[b if of_batches > 1 else 0, t].unbind()
        return (s >= low) & (s < high)

    batches = batch if of_batches > 1 else None
    return create_block_mask(seen, batches, None, seq_q, seq_kv, device=bounds.keys.device)


@lru_cache(maxsize=4)
def _modify(
    softcap: float | None, alibi_slopes: torch.Tensor | None, query_offset: int
) -> Callable[..., torch.Tensor]:
    """Return a score_mod for softcap and ALiBi slopes."""
    batches = 0 if alibi_slopes is None else alibi_slopes.shape[0]

    def modify(
        given: torch.Tensor, b: torch.Tensor, h: torch.Tensor, t: torch.Tensor, s: torch.Tensor
    ) -> torch.Tensor:
        given = score.scores(given, 1.0, softcap)
        if alibi_slopes is not None:
            given = given - alibi_slopes[b if batches > 1 else 0, h] * (t + query_offset - s).abs()
        return given

    return modify


def _biased(
    modify: Callable[..., torch.Tensor] | None, bias: torch.Tensor, seq_q: int
) -> Callable[..., torch.Tensor]:
    """Return a score_mod that also adds a bias; its gradient is summed by atomic additions."""
    several = [n > 1 for n in bias.shape]

    def biased(
        given: torch.Tensor, b: torch.Tensor, h: torch.Tensor, t: torch.Tensor, s: torch.Tensor
    ) -> torch.Tensor:
        at = (b, h, s - t + seq_q - 1) if score.is_relative(bias) else (b, h, t, s)
        given = given if modify is None else modify(given, b, h, t, s)
        return given + bias[tuple(x if n else 0 for x, n in zip(at, several, strict=True))]

    return biased


def _limits(problem: Problem, device: torch.device) -> str | None:
    reasons = {
        "is compiled for CUDA only here: on a CPU it has no backward": device.type != "cuda",
        "is not asked for empty problems": problem.is_empty,
        "takes no fp64": problem.dtype == "float64",
        "takes head dimensions from 16 on, powers of two": problem.head_dim < 16  # noqa: PLR2004
        or problem.head_dim & (problem.head_dim - 1) != 0,
        "needs a power-of-two number of query heads for each key head": _group(problem)
        & (_group(problem) - 1)
        != 0,
    }
    return next((f"flex {reason}" for reason, holds in reasons.items() if holds), None)


def _group(problem: Problem) -> int:
    return problem.heads // max(problem.kv_heads, 1)


@register("flex", why_not=_limits, strict=False, compiles=True, **MASKS_AND_SCORES)
def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: Causal,
    window: Window = UNBOUNDED,
    bounds: Bounds | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    scale: float | None,
) -> torch.Tensor:
    mask = Mask.of(causal, window)
    blocks = None if mask == FULL else _block_mask(mask.over(q.shape[2], k.shape[2]), q.device)
    if bounds is not None:
        blocks = _block_mask_of(bounds, q.shape[0])
    grouped = q.shape[1] != k.shape[1]
    modify = None
    if softcap is not None or alibi_slopes is not None:
        modify = _modify(softcap, alibi_slopes, k.shape[2] - q.shape[2])
    if bias is not None:
        modify = _biased(modify, bias, q.shape[2])
    return _flex()(q, k, v, modify, blocks, scale=scale, enable_gqa=grouped)
