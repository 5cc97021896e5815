"""Scores: what becomes of a product q @ k.T before the mask and the softmax see it.

A score is x = scale * q @ k.T. With a softcap it is cap * tanh(x / cap), within -cap ... cap, as in
Gemma 2 (Gemma Team, 2024, section 2).
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
