"""Scores: how the product q @ k.T is changed before the mask and the softmax.

A score is x = scale * q @ k.T. With a softcap it is cap * tanh(x / cap), within -cap ... cap, as in
Gemma 2 (Gemma Team, 2024, section 2). Then the following are applied, in this order.

ALiBi (Press et al., 2022) subtracts slope * |t + S - T - s| from the score of query t and key s,
with one slope per head. The last query is aligned with the last key, as in flash-attn.

A bias is any tensor that broadcasts to the scores, or a vector of T + S - 1 elements, one for each
s - t (``relative``). A bias of -inf hides a key.

A sink is one extra logit per head, neither scaled nor capped, that takes part in each row's softmax
and has no value, as in gpt-oss (OpenAI, 2025). A sink of -inf has no effect and gradient 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn.functional import pad

from flashattn.checks import dense

RELATIVE_DIMS = 3
SMALLEST = 1e-6  # smallest softcap; its inverse is the largest


def check_softcap(softcap: float | None) -> float | None:
    """Check the softcap, and return it as a float, or None.

    Raises:
        ValueError: ``softcap`` is neither None nor a number that fp32 can divide by.
    """
    if softcap is None:
        return None
    number = isinstance(softcap, (int, float)) and not isinstance(softcap, bool)
    if not (number and SMALLEST <= softcap <= 1 / SMALLEST):
        wanted = f"a number from {SMALLEST} to {1 / SMALLEST:.0f} or None"
        raise ValueError(f"softcap: wanted {wanted}, got {softcap!r}")
    return float(softcap)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a @ b; on a CPU, half precision is multiplied in fp32, which is far faster."""
    if a.is_cpu and a.dtype in (torch.bfloat16, torch.float16):
        return (a.float() @ b.float()).to(a.dtype)
    return a @ b


def scores(products: torch.Tensor, scale: float, softcap: float | None) -> torch.Tensor:
    """Return the scores of products q @ k.T, of any shape."""
    if softcap is None:
        return products * scale
    return softcap * (products * (scale / softcap)).tanh()


def slope(given: torch.Tensor, softcap: float) -> torch.Tensor:
    """Return d score / d (scale * product) of capped scores."""
    return 1 - (given / softcap).square()


class Shaped(Protocol):
    """A tensor, or a description of one."""

    @property
    def shape(self) -> torch.Size:
        """Its sizes."""


@dataclass(frozen=True, eq=False)
class Relative:
    """A bias that depends on s - t alone; ``relative`` makes one.

    Args:
        vector: [H or 1, T + S - 1], or [B or 1, H or 1, T + S - 1].
    """

    vector: torch.Tensor


def relative(vector: torch.Tensor) -> Relative:
    """Return a bias for ``attention`` that adds vector[s - t + T - 1] to score (t, s), as in T5.

    It takes O(T + S) memory, and its gradient is that of the vector.

    Args:
        vector: [H or 1, T + S - 1], or [B or 1, H or 1, T + S - 1]; its dtype is q's or fp32.

    Raises:
        ValueError: ``vector`` is not such a tensor. In ``attention``: its sizes do not fit.
    """
    if not isinstance(vector, torch.Tensor) or vector.ndim not in (2, 3):
        got = list(vector.shape) if isinstance(vector, torch.Tensor) else type(vector).__name__
        raise ValueError(f"vector: wanted [H, T + S - 1] or [B, H, T + S - 1], got {got}")
    return Relative(vector)


