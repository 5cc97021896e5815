"""Scores: what becomes of the products of q and k before the mask.

``score`` is (scale, slope, layout): a ``Scale``; of the head that a program computes the slope of
ALiBi, in base 2, or None; and a ``ScoreLayout``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashattn.kernels.constants import LOG2E
from flashattn.plan.spec import Options
from flashattn.plan.support import SMALLEST_SCALE


class Scale(NamedTuple):
    """The factors on products, each a float or None.

    Args:
        log2: on a score, where it enters exp2.
        factor: on dS; None forward.
        sign: what makes ``log2`` positive, so that it does not move a maximum; None is 1.
        cap: on a product, where it enters tanh; None is no softcap.
    """

    log2: Any
    factor: Any
    sign: Any
    cap: Any

    @classmethod
    def of(cls, options: Options, *, forward: bool) -> Scale:
        """Return the factors of a pass."""
        scale, softcap = options.scale, options.softcap
        factor = None if forward else scale
        if softcap is not None:  # a score is softcap * tanh(product * cap)
            return cls(softcap * LOG2E.value, factor, None, scale / softcap)
        log2 = scale * LOG2E.value
        if not forward or log2 >= SMALLEST_SCALE:
            return cls(log2, factor, None, None)
        # The product with a sign is exact: were scores rounded, those in a tile with a mask would
        # be, and in others not, where the compiler joins the product with the difference from m.
        size = max(abs(log2), SMALLEST_SCALE)
        return cls(size, factor, log2 / size, None)


class ScoreLayout(NamedTuple):
    """How the tensors lie that scores are made with.

    Args:
        slopes: from batch to batch in the slopes.
        diagonal: query t stands at key t + diagonal.
    """

    slopes: Any
    diagonal: Any


@triton.jit
def slope_of(slopes, layout, batch, head):
    """Return the slope of a head, in base 2; None where there are none."""
    if slopes is None:
        slope = None
    else:
        slope = tl.load(slopes + batch * layout.slopes + head) * LOG2E
    return slope


@triton.jit
def add_terms(
    x, score, start_q, start_kv, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Return scores in base 2 with ALiBi added; TRANSPOSED is a tile [keys, queries]."""
    _, slope, layout = score
    queries, keys = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_KV)
    if TRANSPOSED:
        queries, keys = queries[None, :], keys[:, None]
    else:
        queries, keys = queries[:, None], keys[None, :]
    if slope is not None:
        queries += start_q + layout.diagonal - start_kv
        x -= slope * tl.abs(queries.to(tl.float32) - keys.to(tl.float32))
    return x


@triton.jit
def in_base_2(
    s, score, start_q, start_kv, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Return the scores in base 2 of products, or of what ``capped`` made of them."""
    x = s * score[0].log2
    if score[1] is not None:
        x = add_terms(x, score, start_q, start_kv, BLOCK_Q, BLOCK_KV, TRANSPOSED)
    return x


@triton.jit
def capped(s, cap):
    """Return tanh(s * cap), within 2 units in the last place.

    By exp2 where that loses nothing, by a polynomial of least relative error nearer to 0.
    """
    x = s * cap
    square = x * x
    p = square * -0.0056039529 + 0.0205517541
    p = p * square + -0.0537141178
    p = p * square + 0.133311529
    p = p * square + -0.333332721
    size = tl.abs(x)
    e = tl.exp2(size * (-2 * LOG2E))
    far = 1 - 2 * e / (1 + e)
    return tl.where(size < 0.625, x + x * (square * p), tl.where(x < 0, -far, far))
