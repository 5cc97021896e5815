"""explain(q, k, v): what ``attention`` would do on any GPU, and why."""

from __future__ import annotations

import torch

from flashattn.arguments import (
    check_sizes,
    facts_of,
    of_one_width,
    only_v_differs_in_width,
    scored_by,
)
from flashattn.checks import check_among, check_scale
from flashattn.gpus import gpu_of
from flashattn.mask import UNBOUNDED, Causal, Mask, Window
from flashattn.masks import RowMask
from flashattn.plan.choose import choose
from flashattn.plan.gpu import CARDS, Gpu
from flashattn.plan.plan import Plan
from flashattn.plan.spec import Family, TensorSpec
from flashattn.problem import Problem
from flashattn.resolve import Documents, check_mask
from flashattn.score import Relative

FAMILIES: dict[str, Family] = {"auto": "auto", "triton": "triton", "hopper": "hopper"}


def explain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: Causal = False,
    window: Window = UNBOUNDED,
    documents: Documents | None = None,
    mask: RowMask | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    bias: torch.Tensor | Relative | None = None,
    sink: torch.Tensor | None = None,
    scale: float | None = None,
    impl: str = "auto",
    precision: str = "auto",
    deterministic: bool = True,
    gpu: str | Gpu | None = None,
) -> Plan:
    """Return the plan by which ``attention`` computes this on a GPU; print it to read the reasons.

    Nothing is computed, so the tensors may be on the device "meta", and the GPU may be absent. The
    plan is that of the Triton kernels: kernel, tile, splits, scheduler and workspaces of both
    passes. It assumes that the gradient of o has the layout of o.

    Args:
        q: as in ``attention``.
        k: as in ``attention``.
        v: as in ``attention``.
        causal: as in ``attention``.
        window: as in ``attention``.
        documents: as in ``attention``; only whether they are given matters.
        mask: as in ``attention``; only whether it is given matters.
        softcap: as in ``attention``.
        alibi_slopes: as in ``attention``; only whether they are given matters.
        bias: as in ``attention``; the plan includes its gradient.
        sink: as in ``attention``.
        scale: as in ``attention``.
        impl: "triton", "hopper", or "auto", the faster one for each pass. If "hopper" has no
            backward for the problem, the kernel of that pass is "none", and its ``why`` says so.
        precision: as in ``attention``.
        deterministic: as in ``attention``.
        gpu: "A100", "H100", "H200", "B200" or "interpreter", or a ``plan.gpu.Gpu``; None means the
            GPU of the tensors, or the interpreter on a CPU; for the device "meta", the current GPU,
            or an A100 where there is none.

    Raises:
        ValueError: an argument does not fit, or these kernels cannot solve the problem.
    """
    check_sizes(q, k, v)
    check_among("deterministic", deterministic, (False, True))
    alike, device = [q, k, v], q.device
    if only_v_differs_in_width(q, k, v):
        scale, alike = check_scale(scale, q.shape[-1]), of_one_width(q, k, v)
        if v.shape[-1] > q.shape[-1]:  # padded before anything is planned
            q, k, v = (torch.empty(x.shape, dtype=x.dtype, device="meta") for x in alike)
    rows = documents is not None or mask is not None
    if rows:
        check_mask(Mask.of(causal, window), mask)
        causal, window = False, UNBOUNDED
    scored = scored_by(q, k, v, alibi_slopes, bias, sink, packed=documents is not None)
    facts = facts_of(scored) | {"documents": "unknown" if rows else None}
    problem = Problem.of(*alike, causal=causal, window=window, softcap=softcap, **facts)
    check_among("impl", impl, FAMILIES)
    if not isinstance(gpu, Gpu):
        if gpu is not None:
            check_among("gpu", gpu, CARDS)
        gpu = gpu_of(device) if gpu is None else CARDS[gpu]
    heads = (x[:, None] if x.ndim == 3 else x for x in (q, k, v))  # noqa: PLR2004 - [B, T, D]
    return choose(
        problem,
        [TensorSpec.of(x) for x in heads],
        gpu,
        scale=scale,
        precision=precision,
        deterministic=deterministic or torch.are_deterministic_algorithms_enabled(),
        family=FAMILIES[impl],
        bias=TensorSpec.of(scored["bias"]) if "bias" in scored else None,
    )
