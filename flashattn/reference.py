"""The definition: softmax(scale * q @ k.T + mask) @ v, in the shortest PyTorch that reads as it.

Every other implementation is judged by this one, so it shares no code with them. It runs in any
floating dtype on any device and is differentiable to any order; it holds the whole score matrix.
"""

from __future__ import annotations

import torch


def reference_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, diagonal: int | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention and its natural-log logsumexp as written on paper.

    Args:
        q: [B, H, T, D].
        k: [B, G, S, D]; G divides H.
        v: [B, G, S, D].
        diagonal: query t sees keys 0 ... t + diagonal; None lets it see all.
        scale: factor on the scores.

    Returns:
        o [B, H, T, D] and lse [B, H, T], both in q's dtype. A query that sees no key has o = 0 and
        lse = -inf, and passes no gradient.

    Source: Vaswani et al., 2017, equation 1.
    """
    group = q.shape[1] // max(k.shape[1], 1)
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = (q @ k.mT) * scale  # [B, H, T, S]
    rows = torch.arange(q.shape[2], device=q.device)[:, None]
    keys = torch.arange(k.shape[2], device=q.device)[None, :]
    last = k.shape[2] if diagonal is None else rows + diagonal
    hidden = (keys > last).expand(scores.shape[-2:])  # [T, S]
    dead = hidden.all(dim=-1, keepdim=True)  # [T, 1]; an empty row of keys is dead, too
    # A dead row is computed as if it saw everything, then replaced: softmax never meets a row of
    # -inf.
    scores = scores.masked_fill(hidden & ~dead, -torch.inf)
    p = scores.softmax(dim=-1).masked_fill(dead, 0)
    lse = scores.logsumexp(dim=-1).masked_fill(dead[:, 0], -torch.inf)
    return p @ v, lse
