"""Scores: scale, softcap, ALiBi and bias, applied to products of q and k before the mask.

``score`` is a ``Score``, ``lies`` a ``ScoreLayout``, ``sizes`` is (seq_q, seq_kv).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashattn.kernels.constants import LOG2E
from flashattn.kernels.portable.memory import multiple
from flashattn.kernels.portable.relative import load_shifted
from flashattn.plan.bias import shifted
from flashattn.plan.spec import Options
from flashattn.plan.support import SMALLEST_SCALE
from flashattn.score import is_relative


class Scale(NamedTuple):
    """The factors on products, each a float or None.

    Args:
        log2: on a score, in exp2.
        factor: on dS; None in the forward.
        sign: on a product; it makes ``log2`` positive, so that scaling keeps maxima; None is 1.
        cap: on a product, in tanh; None is no softcap.
    """

    log2: Any
    factor: Any
    sign: Any
    cap: Any

    @classmethod
    @lru_cache
    def of(cls, options: Options, *, forward: bool) -> Scale:
        """Return the factors of a pass."""
        scale, softcap = options.scale, options.softcap
        factor = None if forward else scale
        if softcap is not None:  # a score is softcap * tanh(product * cap)
            return cls(softcap * LOG2E.value, factor, None, scale / softcap)
        log2 = scale * LOG2E.value
        if not forward or log2 >= SMALLEST_SCALE:
            return cls(log2, factor, None, None)
        # A product with a sign is exact. Scaled scores would be rounded in tiles with a mask, but
        # not in others, where the compiler fuses the product with the subtraction of m.
        size = max(abs(log2), SMALLEST_SCALE)
        return cls(size, factor, log2 / size, None)


class ScoreLayout(NamedTuple):
    """Strides of the tensors of scores: slopes, bias and sinks.

    It is a separate, flat argument, because Triton 3.6 loses a 1 in a tuple within a tuple.

    Args:
        slopes: batch stride of the slopes.
        query_offset: query t is at the position of key t + query_offset.
        batch: batch stride of the bias; None where all share it, as for the next three.
        head: head stride of the bias.
        query: query stride of the bias.
        key: key stride of the bias.
        length: length of each copy of a relative bias, see ``relative``.
        sink: batch stride of the sinks.
    """

    slopes: Any = None
    query_offset: Any = None
    batch: Any = None
    head: Any = None
    query: Any = None
    key: Any = None
    length: Any = None
    sink: Any = None

    @classmethod
    @lru_cache
    def of(cls, options: Options, heads: int) -> ScoreLayout:
        """Return the strides; those of absent tensors are None."""
        made: dict[str, int | None] = {}
        if options.alibi:
            made = {
                "slopes": heads if options.alibi > 1 else 0,
                "query_offset": options.query_offset,
            }
        if options.sink:
            made["sink"] = heads if options.sink > 1 else 0
        if options.bias is not None:
            bias = shifted(options.bias)
            given = zip(("batch", "head", "query", "key"), bias.shape, bias.strides, strict=False)
            made |= {name: None if n == 1 else stride for name, n, stride in given}
            if is_relative(options.bias):
                made |= {"query": None, "key": None, "length": bias.shape[-1]}
        return cls(**made)


class Score(NamedTuple):
    """Operands of the scores of one head, or of all; each except the scale may be None.

    Args:
        scale: a ``Scale``.
        slope: ALiBi slope in base 2, or a pointer to those of all heads.
        bias: pointer to the bias.
        dbias: pointer to the gradient of the bias, unless scores share its elements.
    """

    scale: Any
    slope: Any
    bias: Any
    dbias: Any


@triton.jit
def slope_of(slopes, lies, batch, head):
    """Return the slope of a head, in base 2."""
    return tl.load(slopes + batch * lies.slopes + head) * LOG2E


@triton.jit
def bias_of(bias, lies, batch, head, VECTOR: tl.constexpr):
    """Return a pointer to the bias of a head's first query and key."""
    if lies.batch is not None:
        bias += tl.cast(batch, tl.int64) * multiple(lies.batch, VECTOR)
    if lies.head is not None:
        bias += tl.cast(head, tl.int64) * multiple(lies.head, VECTOR)
    return bias


