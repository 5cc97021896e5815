"""attention(q, k, v): check, pick an implementation, call it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from typing import Any

import torch

import flashattn.impls  # noqa: F401 - registers everyone
from flashattn import registry
from flashattn.arguments import (
    autocast_dtype,
    cast,
    cast_bias,
    check_sizes,
    facts_of,
    of_one_width,
    only_v_differs_in_width,
    scored_by,
    widened,
)
from flashattn.bounds import Bounds
from flashattn.checks import check_among, check_scale
from flashattn.dispatch import dispatch_is_trivial
from flashattn.mask import UNBOUNDED, Causal, Mask, Window
from flashattn.masks import RowMask
from flashattn.plan.precision import PRECISIONS
from flashattn.plan.spec import ALIGNMENT, signature
from flashattn.problem import Problem
from flashattn.resolve import Documents, bounds_of
from flashattn.score import Relative

_deterministic = torch._C._get_deterministic_algorithms  # noqa: SLF001 - torch's wrapper is slower
# The order in which "auto" tries implementations.
FASTEST_FIRST = {
    "cuda": ("hopper", "triton", "tiled"),
    "cpu": ("sdpa", "tiled", "reference"),
    "meta": ("reference",),
}
OURS = (
    *(registry.ASKED - {"bounds"}),
    *("documents", "mask", "return_lse", "impl", "precision", "deterministic"),
)
# Arguments of other libraries that have another name here, or no counterpart.
INSTEAD = {
    "attn_mask": "use mask=flashattn.masks.of(attn_mask), or bias=attn_mask",
    "cu_seqlens": "use documents",
    "cu_seqlens_q": "use documents=(cu_seqlens_q, cu_seqlens_k)",
    "dropout_p": "there is no dropout",
    "enable_gqa": "k and v may have fewer heads than q without it",
    "precision": "PyTorch's settings say how it multiplies",
    "softmax_scale": "use scale",
    "window_size": "use window",
}


def attention(
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
    return_lse: bool = False,
    impl: str = "auto",
    precision: str = "auto",
    deterministic: bool = True,
    **options: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute softmax(scale * q @ k.T + mask) @ v without materializing the score matrix.

    Scores are computed in this order: scale, softcap, ALiBi, bias, mask, sink (see ``score``).

    Query head h reads key/value head h // (H // G). With ``causal=True`` or ``"top_left"``, query t
    sees keys 0 ... t, as in PyTorch. With ``"bottom_right"`` it sees keys 0 ... t + S - T, as in
    flash-attn, so the last query sees every key. A sliding window further limits a query at
    position p to keys p - left ... p + right. Keys and values that no query sees may be NaN.
    Products are accumulated in fp32. ``torch.autocast`` first casts q, k and v, and a bias that
    is not fp32.

    Args:
        q: [B, H, T, D], or [B, T, D] for one head; fp32, fp16 or bf16 (fp64 only in the PyTorch
            implementations). Strides are used as they are if the last dimension is dense;
            otherwise the tensor is copied once.
        k: [B, G, S, D], where G divides H, or [B, S, D].
        v: [B, G, S, Dv], or [B, S, Dv]. The Hopper kernels take Dv up to 128 with D from 129 to
            192. For implementations that need Dv = D, the narrower tensors are padded with zeros.
        causal: False, True, "top_left" or "bottom_right".
        window: (left, right), the number of keys that a query sees before and after its own
            position, both ends inclusive, as in flash-attn's ``window_size``; None means no bound.
            A causal mask has right = 0. The position of query t is t, or t + S - T with
            ``causal="bottom_right"``.
        documents: cu, or (cu_q, cu_k), int32 or int64 [N + 1] on q's device: cumulative lengths of
            packed documents, flash-attn's ``cu_seqlens``. Document i has queries cu_q[i] ...
            cu_q[i + 1] - 1 and sees keys cu_k[i] ... cu_k[i + 1] - 1; ``causal`` and ``window``
            apply within it. Queries after the last document see nothing. On a GPU the host neither
            waits for the values nor checks them (see ``resolve.check_documents``).
        mask: an object of ``flashattn.masks`` that hides further keys.
        softcap: bound on the scores, which become softcap * tanh(score / softcap), as in Gemma 2;
            None means no bound.
        alibi_slopes: fp32 [H] or [B, H], as in flash-attn: subtracts slope * |t + S - T - s| from
            the score of query t and key s. Has no gradient; does not work with ``documents``.
        bias: a tensor in q's dtype or fp32 that broadcasts to [B, H, T, S] ([B, T, S] for one
            head), added to the scores; differentiable. Broadcast dimensions are read with stride 0.
            For a bias that depends on s - t alone, pass ``relative(vector)``. -inf hides a key,
            and so may finite values below -2e38.
        sink: [H], one extra logit per head that takes part in the softmax and has no value, as in
            gpt-oss; differentiable. For an implementation without sinks, it is applied to o and
            lse afterwards, so that implementation must return the logsumexp.
        scale: factor on the scores; None means D ** -0.5.
        return_lse: also return the natural-log logsumexp of each row of scores.
        impl: a name in ``flashattn.names()``, or "auto". On a GPU, "auto" takes our fastest
            implementation that can solve the problem: on an H100 or H200 "hopper" if there is
            enough work. On a CPU, where ours are for study, it takes PyTorch's SDPA; "tiled" with a
            window, documents, a mask, ALiBi or a bias; and the reference for the rest, such as a
            softcap, a sink or the logsumexp alone. A named implementation never falls back: a
            problem that it cannot solve, or not differentiate, is an error.
        precision: how "triton" and "hopper" multiply fp32: "bf16x6", "tf32x3", "tf32", "ieee", or
            "auto", which means "tf32" if torch's setting for CUDA matrix products allows it, else
            "bf16x6". PyTorch implementations follow PyTorch's settings: under ``impl="auto"`` they
            ignore this argument, and if named they accept only "auto".
        deterministic: False lets "hopper" sum the gradient of q in any order for D up to 128 in
            half precision, which is faster; other implementations ignore it. By default "triton"
            and "hopper" give the same bits for the same inputs.
        options: options of the named implementation.

    Returns:
        o [B, H, T, Dv] in q's dtype; with ``return_lse``, (o, lse) with lse [B, H, T] in fp32 (fp64
        for fp64). A query that sees no key has o = 0 and lse = -inf, or lse = the sink, and passes
        a gradient only to the sink. Both outputs are differentiable: any number of times with
        ``impl="reference"``, once with "triton", "hopper" and "tiled". For meta and fake tensors
        only shapes are computed.

    Raises:
        ValueError: an argument does not fit, or ``impl`` cannot solve the problem. The message
            names the argument, what was wanted and what was given, or the reason.
        TypeError: neither this function nor the implementation has such an argument; the message
            names what to use instead.
        NotImplementedError: a second or forward-mode derivative is asked for where there is none.

    Source: Dao, 2023, "FlashAttention-2".
    """
    tensors: dict[str, Any] = {}
    given = causal, window, documents, mask, alibi_slopes, sink
    if documents is not None or mask is not None:
        check_sizes(q, k, v)
        tensors["bounds"] = bounds_of(q, k, Mask.of(causal, window), documents, mask)
        causal, window = False, UNBOUNDED
    scored = alibi_slopes is not None or bias is not None or sink is not None
    if scored and autocast_dtype(q) is None:
        tensors |= scored_by(q, k, v, alibi_slopes, bias, sink, packed=documents is not None)
    key = _key(
        q, k, v, causal, window, tensors, softcap, scale, return_lse, impl, precision,
        deterministic, options,
    )  # fmt: skip
    try:
        attend = _PLANS[key] if key is not None else None
    except KeyError:
        attend = None
    except TypeError:  # an argument is not hashable
        attend = key = None
    if attend is None:
        dtype = autocast_dtype(q) if key is None else None
        if dtype is not None:
            names = "causal", "window", "documents", "mask", "alibi_slopes", "sink"
            options |= zip(names, given, strict=True)
            options |= {
                "bias": cast_bias(dtype, bias),
                "softcap": softcap,
                "scale": scale,
                "impl": impl,
                "return_lse": return_lse,
                "precision": precision,
                "deterministic": deterministic,
            }
            with torch.autocast(q.device.type, enabled=False):
                return attention(*cast(dtype, q, k, v), **options)
        kind = _kind(key) if key is not None and not tensors else None
        known = _PREPARERS.get(kind) if kind is not None else None
        if known is None or key is None:
            check_among("precision", precision, PRECISIONS)
            check_among("deterministic", deterministic, (False, True))
            # Implementations have the same defaults, so only other values are passed.
            options |= {} if precision == "auto" else {"precision": precision}
            options |= {} if deterministic else {"deterministic": False}
            prepare, any_length = _preparer(
                q, k, v, causal, window, tensors, softcap, scale, return_lse, impl, options
            )
            attend = prepare(q, k, v)
            if kind is not None and any_length:
                _keep(_PREPARERS, kind, (prepare, getattr(attend, "of_lengths", None)))
        else:
            prepare, of_lengths = known
            attend = (of_lengths and of_lengths(key[0])) or prepare(q, k, v)
        if key is not None:
            # Calls without gradients bypass autograd and launch directly.
            attend = attend if key[1] or tensors else getattr(attend, "past_autograd", attend)
            _keep(_PLANS, key, attend)
    o, lse = attend(q, k, v, **tensors)
    return o if lse is None or not return_lse else (o, lse)


