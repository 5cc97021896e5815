"""attention(q, k, v): check, pick an implementation, call it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

import flashattn.impls  # noqa: F401 - registers everyone
from flashattn import registry
from flashattn.problem import Causal, Problem, check_scale

# In the order in which "auto" asks them.
FASTEST_FIRST = {"cuda": ("hopper", "triton", "tiled"), "cpu": ("sdpa", "reference")}


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
            solve the problem, on an H100 or H200 "hopper" where there is enough to do; on a CPU,
            where ours are for study, PyTorch's own scaled_dot_product_attention, or the reference
            where that cannot. A name never falls back to another.
        options: the implementation's own, such as ``precision="ieee"`` of "triton", or
            ``deterministic=False`` of "triton" and "hopper", which lets "hopper" sum the gradient
            of q in any order; by default the same inputs give the same bits.

    Returns:
        o [B, H, T, D] in q's dtype; with ``return_lse`` (o, lse), lse [B, H, T] in fp32. A query
        that sees no key has o = 0 and lse = -inf and passes no gradient. Both are differentiable,
        once (any number of times by ``impl="reference"``).

    Raises:
        ValueError: an argument that does not fit, or a problem that ``impl`` cannot solve; the
            message names the argument, what was wanted and what came, or says why.

    Source: Dao, 2023, "FlashAttention-2".
    """
    kind = _kind(q)
    if torch.is_autocast_enabled(kind):
        q, k, v = _cast(torch.get_autocast_dtype(kind), q, k, v)
        options |= {"causal": causal, "scale": scale, "return_lse": return_lse, "impl": impl}
        with torch.autocast(kind, enabled=False):
            return attention(q, k, v, **options)
    plan = _plan(q, k, v, causal=causal, lse=return_lse, impl=impl)
    scale = check_scale(scale, q.shape[-1])
    if plan.one_head:
        q, k, v = q[:, None], k[:, None], v[:, None]
    how = plan.options | options
    o, lse = plan.impl(q, k, v, causal=plan.causal, scale=scale, **how)
    if plan.one_head:
        o, lse = o[:, 0], None if lse is None else lse[:, 0]
    return o if lse is None or not return_lse else (o, lse)


class _Plan(NamedTuple):
    """Who answers, and what was made of the arguments."""

    impl: registry.Impl
    options: dict[str, Any]
    causal: Causal
    one_head: bool


# Checking costs the host more than launching, and a training loop asks for the same thing again and
# again: what has passed the checks once is known by what they look at.
_PLANS: dict[tuple[object, ...], _Plan] = {}
_MOST_PLANS = 1024  # shapes that keep changing shall not fill the memory


def _plan(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: Causal, lse: bool, impl: str
) -> _Plan:
    """Check the arguments and choose, or repeat what was chosen for ones like them."""
    if torch.compiler.is_compiling() or not type(q) is type(k) is type(v) is torch.Tensor:
        return _checked(q, k, v, causal=causal, lse=lse, impl=impl)
    named = impl if impl == "auto" else id(registry.get(impl))
    try:
        key = (
            *(q.shape, q.dtype, q.device, q.layout, q.requires_grad),
            *(k.shape, k.dtype, k.device, k.layout),
            *(v.shape, v.dtype, v.device, v.layout),
            *(causal, type(causal), lse, named),
        )
        plan = _PLANS.get(key)
    except (TypeError, RuntimeError):  # a mask of no hashable value, a nested tensor of no shape
        return _checked(q, k, v, causal=causal, lse=lse, impl=impl)
    if plan is None:
        plan = _checked(q, k, v, causal=causal, lse=lse, impl=impl)
        if len(_PLANS) >= _MOST_PLANS:
            _PLANS.clear()
        _PLANS[key] = plan
    return plan


def _checked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: Causal, lse: bool, impl: str
) -> _Plan:
    problem = Problem.of(q, k, v, causal=causal)
    chosen, options = _choose(impl, problem, q, lse=lse)
    return _Plan(chosen, options, problem.causal, q.ndim == 3)  # noqa: PLR2004


def _kind(x: object) -> str:
    """Return the type of a tensor's device; of a GPU without asking for its name, which is slow."""
    if not isinstance(x, torch.Tensor):
        return "cpu"  # left for the check that follows
    return "cuda" if x.is_cuda else x.device.type


def _cast(dtype: torch.dtype, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cast as autocast does; what is not a tensor is left for the check that follows."""
    return tuple(
        x.to(dtype)
        if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype != torch.float64
        else x
        for x in tensors
    )


def _choose(
    name: str, problem: Problem, q: torch.Tensor, *, lse: bool
) -> tuple[registry.Impl, dict[str, Any]]:
    """Return the implementation called ``name``, or the first of "auto"'s that can, and options."""
    asked = FASTEST_FIRST.get(q.device.type, ("tiled",)) if name == "auto" else (name,)
    reasons = []
    for candidate in asked:
        impl = registry.get(candidate)
        reason = impl.why_not(problem, q.device, grad=q.requires_grad, lse=lse)
        if reason is None:
            options = impl.fastest(problem, q.device) if name == "auto" else {}
            if options is not None:
                return impl, options
            reason = f"{impl.name} is not the fastest here"
        reasons.append(reason)
    msg = f"impl: {'; '.join(reasons)}"
    raise ValueError(msg)
