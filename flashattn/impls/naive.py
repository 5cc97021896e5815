"""Naive attention in three lines of PyTorch, eager ("naive") and compiled ("compiled").

Unlike the reference it makes no promise for rows that see no key and returns no logsumexp. So it
computes, and saves for backward, only what the usual three lines do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from flashattn import score
from flashattn.bounds import Bounds
from flashattn.checks import check_scale
from flashattn.claims import MASKS_AND_SCORES
from flashattn.mask import FULL, UNBOUNDED, Causal, Mask, Window
from flashattn.problem import Problem
from flashattn.registry import WhyNot, register
from flashattn.score import Terms

AttentionFunction = Callable[..., torch.Tensor]


def naive_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: Mask,
    scale: float,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    bounds: Bounds | None = None,
) -> torch.Tensor:
    """Compute softmax(scale * q @ k.T + mask) @ v in three lines; arguments as in the reference."""
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = score.scores(q @ k.mT, scale, softcap)  # [B, H, T, S]
    whole = slice(0, q.shape[2]), slice(0, k.shape[2])
    scores = Terms.of(q, k, alibi_slopes, bias).added(scores, *whole)
    if bounds is not None:
        scores = scores.masked_fill(~bounds.seen[:, None], -torch.inf)
    elif mask != FULL:
        t, s = (torch.arange(n, device=q.device) for n in scores.shape[-2:])
        hidden = ~mask.over(*scores.shape[-2:]).sees(t[:, None], s)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(dim=-1) @ v


def _limits(problem: Problem, device: torch.device, *, name: str) -> str | None:
    del device
    if problem.is_empty:
        return f"{name} is not asked for empty problems"
    if problem.fully_masked_rows > 0:
        return f"{name} gives NaN for a query that sees no key"
    return None


def _three_lines(attend: Callable[[], AttentionFunction]) -> AttentionFunction:
    """Return an implementation that calls the function which ``attend`` returns."""

    def call(
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
        scale, mask = check_scale(scale, q.shape[-1]), Mask.of(causal, window)
        scored = {"alibi_slopes": alibi_slopes, "bias": bias}
        return attend()(q, k, v, mask=mask, bounds=bounds, scale=scale, softcap=softcap, **scored)

    return call


_ATTENDS: dict[str, Callable[[], AttentionFunction]] = {
    "naive": lambda: naive_attention,
    "compiled": cache(partial(torch.compile, naive_attention, dynamic=True)),
}
for _name, _attend in _ATTENDS.items():
    _why_not: WhyNot = partial(_limits, name=_name)
    _facts: dict[str, Any] = {"narrow_values": True, "compiles": _name == "compiled"}
    register(_name, why_not=_why_not, strict=False, **_facts, **MASKS_AND_SCORES)(
        _three_lines(_attend)
    )