class Terms(NamedTuple):
    """The terms that are added to the scores [..., T, S] of some queries and keys.

    Args:
        alibi_slopes: [..., 1, 1], or None.
        bias: [..., T or 1, S or 1], or None.
        relative: [..., T + S - 1], a bias for each s - t, or None.
        query_offset: for ALiBi, query t is aligned with key t + query_offset.
        seq_q: T.
    """

    alibi_slopes: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    relative: torch.Tensor | None = None
    query_offset: int = 0
    seq_q: int = 0

    @classmethod
    def of(
        cls,
        q: torch.Tensor,
        k: torch.Tensor,
        alibi_slopes: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> Terms:
        """Return the terms for the scores of q [B, H, T, D] and k [B, G, S, D].

        Args:
            q: as above.
            k: as above.
            alibi_slopes: [B or 1, H], or None.
            bias: [B or 1, H or 1, T or 1, S or 1], or [B or 1, H or 1, T + S - 1], or None.
        """
        slopes = None if alibi_slopes is None else alibi_slopes[..., None, None]
        flat = bias is not None and is_relative(bias)
        matrix, vector = (None, bias) if flat else (bias, None)
        return cls(slopes, matrix, vector, k.shape[2] - q.shape[2], q.shape[2])

    def added(self, scores: torch.Tensor, rows: slice, keys: slice) -> torch.Tensor:
        """Return the scores of some queries and keys with the terms added."""
        if self.alibi_slopes is not None:
            t, s = (torch.arange(x.start, x.stop, device=scores.device) for x in (rows, keys))
            slopes = self.alibi_slopes.to(torch.promote_types(scores.dtype, torch.float32))
            scores = scores - (slopes * (t[:, None] + self.query_offset - s).abs()).to(scores.dtype)
        if self.bias is not None:
            part = self.bias[..., _within(self.bias, -2, rows), _within(self.bias, -1, keys)]
            scores = scores + part.to(scores.dtype)
        if self.relative is not None and rows.stop == rows.start:
            scores = scores + self.relative[..., :0, None].to(scores.dtype)
        elif self.relative is not None:
            width = keys.stop - keys.start  # row t is the window that begins at T - 1 - t
            windows = self.relative[..., self._distances(rows, keys)].unfold(-1, width, 1)
            scores = scores + windows.flip(-2).to(scores.dtype)
        return scores

    def add_gradient(self, dbias: torch.Tensor, ds: torch.Tensor, rows: slice, keys: slice) -> None:
        """Add the gradient of some scores to the gradient of their bias."""
        if self.bias is not None:
            part = dbias[..., _within(dbias, -2, rows), _within(dbias, -1, keys)]
            part += ds.sum_to_size(part.shape)
        elif self.relative is not None and rows.stop > rows.start:
            part = dbias[..., self._distances(rows, keys)]
            part += _sum_by_distance(ds).sum_to_size(part.shape)

    def _distances(self, rows: slice, keys: slice) -> slice:
        """Return the elements of a relative bias that some queries and keys use."""
        first = keys.start - rows.stop + self.seq_q
        return slice(first, first + (rows.stop - rows.start) + (keys.stop - keys.start) - 1)


def _within(x: torch.Tensor, dim: int, rows: slice) -> slice:
    """Return the rows of x that ``rows`` read: the same, or the only one if x is broadcast."""
    return rows if x.shape[dim] > 1 else slice(None)


def _sum_by_distance(x: torch.Tensor) -> torch.Tensor:
    """Return the sums of x [..., R, C] along its diagonals, [..., R + C - 1], in a fixed order.

    Rows are padded to R + C elements and read as rows of R + C - 1, which shifts each by one more.
    """
    rows, columns = x.shape[-2:]
    laid = pad(x.flip(-2), (0, rows)).flatten(-2)[..., : rows * (rows + columns - 1)]
    return laid.unflatten(-1, (rows, rows + columns - 1)).sum(-2)


def is_relative(bias: Shaped) -> bool:
    """Return whether a bias has an element for each distance: [B or 1, H or 1, T + S - 1]."""
    return len(bias.shape) == RELATIVE_DIMS


def dimensions(bias: torch.Tensor | None) -> str:
    """Return the dimensions of a bias as ``Problem`` names them; "" if there is none."""
    if bias is None:
        return ""
    letters = "bhr" if is_relative(bias) else "bhts"
    named = [x if n != 1 or x == "r" else "1" for x, n in zip(letters, bias.shape, strict=True)]
    return "".join(named)


def of_keys(scored: dict[str, Any], keys: slice, seq_q: int) -> dict[str, Any]:
    """Return ALiBi slopes, bias and sink for a slice of the keys.

    Args:
        scored: these tensors by name, as an implementation takes them; each may be None.
        keys: the keys that are left.
        seq_q: T.
    """
    bias = scored.get("bias")
    if bias is None:
        return scored
    if is_relative(bias):
        keys = slice(keys.start, keys.stop + max(seq_q - 1, 0))
        return scored | {"bias": bias[..., keys]}
    return scored | {"bias": bias[..., _within(bias, -1, keys)]}


def check_alibi_slopes(
    slopes: object, batch: int, heads: int, device: torch.device
) -> torch.Tensor:
    """Return the slopes of all heads, dense, [1, H] or [B, H].

    Raises:
        ValueError: ``slopes`` is not fp32 [H] or [B, H] on that device, or requires a gradient.
    """
    slopes = dense("alibi_slopes", slopes)
    if slopes.dtype != torch.float32:
        raise ValueError(f"alibi_slopes: wanted an fp32 tensor, got {slopes.dtype}")
    if tuple(slopes.shape) not in ((heads,), (batch, heads)):
        wanted = f"shape [{heads}] or [{batch}, {heads}]"
        raise ValueError(f"alibi_slopes: wanted {wanted}, got {list(slopes.shape)}")
    if slopes.device != device:
        raise ValueError(f"alibi_slopes: wanted q's device, {device}, got {slopes.device}")
    if slopes.requires_grad:
        raise ValueError("alibi_slopes: they have no gradient, wanted slopes.detach()")
    return slopes.reshape(-1, heads).contiguous()


def check_bias(bias: object, sizes: tuple[int, int, int, int], q: torch.Tensor) -> torch.Tensor:
    """Return the bias, [B or 1, H or 1, T or 1, S or 1] or, if relative, [.., .., T + S - 1].

    Args:
        bias: a tensor, or what ``relative`` returns.
        sizes: B, H, T, S.
        q: [B, H, T, D], or [B, T, D] for one head; the bias then has no head dimension.

    Raises:
        ValueError: it does not broadcast to the scores, or has another dtype or device.
    """
    flat = isinstance(bias, Relative)
    x = dense("bias", bias.vector if isinstance(bias, Relative) else bias)
    if x.dtype not in (q.dtype, torch.float32):
        raise ValueError(f"bias: wanted a tensor of q's dtype, {q.dtype}, or fp32, got {x.dtype}")
    if x.device != q.device:
        raise ValueError(f"bias: wanted q's device, {q.device}, got {x.device}")
    batch, heads, seq_q, seq_kv = sizes
    wanted = [batch, heads, max(seq_q + seq_kv - 1, 0)] if flat else [*sizes]
    shape = list(x.shape)
    if not flat and q.ndim == 3 and x.ndim == 3:  # noqa: PLR2004 - [B, T, S]
        x = x[:, None]
    if x.ndim < len(wanted):
        x = x[(None,) * (len(wanted) - x.ndim)]
    fits = [
        n == size or (n == 1 and not (flat and i == len(wanted) - 1))
        for i, (n, size) in enumerate(zip(x.shape, wanted, strict=False))
    ]
    if x.ndim != len(wanted) or not all(fits):
        raise ValueError(f"bias: wanted what broadcasts to {wanted}, got {shape}")
    return x.resolve_neg()  # kernels read its memory, which a lazily negated view does not have


def check_sink(sink: object, heads: int, q: torch.Tensor) -> torch.Tensor:
    """Return the sinks of all heads, [1, H] in fp32, or fp64 if q is.

    Raises:
        ValueError: ``sink`` is not a floating-point tensor [H] on q's device.
    """
    sink = dense("sink", sink)
    if not sink.is_floating_point():
        raise ValueError(f"sink: wanted a floating-point tensor, got {sink.dtype}")
    if tuple(sink.shape) != (heads,):
        raise ValueError(f"sink: wanted shape [{heads}], one for each head, got {list(sink.shape)}")
    if sink.device != q.device:
        raise ValueError(f"sink: wanted q's device, {q.device}, got {sink.device}")
    return sink.to(torch.promote_types(q.dtype, torch.float32))[None].contiguous()


def with_sink(
    o: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return o and lse with a sink in the softmax of each row; differentiable.

    Args:
        o: [B, H, T, D], computed without the sink.
        lse: [B, H, T].
        sink: [B or 1, H].
    """
    logits = sink.to(lse.dtype)[..., None]
    logits = logits.masked_fill(logits == -torch.inf, -torch.inf)  # no sink, and no gradient
    dead = lse == -torch.inf  # o is 0
    seen = lse.masked_fill(dead, 0)
    # By the smaller exponential: sigmoid and logaddexp overflow where a share is denormal.
    above = seen - logits
    small = torch.where(above > 0, -above, above).exp()
    share = torch.where(above > 0, 1, small) / (1 + small)
    larger = torch.where(above > 0, seen, logits)
    whole = torch.where(dead, logits, larger + small.log1p())
    return (o * share[..., None]).to(o.dtype), whole