# Checking costs the host more than launching, and a training loop repeats its calls. A call that
# has passed the checks is cached under everything that they looked at.
_PLANS: dict[tuple[object, ...], registry.AttentionCall] = {}
# The chosen implementation and its options, reusable for other sequence lengths.
Preparer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], registry.AttentionCall]
_PREPARERS: dict[tuple[object, ...], tuple[Preparer, Any]] = {}
_MOST_PLANS = 1024  # bounds the memory when shapes keep changing
# Types of options that may be part of a cache key: they keep no other object alive.
_NAMEABLE = frozenset({str, bool, int, float, type(None)})


def _key(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: Causal,
    window: Window,
    tensors: dict[str, Any],
    softcap: float | None,
    scale: float | None,
    return_lse: bool,  # noqa: FBT001 - by position costs less
    impl: str,
    precision: str,
    deterministic: bool,  # noqa: FBT001
    options: dict[str, Any],
) -> tuple[object, ...] | None:
    """Return the cache key of a call, or None if it has none or must go through the dispatcher."""
    others = [x for x in tensors.values() if type(x) is not Bounds] if tensors else ()
    if not dispatch_is_trivial(q, k, v, *others):
        return None
    named: tuple[object, ...] = ()
    if options:
        kinds = tuple(map(type, options.values()))
        if not _NAMEABLE.issuperset(kinds):
            return None
        named = *options.items(), kinds
    try:
        if window is not UNBOUNDED:
            named = *named, *window, *map(type, window)  # True == 1
        grad = q.requires_grad or k.requires_grad or v.requires_grad
        for name, x in tensors.items():
            one = x.keys if isinstance(x, Bounds) else x  # queries has the same layout
            named = *named, name, *signature(one)
            if not isinstance(x, Bounds):
                grad = grad or x.requires_grad
        return (
            # ``signature(q, k, v)``, inlined.
            (
                (q.shape, q.stride(), q.dtype, q.device, q.data_ptr() % ALIGNMENT),
                (k.shape, k.stride(), k.dtype, k.device, k.data_ptr() % ALIGNMENT),
                (v.shape, v.stride(), v.dtype, v.device, v.data_ptr() % ALIGNMENT),
            ),
            grad,
            causal, softcap, type(softcap), scale, type(scale), return_lse, precision,
            deterministic, named,
            impl if impl == "auto" else registry.get(impl),
            _deterministic(),
            q.dtype is torch.float32 and torch.backends.cuda.matmul.fp32_precision,
        )  # fmt: skip
    except (AttributeError, RuntimeError, TypeError):
        return None  # no tensor, or one without storage or shape; or impl is no name


