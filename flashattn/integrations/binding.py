"""Choose our kernels for calls of PyTorch's attention operators, once for each signature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flashattn import gpus
from flashattn.bounds import Bounds
from flashattn.checks import check_scale
from flashattn.mask import Mask
from flashattn.ops import AttentionCall, Differentiate, Gradients, Outputs, execute
from flashattn.plan.precision import input_precision
from flashattn.plan.spec import Extras, Options, Signature, TensorSpec, signature
from flashattn.problem import Problem
from flashattn.score import check_bias

BOUND = 1024  # cached signatures: shapes that keep changing must not fill the memory


class UnsupportedError(Exception):
    """Our kernels cannot solve a call; PyTorch's own may."""


def leave(*reasons: object) -> None:
    """Leave a call to PyTorch's own kernel, if there is a reason."""
    if any(reasons):
        raise UnsupportedError


@lru_cache(BOUND)
def _options(
    given: tuple[Signature, ...], mask: Mask | None, scale: float | None, bias: Signature | None
) -> Options | None:
    """Return the ``Options`` of a call, or None if our kernels cannot solve it.

    Args:
        given: signatures of q [B, H, T, D], k [B, G, S, D] and v [B, G, S, Dv].
        mask: which keys a query sees; None means bounds, for one batch.
        scale: factor on the scores; None means D ** -0.5.
        bias: signature of the bias, which broadcasts to [B, H, T, S], or None.
    """
    q, k, v = (TensorSpec(*x) for x in given)
    if len(q.shape) != len("BHTD") or not q.device == k.device == v.device:
        return None
    if not 0 < v.shape[-1] <= k.shape[-1] == q.shape[-1] or v.shape[:-1] != k.shape[:-1]:
        return None
    asked: dict[str, Any] = {"documents": "unknown"}
    if mask is not None:
        asked = {"causal": mask.causal, "window": mask.window}
    added = None if bias is None else TensorSpec(*bias)
    try:
        as_wide = k._replace(dtype=v.dtype)  # v, with the width of k
        problem = Problem.of(q.meta, k.meta, as_wide.meta, **asked)
        problem = replace(problem, value_dim=v.shape[-1])
        if added is not None:
            sizes = problem.batch, problem.heads, problem.seq_q, problem.seq_kv
            check_bias(added.meta, sizes, q.meta)
        scale = check_scale(scale, problem.head_dim)
    except ValueError:
        return None
    if gpus.why_not(problem, q.device) is not None:
        return None
    left, right = None, None
    if mask is not None:
        band = mask.over(problem.seq_q, problem.seq_kv)
        left, right = band.left, band.right
    return Options(right, scale, family="auto", left=left, bounds=int(mask is None), bias=added)


@lru_cache(BOUND)
def _forward(given: tuple[Signature, ...], *asked: Any, precision: str) -> AttentionCall:
    """Return the kernels that compute o and lse.

    Args:
        given: see ``_options``.
        asked: likewise.
        precision: as ``input_precision`` returns it.

    Raises:
        UnsupportedError: our kernels cannot solve it.
    """
    options = _options(given, *asked)
    if options is None:
        raise UnsupportedError
    attend: AttentionCall = execute().bind_forward(given, options._replace(precision=precision))
    return attend


@lru_cache(BOUND)
def _backward(
    given: tuple[Signature, ...], *asked: Any, precision: str, bias_grad: bool
) -> Differentiate:
    """Return the backward kernels for the signatures of q, k, v, grad_o, o and lse."""
    options = _options(given[:3], *asked)
    if options is None:
        raise UnsupportedError
    options = options._replace(precision=precision, bias_grad=bias_grad)
    differentiate: Differentiate = execute().bind_backward(given, options)
    return differentiate


def _asked(mask: Mask | Bounds, scale: float | None, bias: Tensor | None) -> tuple[Any, ...]:
    """Return the arguments of ``_options`` besides q, k and v."""
    band = mask if isinstance(mask, Mask) else None
    return band, scale, None if bias is None else signature(bias)[0]


def _extras(mask: Mask | Bounds, bias: Tensor | None = None) -> Sequence[Tensor | None]:
    """Return the tensors that kernels take besides q, k and v: bounds, a bias, or none."""
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
) -> Outputs:
    """Return o, laid out like q or its first columns, and lse [B, H, T]."""
    precision = input_precision("auto", q.dtype)
    run = _forward(signature(q, k, v), *_asked(mask, scale, bias), precision=precision)
    o, lse = run(q, k, v, *_extras(mask, bias))
    return _like(o, q if o.shape == q.shape else q[..., : o.shape[-1]]), lse


def differentiate(
    grad_o: Tensor,
    saved: tuple[Tensor, ...],
    mask: Mask | Bounds,
    scale: float | None,
    bias: Tensor | None = None,
    *,
    bias_grad: bool = False,
) -> Gradients:
    """Return the gradients of q, k and v, laid out like them, and that of the bias if wanted.

    ``saved`` is q, k, v, o, lse.
    """
    q, k, v, o, lse = saved
    lse = lse.contiguous()
    run = _backward(
        signature(q, k, v, grad_o, o, lse),
        *_asked(mask, scale, bias),
        precision=input_precision("auto", q.dtype),
        bias_grad=bias_grad,
    )
    dq, dk, dv, *dbias = run(q, k, v, grad_o, o, lse, None, *_extras(mask, bias))
    return _like(dq, q), _like(dk, k), _like(dv, v), *dbias


def _like(x: Tensor, pattern: Tensor) -> Tensor:
    """Return x laid out like ``torch.empty_like(pattern)``, as it is already if rows are dense."""
    return x if pattern.stride(-1) == 1 else torch.empty_like(pattern).copy_(x)
