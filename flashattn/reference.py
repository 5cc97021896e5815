"""The definition, softmax(scale * q @ k.T + mask) @ v, in the shortest PyTorch that reads like it.

Every other implementation is tested against this one, so it shares only the definitions of masks
and scores with them. It runs in any floating dtype on any device, is differentiable to any order,
and stores the whole score matrix.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from flashattn import score
from flashattn.bounds import Bounds
from flashattn.mask import Mask
from flashattn.score import Terms


def reference_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: Mask,
    scale: float,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    bounds: Bounds | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention and its natural-log logsumexp as written on paper.

    Args:
        q: [B, H, T, D].
        k: [B, G, S, D]; G divides H.
        v: [B, G, S, Dv].
        mask: which keys a query sees.
        scale: factor on the scores.
        softcap: bound on the scores; None means no bound.
        alibi_slopes: [B or 1, H], see ``score``; None means no ALiBi.
        bias: [B or 1, H or 1, T or 1, S or 1], or [B or 1, H or 1, T + S - 1], or None.
        sink: [B or 1, H], or None.
        bounds: the whole mask, in place of ``mask``.

    Returns:
        o [B, H, T, Dv] and lse [B, H, T], both in q's dtype. A query that sees no key has o = 0 and
        lse = -inf, or lse = the sink, and passes a gradient only to the sink.

    Source: Vaswani et al., 2017, equation 1.
    """
    group, terms = q.shape[1] // max(k.shape[1], 1), Terms.of(q, k, alibi_slopes, bias)
    queries, keys = slice(0, q.shape[2]), slice(0, k.shape[2])
    # Keys that no query sees may be NaN, which a weight of 0 does not cancel.
    if bounds is None:
        band = mask.over(q.shape[2], k.shape[2])
        keys = band.seen_keys
        t, s = (torch.arange(x.start, x.stop, device=q.device) for x in (queries, keys))
        k, v = k[:, :, keys], v[:, :, keys]
        seen = band.sees(t[:, None], s).expand(len(t), len(s))  # [T, S]
    else:
        q, k, v = bounds.without_unseen(q, k, v)
        seen = bounds.seen[:, None]  # [B or 1, 1, T, S]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = score.scores(score.product(q, k.mT), scale, softcap)  # [B, H, T, S]
    scores = terms.added(scores, queries, keys)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sink is not None:  # one more key, whose value is 0
        column = sink.to(scores.dtype)[..., None, None].expand(*scores.shape[:-1], 1)
        scores, v = torch.cat([scores, column], dim=-1), pad(v, (0, 0, 0, 1))
    fully_masked = (scores == -torch.inf).all(dim=-1, keepdim=True)  # [..., T, 1]; also if S = 0
    # Such a row is computed with scores of 0, then replaced, so softmax never gets a row of -inf.
    scores = scores.masked_fill(fully_masked, 0)
    p = scores.softmax(dim=-1).masked_fill(fully_masked, 0)
    lse = scores.logsumexp(dim=-1).masked_fill(fully_masked[..., 0], -torch.inf)
    o = score.product(p, v)
    return o if bounds is None else bounds.without_fully_masked(o), lse