def _keep(known: dict[tuple[object, ...], Any], key: tuple[object, ...], x: object) -> None:
    """Cache x under a key; clear the cache first if it is full."""
    if len(known) >= _MOST_PLANS:
        known.clear()
    known[key] = x


def _kind(key: tuple[Any, ...]) -> tuple[object, ...] | None:
    """Return a key without lengths and strides, or None if one is 0 or those of k and v differ."""
    (q, _, *of_q, _), (k, _, *of_k, _), (v, _, *of_v, _) = key[0]
    if 0 in q or 0 in k or k[-2:-1] != v[-2:-1]:
        return None
    sizes = q[:-2], q[-1:], k[:-2], k[-1:], v[:-2], v[-1:]
    return *sizes, *of_q, *of_k, *of_v, key[1:]


def _preparer(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: Causal,
    window: Window,
    tensors: dict[str, Any],
    softcap: float | None,
    scale: float | None,
    return_lse: bool,  # noqa: FBT001
    impl: str,
    options: dict[str, Any],
) -> tuple[Preparer, bool]:
    """Check the arguments and choose an implementation.

    Returns:
        A function that prepares a call for q, k and v and for all inputs with their signature, and
        whether it also works for other lengths.
    """
    alike = of_one_width(q, k, v) if only_v_differs_in_width(q, k, v) else (q, k, v)
    problem = Problem.of(*alike, causal=causal, window=window, softcap=softcap, **facts_of(tensors))
    learned = (x for x in tensors.values() if isinstance(x, torch.Tensor))
    grad = any(x.requires_grad for x in (q, k, v, *learned))
    wanted = {"grad": grad, "lse": return_lse}
    chosen, fastest = _choose(impl, problem, q.device, **wanted)
    taken = {name: x for name, x in options.items() if _takes(chosen, name, auto=impl == "auto")}
    scale, columns = check_scale(scale, q.shape[-1]), v.shape[-1]
    how = {**problem.keywords, "scale": scale, **fastest, **taken, **tensors}
    how.pop("documents", None)
    if columns <= q.shape[-1]:
        own = problem if columns == problem.dv else replace(problem, value_dim=columns)
        if own is problem or chosen.why_not(own, q.device, **wanted) is None:
            return partial(_of_heads, chosen, how), chosen.any_length
    return partial(_widened, chosen, how), chosen.any_length


