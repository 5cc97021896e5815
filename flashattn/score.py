"""Scores: what becomes of a product q @ k.T before the mask and the softmax see it.

A score is x = scale * q @ k.T. With a softcap it is cap * tanh(x / cap), within -cap ... cap, as in
Gemma 2 (Gemma Team, 2024, section 2).

A sink is one more logit of a head, not scaled and not capped, which takes its share of each row's
softmax and has no value, as in gpt-oss (OpenAI, 2025).
"""

from __future__ import annotations

import torch

SMALLEST = 1e-6  # softcap; one over it is the largest


def check_softcap(softcap: float | None) -> float | None:
    """Return the bound on the scores, a float, or None for none.

    Raises:
        ValueError: ``softcap`` is neither None nor a number that fp32 can divide by.
    """
    if softcap is None:
        return None
    number = isinstance(softcap, (int, float)) and not isinstance(softcap, bool)
    if not (number and SMALLEST <= softcap <= 1 / SMALLEST):
        wanted = f"a number from {SMALLEST} to {1 / SMALLEST:.0f} or None"
        msg = f"softcap: wanted {wanted}, got {softcap!r}"
        raise ValueError(msg)
    return float(softcap)


def scores(products: torch.Tensor, scale: float, softcap: float | None) -> torch.Tensor:
    """Return the scores of products q @ k.T, of any shape."""
    if softcap is None:
        return products * scale
    return softcap * (products * (scale / softcap)).tanh()


def slope(given: torch.Tensor, softcap: float) -> torch.Tensor:
    """Return d score / d (scale * product) where the scores are ``given`` and capped."""
    return 1 - (given / softcap).square()


def check_sink(sink: object, heads: int, device: torch.device) -> torch.Tensor:
    """Return the sinks of all heads.

    Raises:
        ValueError: ``sink`` is no floating-point tensor [H] on that device.
    """
    if not isinstance(sink, torch.Tensor) or not sink.is_floating_point():
        got = sink.dtype if isinstance(sink, torch.Tensor) else type(sink).__name__
        raise ValueError(f"sink: wanted a floating-point tensor, got {got}")
    if tuple(sink.shape) != (heads,):
        raise ValueError(f"sink: wanted shape [{heads}], one for each head, got {list(sink.shape)}")
    if sink.device != device:
        raise ValueError(f"sink: wanted q's device, {device}, got {sink.device}")
    return sink


def with_sink(
    o: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return o and lse of rows that share their softmax with a sink, differentiable.

    Args:
        o: [..., H, T, D] without it, or [B, T, D] of one head.
        lse: [..., H, T], or [B, T].
        sink: [H].
    """
    logits = sink.to(lse.dtype)[:, None]
    dead = lse == -torch.inf  # o is 0
    seen = lse.masked_fill(dead, 0)
    share = torch.sigmoid(seen - logits)
    whole = torch.where(dead, logits, torch.logaddexp(seen, logits))
    return (o * share[..., None]).to(o.dtype), whole
