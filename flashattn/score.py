"""Scores: what becomes of a product q @ k.T before the mask and the softmax see it.

A score is x = scale * q @ k.T. With a softcap it is cap * tanh(x / cap), within -cap ... cap, as in
Gemma 2 (Gemma Team, 2024, section 2). Then, in this order, something is added.

ALiBi (Press et al., 2022) takes slope * |t + S - T - s| off the score of query t and key s, with a
slope for each head: the last query stands at the last key, as in flash-attn.

A sink is one more logit of a head, not scaled and not capped, which takes its share of each row's
softmax and has no value, as in gpt-oss (OpenAI, 2025).
"""

from __future__ import annotations

from typing import NamedTuple

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


class Terms(NamedTuple):
    """What is added to the scores [..., T, S] of some queries and keys.

    Args:
        alibi_slopes: [..., 1, 1], or None.
        diagonal: for ALiBi, query t stands at key t + diagonal.
    """

    alibi_slopes: torch.Tensor | None = None
    diagonal: int = 0

    @classmethod
    def of(cls, q: torch.Tensor, k: torch.Tensor, alibi_slopes: torch.Tensor | None) -> Terms:
        """Return what is added to the scores of q [B, H, T, D] and k [B, G, S, D].

        Args:
            q: as above.
            k: as above.
            alibi_slopes: [B or 1, H], or None.
        """
        slopes = None if alibi_slopes is None else alibi_slopes[..., None, None]
        return cls(slopes, k.shape[2] - q.shape[2])

    def added(self, scores: torch.Tensor, rows: slice, keys: slice) -> torch.Tensor:
        """Return the scores of some queries and keys with what is added to them."""
        if self.alibi_slopes is None:
            return scores
        t, s = (torch.arange(x.start, x.stop, device=scores.device) for x in (rows, keys))
        slopes = self.alibi_slopes.to(torch.promote_types(scores.dtype, torch.float32))
        return scores - (slopes * (t[:, None] + self.diagonal - s).abs()).to(scores.dtype)


def check_alibi_slopes(
    slopes: object, batch: int, heads: int, device: torch.device
) -> torch.Tensor:
    """Return the slopes of all heads, dense, [1, H] or [B, H].

    Raises:
        ValueError: ``slopes`` is no fp32 tensor [H] or [B, H] on that device, or wants a gradient.
    """
    if not isinstance(slopes, torch.Tensor) or slopes.dtype != torch.float32:
        got = slopes.dtype if isinstance(slopes, torch.Tensor) else type(slopes).__name__
        raise ValueError(f"alibi_slopes: wanted an fp32 tensor, got {got}")
    if tuple(slopes.shape) not in ((heads,), (batch, heads)):
        wanted = f"shape [{heads}] or [{batch}, {heads}]"
        raise ValueError(f"alibi_slopes: wanted {wanted}, got {list(slopes.shape)}")
    if slopes.device != device:
        raise ValueError(f"alibi_slopes: wanted q's device, {device}, got {slopes.device}")
    if slopes.requires_grad:
        raise ValueError("alibi_slopes: they have no gradient, wanted slopes.detach()")
    return slopes.reshape(-1, heads).contiguous()


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