@triton.jit
def load_bias(
    bias,
    lies,
    start_q,
    start_kv,
    queries,
    keys,
    sizes,
    ALL_KEYS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Load the bias of a tile, or of its rows or columns; ALL_KEYS says that all keys exist."""
    queries, keys = queries + start_q, keys + start_kv
    seq_q, seq_kv = sizes
    if lies.query is not None:
        bias += queries.to(tl.int64) * multiple(lies.query, VECTOR)
    if lies.key is not None:
        bias += keys.to(tl.int64) * lies.key
    CHECKED: tl.constexpr = lies.key is not None and not ALL_KEYS
    there = keys // VECTOR < seq_kv // VECTOR
    if lies.length is not None:
        x = load_shifted(bias, lies.length, queries, keys, seq_q, VECTOR)
    elif lies.query is not None and CHECKED:
        x = tl.load(bias, mask=(queries < seq_q) & there, other=0.0)
    elif lies.query is not None:
        x = tl.load(bias, mask=queries < seq_q, other=0.0)
    elif CHECKED:
        x = tl.load(bias, mask=there, other=0.0)
    else:
        x = tl.load(bias)
    return x.to(tl.float32)


@triton.jit
def in_base_2(
    s,
    score,
    lies,
    start_q,
    start_kv,
    sizes,
    TRANSPOSED: tl.constexpr,
    ALL_KEYS: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """Return the scores in base 2 from products, or from what ``capped`` returned.

    TRANSPOSED says that the tile is [keys, queries]; ALL_KEYS says that all keys exist.
    """
    scale, slope, bias, _ = score
    x = s * scale.log2
    queries, keys = tl.arange(0, CONFIG.BLOCK_Q), tl.arange(0, CONFIG.BLOCK_KV)
    if TRANSPOSED:
        queries, keys = queries[None, :], keys[:, None]
    else:
        queries, keys = queries[:, None], keys[None, :]
    if slope is not None:
        at = queries + (start_q + lies.query_offset - start_kv)
        x -= slope * tl.abs(at.to(tl.float32) - keys.to(tl.float32))
    if bias is not None:
        # A tile begins at a multiple of its size; Triton does not know this of a loop variable.
        start_kv = multiple(start_kv, CONFIG.BLOCK_KV)
        x += LOG2E * load_bias(
            bias, lies, start_q, start_kv, queries, keys, sizes, ALL_KEYS, CONFIG.VECTOR
        )
    return x


@triton.jit
def store_dbias(ds, dbias, start_q, start_kv, sizes, CONFIG: tl.constexpr):
    """Store dS of a tile as the gradient of its bias, which no other scores share."""
    seq_q, seq_kv = sizes
    queries = start_q + tl.arange(0, CONFIG.BLOCK_Q)[:, None]
    keys = multiple(start_kv, CONFIG.BLOCK_KV) + tl.arange(0, CONFIG.BLOCK_KV)[None, :]
    at = dbias + queries.to(tl.int64) * multiple(seq_kv, CONFIG.VECTOR) + keys
    there = (queries < seq_q) & (keys // CONFIG.VECTOR < seq_kv // CONFIG.VECTOR)
    tl.store(at, ds.to(dbias.dtype.element_ty), mask=there)


@triton.jit
def first_state(sink, lies, batch, head, first, BLOCK_Q: tl.constexpr):
    """Return (m, l) of rows that have seen no key: that of a sink, if any, in the first split."""
    m = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_Q], tl.float32)
    if sink is not None:
        logit = tl.load(sink + batch * lies.sink + head) * LOG2E
        m = tl.where(first, logit, m)
        l = tl.where(first, 1.0, l)
    return m, l


@triton.jit
def capped(s, cap):
    """Return tanh(s * cap), within 2 units in the last place.

    It uses exp2 where that loses no accuracy, and a polynomial of least relative error near 0.
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
