"""Bounds: a mask as one interval of keys for each query, stored on the device.

Query t sees keys ``keys[t]``, a half-open interval, and key s is seen by queries ``queries[s]``:
the same mask transposed. Neither end of an interval decreases from one row to the next, so tiles,
their masks and the order of additions in the backward are found as for a band (see ``mask``). The
kernels read nothing else: a mask costs two numbers per row, and a CUDA graph may be replayed with
other values.

The bounds of packed documents are computed from cumulative lengths by one launch, and the host does
not wait.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch._C._functorch import is_batchedtensor

from flashattn.mask import BlockRange, Mask, tiles_between

_LIBRARY = torch.library.Library("flashattn", "FRAGMENT")
_LIBRARY.define(
    "document_bounds(Tensor cu_q, Tensor cu_k, SymInt seq_q, SymInt seq_kv, SymInt? left,"
    " SymInt? right, bool bottom_right) -> (Tensor keys, Tensor queries)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


class Bounds(NamedTuple):
    """The intervals of all rows; a batch dimension of 1 serves every batch.

    Args:
        keys: int32 [B or 1, T, 2], dense: the first key that a query sees, and one past the last.
        queries: int32 [B or 1, S, 2], dense: likewise for the queries that see a key.
    """

    keys: torch.Tensor
    queries: torch.Tensor

    @property
    def seen(self) -> torch.Tensor:
        """Return whether a query sees a key, bool [B or 1, T, S]."""
        s = torch.arange(self.queries.shape[1], device=self.keys.device)
        return (s >= self.keys[..., :1]) & (s < self.keys[..., 1:])

    @property
    def unseen_keys(self) -> torch.Tensor:
        """Return whether a key is seen by no query, bool [B or 1, S]."""
        return self.queries[..., 0] >= self.queries[..., 1]

    @property
    def fully_masked(self) -> torch.Tensor:
        """Return whether a query sees no key, bool [B or 1, T]."""
        return self.keys[..., 0] >= self.keys[..., 1]

    def without_unseen(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Zero queries that see no key, and keys and values that no query sees; all may be NaN.

        The tensors are [B, heads, rows, D].
        """
        unseen = self.unseen_keys[:, None, :, None]
        return self.without_fully_masked(q), k.masked_fill(unseen, 0), v.masked_fill(unseen, 0)

    def without_fully_masked(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [B, heads, T, D] with zeros, and no gradient, where a query sees no key."""
        return x.masked_fill(self.fully_masked[:, None, :, None], 0)


class Intervals:
    """Bounds for algorithms that run on the host, with the methods of a ``Band``.

    Args:
        bounds: the bounds of all rows.
        dims: number of dimensions of size 1 to insert between the batch and the rows.
    """

    def __init__(self, bounds: Bounds, dims: int) -> None:
        """Copy the bounds to the host, except under torch.compile, where every tile is visited.

        Raises:
            NotImplementedError: ``torch.func.vmap`` maps the bounds.
        """
        if any(map(is_batchedtensor, bounds)):
            raise NotImplementedError(
                "mask, documents: the tiled attention takes none that torch.func.vmap maps;"
                ' impl="reference" does'
            )
        self.seq_q, self.seq_kv = bounds.keys.shape[1], bounds.queries.shape[1]
        self._keys = bounds.keys.view(bounds.keys.shape[0], *[1] * dims, self.seq_q, 2)
        self._rows = None if torch.compiler.is_compiling() else [_extremes(x) for x in bounds]

    def over(self, seq_q: int, seq_kv: int) -> Intervals:
        """Return self, which was made for these lengths."""
        del seq_q, seq_kv
        return self

    def sees(self, t: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        """Return whether queries t see keys s, bool [B or 1, ..., *(t and s broadcast)]."""
        low, high = self._keys[..., t, :].unbind(-1)
        return (s >= low) & (s < high)

    def key_tiles(self, start: int, stop: int, block: int) -> BlockRange:
        """Return the tiles of keys that queries start ... stop - 1 visit."""
        return self._tiles(0, start, stop, block, self.seq_kv)

    def query_tiles(self, start: int, stop: int, block: int) -> BlockRange:
        """Return the tiles of queries that visit keys start ... stop - 1."""
        return self._tiles(1, start, stop, block, self.seq_q)

    def _tiles(self, side: int, start: int, stop: int, block: int, size: int) -> BlockRange:
        if self._rows is None:
            end = -(-size // block)
            return BlockRange(0, 0, 0, end)
        least, most = self._rows[side]
        return tiles_between(least[start], most[stop - 1], block, size)


def _extremes(x: torch.Tensor) -> tuple[list[list[int]], list[list[int]]]:
    """Return the smallest and the largest bounds of each row over all batches."""
    if x.shape[0] < 2:  # noqa: PLR2004 - one batch, or none
        rows = (x[0] if len(x) else x.new_zeros(x.shape[1:])).tolist()
        return rows, rows
    return x.amin(0).tolist(), x.amax(0).tolist()


def of_rows(low: torch.Tensor, high: torch.Tensor, seq_kv: int) -> Bounds:
    """Return the bounds of the mask in which query t sees keys low[t] ... high[t] - 1.

    An end that decreases from one query to the next is replaced by the largest before it, and all
    ends are clamped to 0 ... S. Checking instead would make the host wait for the device.

    Args:
        low: integers [B or 1, T].
        high: integers [B or 1, T].
        seq_kv: S.
    """
    low, high = (x.long().cummax(1).values.clamp(0, seq_kv) for x in (low, high))
    high = torch.maximum(low, high)
    s = torch.arange(seq_kv, device=low.device).expand(low.shape[0], -1).contiguous()
    # Trailing keys that no query sees get an empty interval at ``live``, not at T. So their tile
    # does not visit the queries after ``live``, which see nothing.
    live = (low < high[:, -1:]).sum(1, keepdim=True)
    first, end = (
        torch.minimum(torch.searchsorted(x.contiguous(), s, right=True), live) for x in (high, low)
    )
    return Bounds(_pairs(low, high), _pairs(first, end))


def of_documents(
    cu_q: torch.Tensor, cu_k: torch.Tensor, seq_q: int, seq_kv: int, mask: Mask
) -> Bounds:
    """Return the bounds of packed documents, with the mask applied within each.

    Args:
        cu_q: integers [N + 1], the cumulative numbers of queries of the documents.
        cu_k: integers [N + 1], likewise of keys.
        seq_q: T; queries after the last document see nothing.
        seq_kv: S.
        mask: applies within each document, to its queries and keys.
    """
    corner = mask.corner == "bottom_right"
    op = torch.ops.flashattn.document_bounds
    return Bounds(*op(cu_q, cu_k, seq_q, seq_kv, mask.left, mask.right, corner))


def _interval(
    own: torch.Tensor,
    other: torch.Tensor,
    size: int,
    before: int | None,
    after: int | None,
    *,
    bottom_right: bool,
) -> torch.Tensor:
    """Return the interval of each of ``size`` rows among the rows of the other side, [size, 2].

    A row that is in no document has an empty interval, where the next document would begin.
    """
    x = torch.arange(size, device=own.device)
    last = len(own) - 1
    document = torch.searchsorted(own[1:], x, right=True)
    after_it = (document + 1).clamp(max=last)
    start, end = other[document], other[after_it]
    at = x + start - own[document]
    if bottom_right:
        at = at + (end - start) - (own[after_it] - own[document])
    low = start if before is None else torch.minimum(torch.maximum(at - before, start), end)
    high = end if after is None else torch.minimum(torch.maximum(at + after + 1, low), end)
    inside = (document < last) & (x >= own[0])
    return _pairs(*(torch.where(inside, bound, start) for bound in (low, high)))


def _pairs(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    return torch.stack((low, high), dim=-1).int()


def _document_bounds(
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    seq_q: int,
    seq_kv: int,
    left: int | None,
    right: int | None,
    bottom_right: bool,  # noqa: FBT001 - torch's operators are called by position
) -> tuple[torch.Tensor, torch.Tensor]:
    if cu_q.is_cuda:
        from flashattn.kernels.portable import document_bounds  # noqa: PLC0415 - imports Triton

        made: tuple[torch.Tensor, torch.Tensor] = document_bounds.launch(
            cu_q, cu_k, seq_q, seq_kv, left, right, bottom_right=bottom_right
        )
        return made
    own, other = (
        x.long().cummax(0).values.clamp(0, size) for x, size in ((cu_q, seq_q), (cu_k, seq_kv))
    )
    keys = _interval(own, other, seq_q, left, right, bottom_right=bottom_right)
    queries = _interval(other, own, seq_kv, right, left, bottom_right=bottom_right)
    # Keys before the first document get (0, 0), so they visit no tile, and no tile of queries waits
    # for their part of dq.
    queries = queries.masked_fill(torch.arange(seq_kv, device=own.device)[:, None] < other[0], 0)
    return keys[None], queries[None]


@torch.library.register_fake("flashattn::document_bounds", lib=_LIBRARY)
def _(
    cu_q: torch.Tensor, cu_k: torch.Tensor, seq_q: int, seq_kv: int, *_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    del cu_k
    sizes = ((1, size, 2) for size in (seq_q, seq_kv))
    keys, queries = (cu_q.new_empty(size, dtype=torch.int32) for size in sizes)
    return keys, queries


_LIBRARY.impl("document_bounds", _document_bounds, "CompositeExplicitAutograd")
