"""Our kernels for what PyTorch's attention operators are given, chosen once for each signature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flashattn import gpus, ops
from flashattn.bounds import Bounds
from flashattn.mask import Mask
from flashattn.plan.spec import Extras, Signature, TensorSpec, signature
from flashattn.problem import Problem, check_scale
from flashattn.score import check_bias

ONE_BATCH = Bounds(*(torch.empty(1, 0, 2, dtype=torch.int32, device="meta") for _ in range(2)))


class UnsupportedError(Exception):
    """Our kernels cannot solve it; PyTorch's own may."""


def leave(*reasons: object) -> None:
    """Leave a call to PyTorch's own kernel, if there is a reason."""
    if any(reasons):
        raise UnsupportedError


@lru_cache(1024)
def _bind(
    given: tuple[Signature, ...],
    mask: Mask | None,
    scale: float | None,
    fp32_precision: object,
) -> ops.Prepared | None:
    """Return our kernels for tensors with these signatures, or None where ours cannot.

    Args:
        given: signatures of q [B, H, T, D], k [B, G, S, D] and v [B, G, S, Dv], and of a bias that
            broadcasts to [B, H, T, S], if there is one.
        mask: which keys a query sees; None is bounds of rows, for one batch.
        scale: factor on the scores; None is D ** -0.5.
        fp32_precision: torch's setting, on which the kernels of fp32 depend.
    """
    del fp32_precision
    q, k, v, *rest = (TensorSpec(*x) for x in given)
    given, bias = given[:3], rest[0] if rest else None
    if len(q.shape) != len("BHTD") or not q.device == k.device == v.device:
        return None
    if not 0 < v.shape[-1] <= k.shape[-1] == q.shape[-1] or v.shape[:-1] != k.shape[:-1]:
        return None
    asked: dict[str, Any] = {"documents": "unknown"}
    if mask is not None:
        asked = {"causal": mask.causal, "window": mask.window}
    try:
        as_wide = k._replace(dtype=v.dtype)  # v, but for its width
        problem = Problem.of(q.meta, k.meta, as_wide.meta, **asked)
        problem = replace(problem, value_dim=v.shape[-1])
        if bias is not None:
            sizes = problem.batch, problem.heads, problem.seq_q, problem.seq_kv
            check_bias(bias.meta, sizes, q.meta)
        scale = check_scale(scale, problem.head_dim)
    except ValueError:
        return None
    family = gpus.fastest_family(problem, q.device)
    if family is None:
        return None
    how = scale, None, "auto", family, True
    if mask is None:
        return ops.bind(given, None, None, 0, *how, extras=Extras(*ONE_BATCH))
    band = mask.over(problem.seq_q, problem.seq_kv)
    return ops.bind(given, band.left, band.right, 0, *how, bias=bias)


def _prepared(
    tensors: tuple[Tensor, ...], mask: Mask | Bounds, scale: float | None
) -> ops.Prepared:
    """Return our kernels for q, k, v and perhaps a bias."""
    tf32 = tensors[0].dtype is torch.float32 and torch.backends.cuda.matmul.fp32_precision
    prepared = _bind(signature(*tensors), mask if isinstance(mask, Mask) else None, scale, tf32)
    if prepared is None:
        raise UnsupportedError
    return prepared


def _extras(mask: Mask | Bounds, bias: Tensor | None = None) -> Sequence[Tensor | None]:
    """Return what kernels take besides q, k and v: bounds of rows, or a bias, or nothing."""
    if not isinstance(mask, Mask):
        return Extras(*mask)
    return () if bias is None else Extras(bias=bias)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | Bounds,
    scale: float | None,
    bias: Tensor | None = None,
) -> ops.Outputs:
    """Return o, laid out like q or its first columns, and lse [B, H, T]."""
    given = (q, k, v) if bias is None else (q, k, v, bias)
    o, lse = _prepared(given, mask, scale).attend(q, k, v, *_extras(mask, bias))
    return _like(o, q if o.shape == q.shape else q[..., : o.shape[-1]]), lse


def differentiate(
    grad_o: Tensor,
    saved: tuple[Tensor, ...],
    mask: Mask | Bounds,
    scale: float | None,
    bias: Tensor | None = None,
    *,
    bias_grad: bool = False,
) -> ops.Gradients:
    """Return the gradients of q, k and v, laid out like these, and that of the bias if wanted.

    ``saved`` is q, k, v, o, lse.
    """
    q, k, v, o, lse = saved
    given = (q, k, v) if bias is None else (q, k, v, bias)
    prepared, saved = _prepared(given, mask, scale), (q, k, v, o, lse.contiguous())
    dq, dk, dv, *dbias = prepared.backward(
        (grad_o, None), saved, _extras(mask, bias), bias_grad=bias_grad
    )
    return _like(dq, q), _like(dk, k), _like(dv, v), *dbias


def _like(x: Tensor, pattern: Tensor) -> Tensor:
    """Return x laid out as ``torch.empty_like(pattern)``, as our kernels do if rows are dense."""
    return x if pattern.stride(-1) == 1 else torch.empty_like(pattern).copy_(x)
