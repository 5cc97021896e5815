"""Our own implementations: triton, hopper, tiled, reference."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from flashattn import gpus, tiled
from flashattn.bounds import Bounds
from flashattn.checks import check_scale
from flashattn.claims import MASKS_AND_SCORES
from flashattn.mask import UNBOUNDED, Causal, Mask, Window
from flashattn.prepare import prepare
from flashattn.problem import Problem
from flashattn.reference import reference_attention
from flashattn.registry import register

Pair = tuple[torch.Tensor, torch.Tensor]
# Every mask, softcap, ALiBi, bias, sinks and the logsumexp.
EVERYTHING: dict[str, Any] = {**MASKS_AND_SCORES, "sink": True, "lse": True}
_KERNELS: dict[str, Any] = {
    "fastest": lambda *_: {"family": "auto"},  # the plan takes the faster kernels for each pass
    "prepares": True,
    "any_length": True,
    "narrow_values": True,
    **EVERYTHING,
}

register("triton", why_not=gpus.why_not, denormals=False, **_KERNELS)(
    partial(prepare, family="triton", deterministic=True)
)
register(
    "hopper",
    why_not=gpus.why_not_hopper,
    why_no_grad=partial(gpus.why_not_hopper, backward=True),
    any_scale=False,
    **_KERNELS,
)(partial(prepare, family="hopper"))  # ``deterministic`` is an option here


def _fastest(problem: Problem, device: torch.device) -> dict[str, Any] | None:
    """On a CPU, leave dense problems to others.

    For windows and bounds, "tiled" computes only the visited tiles. With ALiBi or a bias it stores
    no scores.
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