def _widened(
    chosen: registry.Impl, how: dict[str, Any], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> registry.AttentionCall:
    """Prepare a call of an implementation that needs Dv = D: inputs are padded, and o is cut."""
    attend, columns = _of_heads(chosen, how, *widened(q, k, v)), v.shape[-1]

    def narrowed(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **tensors: Any
    ) -> registry.Pair:
        o, lse = attend(*widened(q, k, v), **tensors)
        return o[..., :columns], lse

    return narrowed


def _of_heads(
    chosen: registry.Impl, how: dict[str, Any], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> registry.AttentionCall:
    """Prepare a call for tensors like these, with or without a head dimension."""
    if q.ndim != 3:  # noqa: PLR2004 - [B, H, T, D]
        return chosen.prepared(q, k, v, **how)
    attend = chosen.prepared(q[:, None], k[:, None], v[:, None], **how)

    def one_head(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **tensors: Any
    ) -> registry.Pair:
        o, lse = attend(q[:, None], k[:, None], v[:, None], **tensors)
        return o[:, 0], None if lse is None else lse[:, 0]

    return one_head


def _takes(impl: registry.Impl, name: str, *, auto: bool) -> bool:
    """Return whether an implementation takes an option; if not, the option may be dropped.

    Raises:
        TypeError: the implementation does not know the option and must not ignore it.
    """
    if impl.options is None or name in impl.options:
        return True
    if name == "deterministic" or (auto and name == "precision"):
        return False
    near = get_close_matches(name, [*OURS, *impl.options], n=1)
    own = ", ".join(sorted(impl.options)) or "none"
    instead = f"use {near[0]}" if near else f"its own options are {own}"
    msg = f'{name}: no argument of attention(impl="{impl.name}"); {INSTEAD.get(name, instead)}'
    raise TypeError(msg)


def _choose(
    name: str, problem: Problem, device: torch.device, *, grad: bool, lse: bool
) -> tuple[registry.Impl, dict[str, Any]]:
    """Return implementation ``name``, or the first of "auto" that fits, and its options."""
    asked = FASTEST_FIRST.get(device.type, ("tiled",)) if name == "auto" else (name,)
    reasons = []
    for candidate in asked:
        impl = registry.get(candidate)
        reason = impl.why_not(problem, device, grad=grad, lse=lse)
        if reason is None:
            options = impl.fastest(problem, device) if name == "auto" else {}
            if options is not None:
                return impl, options
            reason = f"{impl.name} is not the fastest here"
        reasons.append(reason)
    raise ValueError(f"impl: {'; '.join(reasons)}")
