"""attention(q, k, v): check, pick an implementation, call it."""

from __future__ import annotations

from typing import Any

import torch

import flashattn.impls  # noqa: F401 - registers everyone
from flashattn import registry
from flashattn.problem import Causal, Problem, check_scale

# In the order in which "auto" asks them.
FASTEST_FIRST = {"cuda": ("triton", "tiled"), "cpu": ("sdpa", "reference")}


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: Causal = False,
    scale: float | None = None,
    return_lse: bool = False,
    impl: str = "auto",
    **options: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute softmax(scale * q @ k.T + mask) @ v without holding the score matrix.

    Query head h reads key/value head h // (H // G). Under ``causal=True`` or ``"top_left"`` query t
    sees keys 0 ... t, as in PyTorch; under ``"bottom_right"`` keys 0 ... t + S - T, as in
    flash-attn, so that the last query sees every key. Products are accumulated in fp32. Under
    ``torch.autocast`` q, k and v are cast to its dtype first.

    Args:
        q: [B, H, T, D], or [B, T, D] for one head; fp32, fp16 or bf16 (fp64: only by
            implementations in PyTorch). Any strides are taken as they are when the last dimension
            is dense; otherwise the tensor is copied once.
        k: [B, G, S, D], G a divisor of H, or [B, S, D].
        v: like k.
        causal: False, True, "top_left" or "bottom_right".
        scale: factor on the scores; None is D ** -0.5.
        return_lse: return the natural-log logsumexp of each row of scores, too.
        impl: a name of ``flashattn.names()``, or "auto": on a GPU the fastest of ours that can
            solve the problem; on a CPU, where ours are for study, PyTorch's own
            scaled_dot_product_attention, or the reference where that cannot. A name never falls
            back to another.
        options: the implementation's own, such as Triton's ``precision="tf32x3"``.

    Returns:
        o [B, H, T, D] in q's dtype; with ``return_lse`` (o, lse), lse [B, H, T] in fp32. A query
        that sees no key has o = 0 and lse = -inf and passes no gradient. Both are differentiable,
        once (any number of times by ``impl="reference"``).

    Raises:
        ValueError: an argument that does not fit, or a problem that ``impl`` cannot solve; the
            message names the argument, what was wanted and what came, or says why.

    Source: Dao, 2023, "FlashAttention-2".
    """
    q, k, v = _autocast(q, k, v)
    problem = Problem.of(q, k, v, causal=causal)
    scale = check_scale(scale, problem.head_dim)
    chosen = _choose(impl, problem, q, lse=return_lse)
    one_head = q.ndim == 3  # noqa: PLR2004 - [B, T, D]
    if one_head:
        q, k, v = q[:, None], k[:, None], v[:, None]
    with torch.autocast(q.device.type, enabled=False):
        o, lse = chosen(q, k, v, causal=problem.causal, scale=scale, **options)
    if one_head:
        o, lse = o[:, 0], None if lse is None else lse[:, 0]
    return o if lse is None or not return_lse else (o, lse)


def _autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cast as autocast asks; what is not a tensor is left for the check that follows."""
    kind = tensors[0].device.type if isinstance(tensors[0], torch.Tensor) else "cpu"
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(
        x.to(dtype)
        if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype != torch.float64
        else x
        for x in tensors
    )


def _choose(name: str, problem: Problem, q: torch.Tensor, *, lse: bool) -> registry.Impl:
    """Return the implementation called ``name``, or the first of "auto"'s that can."""
    asked = FASTEST_FIRST.get(q.device.type, ("tiled",)) if name == "auto" else (name,)
    reasons = []
    for candidate in asked:
        impl = registry.get(candidate)
        reason = impl.why_not(problem, q.device, grad=q.requires_grad, lse=lse)
        if reason is None:
            return impl
        reasons.append(reason)
    msg = f"impl: {'; '.join(reasons)}"
    raise ValueError(msg)
