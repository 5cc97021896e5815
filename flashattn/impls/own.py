"""Ours: triton, hopper, tiled, reference."""

from __future__ import annotations

from typing import Any

import torch

from flashattn import gpus, ops, tiled
from flashattn.bounds import Bounds
from flashattn.checks import check_among, check_scale
from flashattn.claims import MASKS_AND_SCORES
from flashattn.mask import UNBOUNDED, Causal, Mask, Window
from flashattn.prepare import prepare
from flashattn.problem import Problem
from flashattn.reference import reference_attention
from flashattn.registry import register

Pair = tuple[torch.Tensor, torch.Tensor]
# Every mask, all that scores are made with, and the logsumexp.
EVERYTHING: dict[str, Any] = {**MASKS_AND_SCORES, "sink": True, "lse": True}


@register(
    "triton",
    why_not=gpus.why_not,
    prepares=True,
    any_length=True,
    narrow_values=True,
    **EVERYTHING,
    denormals=False,
)
def triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: Causal = False,
    window: Window = UNBOUNDED,
    bounds: Bounds | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    scale: float | None = None,
    precision: str = "auto",
) -> ops.Attend:
    """FlashAttention-2 in Triton; ``precision`` says how fp32 products are made (see ``ops``)."""
    return prepare(
        q,
        k,
        v,
        causal=causal,
        window=window,
        bounds=bounds,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        bias=bias,
        sink=sink,
        scale=scale,
        precision=precision,
    )


def _each_pass(problem: Problem, device: torch.device) -> dict[str, Any]:
    """Leave it to the plan, which knows both passes, whose kernels are the faster ones."""
    del problem, device
    return {"family": "auto"}


@register(
    "hopper",
    why_not=gpus.why_not_hopper,
    fastest=_each_pass,
    prepares=True,
    any_length=True,
    narrow_values=True,
    **EVERYTHING,
)
def _hopper(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: Causal = False,
    window: Window = UNBOUNDED,
    bounds: Bounds | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    scale: float | None = None,
    precision: str = "auto",
    deterministic: bool = True,
    family: ops.Family = "hopper",
) -> ops.Attend:
    """FlashAttention for Hopper in Gluon; in fp32 o at D = 33 to 128, gradients from 65 on.

    With ``deterministic=False`` the gradient of q is summed in any order for D <= 128, unless
    ``torch.use_deterministic_algorithms`` insists: faster by 0 to 12% on an H200, and other bits
    every time.
    The portable kernels take over what TMA cannot address (an address or a stride that is no
    multiple of 16 bytes, a stride of 0), a scale that is not positive, and fp32 with few scores or
    multiplied as ``precision="ieee"`` or ``"tf32x3"`` say; with ``family="auto"``, as
    ``impl="auto"`` calls it, also each pass that they are faster at.
    """
    check_among("family", family, ("hopper", "auto"))
    return prepare(
        q,
        k,
        v,
        causal=causal,
        window=window,
        bounds=bounds,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        bias=bias,
        sink=sink,
        scale=scale,
        precision=precision,
        family=family,
        deterministic=deterministic,
    )


def _fastest(problem: Problem, device: torch.device) -> dict[str, Any] | None:
    """Leave to others on a CPU what is dense; of other masks only the tiles are computed.

    And no scores are held where these have more to them than PyTorch's own knows.
    """
    dense = problem.window == UNBOUNDED and not problem.by_rows and not problem.added
    return None if device.type == "cpu" and dense else {}


register("tiled", fastest=_fastest, **EVERYTHING)(tiled.tiled_attention)


@register("reference", narrow_values=True, **EVERYTHING)
def _reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: Causal = False,
    window: Window = UNBOUNDED,
    bounds: Bounds | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    scale: float | None = None,
) -> Pair:
    wide = (x if x.dtype == torch.float64 else x.float() for x in (q, k, v))
    scale, mask = check_scale(scale, q.shape[-1]), Mask.of(causal, window)
    scored: dict[str, Any] = {"alibi_slopes": alibi_slopes, "bias": bias, "sink": sink}
    o, lse = reference_attention(
        *wide, mask=mask, bounds=bounds, scale=scale, softcap=softcap, **scored
    )
    return o.to(q.dtype), lse
