"""attention(q, k, v): check, pick an implementation, call it."""

from __future__ import annotations

from typing import Any

import torch

import flashattn.impls  # noqa: F401 - registers everyone
from flashattn import registry
from flashattn.problem import ALIGNMENT, Causal, Problem, check_scale
from flashattn.watchers import unwatched

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
    key = _key(q, k, v, causal, scale, return_lse, impl, options) if unwatched(q, k, v) else None
    try:
        attend = _PLANS[key] if key is not None else None
    except (KeyError, TypeError):  # TypeError: a mask of no hashable value
        attend = None
    if attend is None:
        kind = _kind(q)
        if torch.is_autocast_enabled(kind):
            q, k, v = _cast(torch.get_autocast_dtype(kind), q, k, v)
            options |= {"causal": causal, "scale": scale, "return_lse": return_lse, "impl": impl}
            with torch.autocast(kind, enabled=False):
                return attention(q, k, v, **options)
        attend = _prepare(q, k, v, causal, scale, return_lse, impl, options)
        if key is not None:
            if len(_PLANS) >= _MOST_PLANS:
                _PLANS.clear()
            _PLANS[key] = attend
    o, lse = attend(q, k, v)
    return o if lse is None or not return_lse else (o, lse)


# Checking costs the host more than launching, and a training loop asks for the same thing again and
# again: what has passed the checks once is known by all that was looked at.
_PLANS: dict[tuple[object, ...], registry.Attend] = {}
_MOST_PLANS = 1024  # shapes that keep changing shall not fill the memory
# Options of these kinds are told apart by kind and value, and hold on to nothing.
_NAMEABLE = frozenset({str, bool, int, float, type(None)})


def _key(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: Causal,
    scale: float | None,
    return_lse: bool,  # noqa: FBT001 - by position costs less
    impl: str,
    options: dict[str, Any],
) -> tuple[object, ...] | None:
    """Return all that a plan depends on, or None where that has no name."""
    named: tuple[object, ...] = ()
    if options:
        kinds = tuple(map(type, options.values()))
        if not _NAMEABLE.issuperset(kinds):
            return None
        named = *options.items(), kinds
    try:
        return (
            q.shape, q.stride(), q.dtype, q.device, q.data_ptr() % ALIGNMENT, q.requires_grad,
            k.shape, k.stride(), k.dtype, k.device, k.data_ptr() % ALIGNMENT,
            v.shape, v.stride(), v.dtype, v.device, v.data_ptr() % ALIGNMENT,
            causal, scale, type(scale), return_lse, named,
            impl if impl == "auto" else registry.get(impl),
            torch.are_deterministic_algorithms_enabled(),
            q.dtype is torch.float32 and torch.backends.cuda.matmul.fp32_precision,
        )  # fmt: skip
    except (AttributeError, RuntimeError, TypeError):
        return None  # no tensor, one of no storage or no shape, no name


def _prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: Causal,
    scale: float | None,
    return_lse: bool,  # noqa: FBT001
    impl: str,
    options: dict[str, Any],
) -> registry.Attend:
    """Check the arguments, choose, and return what answers them and all like them."""
    problem = Problem.of(q, k, v, causal=causal)
    chosen, fastest = _choose(impl, problem, q, lse=return_lse)
    how = {"causal": problem.causal, "scale": check_scale(scale, q.shape[-1]), **fastest, **options}
    if q.ndim != 3:  # noqa: PLR2004 - [B, H, T, D]
        return chosen.prepared(q, k, v, **how)
    attend = chosen.prepared(q[:, None], k[:, None], v[:, None], **how)

    def one_head(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> registry.Pair:
        o, lse = attend(q[:, None], k[:, None], v[:, None])
        return o[:, 0], None if lse is None else lse[:, 0]

    return one_head


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
