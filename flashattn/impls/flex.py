"""FlexAttention, compiled, with the causal mask as a block mask."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch

from flashattn.problem import Causal, Problem, diagonal
from flashattn.registry import register

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.nn.attention.flex_attention import BlockMask


@cache
def _flex() -> Callable[..., torch.Tensor]:
    from torch.nn.attention.flex_attention import flex_attention  # noqa: PLC0415 - seconds to import

    return torch.compile(flex_attention, dynamic=False)


@cache
def _block_mask(seq_q: int, seq_kv: int, last: int, device: torch.device) -> BlockMask:
    from torch.nn.attention.flex_attention import create_block_mask  # noqa: PLC0415

    def seen(b: torch.Tensor, h: torch.Tensor, t: torch.Tensor, s: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
        return s <= t + last

    return create_block_mask(seen, None, None, seq_q, seq_kv, device=device)


def _limits(problem: Problem, device: torch.device) -> str | None:
    reasons = {
        "is compiled for CUDA only here: on a CPU it has no backward": device.type != "cuda",
        "is not asked for empty problems": 0
        in (problem.batch, problem.heads, problem.seq_q, problem.seq_kv),
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


@register("flex", why_not=_limits, strict=False, compiles=True)
def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: Causal, scale: float | None
) -> torch.Tensor:
    last = diagonal(causal, q.shape[2], k.shape[2])
    mask = None if last is None else _block_mask(q.shape[2], k.shape[2], last, q.device)
    return _flex()(q, k, v, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
