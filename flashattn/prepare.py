"""Prepare calls of our kernels for ``attention``, through the operators or bypassing them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from flashattn.bounds import Bounds
from flashattn.checks import check_scale
from flashattn.dispatch import dispatch_is_trivial
from flashattn.gpus import why_not
from flashattn.mask import UNBOUNDED, Causal, Mask, Window
from flashattn.ops import AttentionCall, BoundCall, Outputs, bind
from flashattn.plan.spec import Extras, Family, Signature, given_extras, signature
from flashattn.problem import Problem
from flashattn.score import of_keys

_forward = torch.ops.flashattn.forward.default  # defined in ``ops``
_backward = torch.ops.flashattn.backward.default


def prepare(
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
    family: Family = "triton",
    deterministic: bool = True,
) -> AttentionCall:
    """Return a function that runs our kernels on inputs like these (see ``registry.Impl``).

    The caller has checked the arguments and asked ``why_not``. The function takes q, k and v, and
    by name those of bounds, alibi_slopes, bias and sink that were given here. It returns
    o [B, H, T, Dv] and lse [B, H, T], and has no second derivative.

    Args:
        q: [B, H, T, D].
        k: [B, G, S, D].
        v: [B, G, S, Dv]; Dv is at most D.
        causal: see ``attention``.
        window: see ``attention``.
        bounds: the whole mask, in place of ``causal`` and ``window``.
        softcap: see ``attention``.
        alibi_slopes: see ``Extras``.
        bias: see ``Extras``.
        sink: see ``Extras``.
        scale: see ``attention``.
        precision: how fp32 is multiplied: "bf16x6", "tf32x3", "tf32", "ieee" (see
            ``plan.precision.input_precision``), or "auto", which means "tf32" if torch's setting
            for CUDA matrix products allows it, else "bf16x6".
        family: "triton" (the portable kernels), "hopper", or "auto" (the faster ones for each
            pass). "hopper" copies tensors that TMA cannot address (an address or stride that is not
            a multiple of 16 bytes, a stride of 0), and decomposes fp32 even for few scores.
        deterministic: whether the same inputs must give the same bits of the gradients. This also
            holds under ``torch.use_deterministic_algorithms``, and always for the portable kernels.
            Otherwise the Hopper kernels sum the gradient of q in any order, for D <= 128.

    Raises:
        ValueError: "hopper" is asked for a scale below 2^-64, or for fp32 as "ieee" or "tf32x3".
    """
    mask, scale = Mask.of(causal, window), check_scale(scale, q.shape[3])
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    how = scale, softcap, precision, family, deterministic
    query_offset = 0 if alibi_slopes is None else k.shape[2] - q.shape[2]
    scored = {"alibi_slopes": alibi_slopes, "bias": bias, "sink": sink}
    if bounds is not None:
        return _attend(q, k, v, Extras(*bounds, **scored), None, None, query_offset, *how)
    band = mask.over(q.shape[2], k.shape[2])
    seen = band.seen_keys
    every = (seen.start, seen.stop) == (0, k.shape[2])
    if not every:  # keys that no query sees may be NaN
        k, v, scored = k[:, :, seen], v[:, :, seen], of_keys(scored, seen, q.shape[2])
        query_offset -= 0 if alibi_slopes is None else seen.start
        band = mask.over(q.shape[2], k.shape[2])
    extras = given_extras(Extras(**scored))
    attend = _attend(q, k, v, extras, band.left, band.right, query_offset, *how)
    if every:
        if not extras and isinstance(attend, BoundCall):
            attend.of_lengths = partial(_of_lengths, mask, how)
        return attend
    return lambda q, k, v, **scored: attend(
        q, k[:, :, seen], v[:, :, seen], **of_keys(scored, seen, q.shape[2])
    )


def _of_lengths(mask: Mask, how: tuple[Any, ...], given: tuple[Signature, ...]) -> BoundCall | None:
    """Bind the kernels for tensors of other lengths, or return None if no query sees some keys.

    ``mask`` and ``how`` do not depend on the lengths, so they are prepared once for all of them.
    """
    seq_kv = given[1][0][2]
    band = mask.over(given[0][0][2], seq_kv)
    every = band.seen_keys == slice(0, seq_kv)
    return bind(given, band.left, band.right, 0, *how) if every else None


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    extras: Sequence[torch.Tensor | None],
    *how: Any,
) -> AttentionCall:
    """Return a function for inputs like these; it bypasses the operators if it may."""
    if dispatch_is_trivial(q, k, v, *extras):
        return bind(signature(q, k, v), *how, extras=extras)

    def dispatched(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bounds: Bounds | tuple[None, None] = (None, None),
        **scored: torch.Tensor,
    ) -> Outputs:
        outputs: Outputs = _forward(q, k, v, *Extras(*bounds, **scored), *how)
        return outputs

    return dispatched


class FlashAttentionTriton(torch.autograd.Function):
    """FlashAttention-2 in Triton as an autograd function: ``apply(Q, K, V, is_causal=False)``.

    Q is ``(batch, N_q, d)``, K and V ``(batch, N_k, d)``; returns ``(batch, N_q, d)``. It saves Q,
    K, V, O and one tensor of shape ``(batch, N_q)``: the logsumexp L.

    Raises:
        ValueError: bad arguments (see ``Problem.of``), or a problem that ``why_not`` refuses.
    """

    @staticmethod
    def forward(  # noqa: D102 - autograd's name; its arguments are positional
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        is_causal: Causal = False,  # noqa: FBT002
    ) -> torch.Tensor:
        reason = why_not(Problem.of(q, k, v, causal=is_causal), q.device)
        if reason is not None:
            raise ValueError(reason)
        heads = [x.unsqueeze(-3) for x in (q, k, v)]
        o, lse = (x.squeeze(1) for x in prepare(*heads, causal=is_causal)(*heads))
        ctx.save_for_backward(q, k, v, o, lse)
        last = Mask.of(is_causal).over(q.shape[1], k.shape[1]).right
        ctx.options = None, last, 0, check_scale(None, q.shape[2]), None, "auto", "triton", True
        return o

    @staticmethod
    def backward(ctx: Any, grad_o: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: D102
        grad_o, *saved = (x.unsqueeze(1) for x in (grad_o, *ctx.saved_tensors))
        dq, dk, dv, *_ = _backward(grad_o, None, *saved, *Extras(), *ctx.options, False)  # noqa: FBT003
        return *(x.squeeze(1) for x in (dq, dk, dv)), None
