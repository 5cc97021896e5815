"""Masks that a window cannot express: padding, prefixes, chunks, rows, predicates.

``attention(mask=...)`` takes a ``RowMask``. Each query sees one contiguous run of keys, and neither
end of the run decreases from one query to the next. Under ``a & b`` a query sees the keys that it
sees under both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from flashattn.bounds import Bounds
from flashattn.checks import dense
from flashattn.dispatch import dispatch_is_trivial

Rows = tuple[torch.Tensor, torch.Tensor]
Predicate = Callable[..., torch.Tensor]

INTEGERS = (torch.int32, torch.int64)
EVALUATED = 1 << 24  # query-key pairs for which a predicate is evaluated at a time


@dataclass(frozen=True)
class Sizes:
    """The sizes for which a mask computes its rows.

    Args:
        batch: B.
        seq_q: T.
        seq_kv: S.
        device: the device of q.
        offset: position of query 0 among the keys: S - T with ``causal="bottom_right"``, else 0.
    """

    batch: int
    seq_q: int
    seq_kv: int
    device: torch.device
    offset: int = 0

    @property
    def queries(self) -> torch.Tensor:
        """The indices of all queries, [1, T]."""
        return torch.arange(self.seq_q, device=self.device)[None]


class RowMask(ABC):
    """A mask under which each query sees one contiguous run of keys."""

    @abstractmethod
    def rows(self, sizes: Sizes) -> Rows:
        """Return (low, high), integers [B or 1, T]: query t sees keys low ... high - 1.

        Raises:
            ValueError: the mask was made for other sizes.
        """

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors that the rows are computed from; if one changes, bounds are recomputed.

        PyTorch must see the change: see ``resolve.kept``.
        """
        return ()

    @property
    def looks_ahead(self) -> bool:
        """Return whether it shows a query keys after its own position by design."""
        return False

    def __and__(self, other: RowMask) -> RowMask:
        """Return the mask under which a query sees the keys that both masks show."""
        return _Both(self, other) if isinstance(other, RowMask) else NotImplemented


@dataclass(frozen=True, eq=False)
class _Both(RowMask):
    one: RowMask
    other: RowMask

    def rows(self, sizes: Sizes) -> Rows:
        return meet(self.one.rows(sizes), self.other.rows(sizes))

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.one.tensors + self.other.tensors

    @property
    def looks_ahead(self) -> bool:
        return self.one.looks_ahead or self.other.looks_ahead


def meet(one: Rows, other: Rows) -> Rows:
    """Return the keys that a query sees under both masks."""
    return torch.maximum(one[0], other[0]), torch.minimum(one[1], other[1])


@dataclass(frozen=True, eq=False)
class _Padding(RowMask):
    lengths: torch.Tensor
    left: bool

    def rows(self, sizes: Sizes) -> Rows:
        lengths = _on(self.lengths, "lengths", sizes)[:, None].expand(-1, sizes.seq_q)
        low = torch.zeros_like(lengths)
        if self.left:
            return sizes.seq_kv - lengths, low + sizes.seq_kv
        return low, lengths

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.lengths,)


def padding(lengths: torch.Tensor, *, side: str = "right") -> RowMask:
    """Hide the padding of a batch of sequences; padded keys and values may be NaN.

    Args:
        lengths: integers [B], the number of keys of each sequence without its padding.
        side: "right" or "left", the side of the padding.

    Raises:
        ValueError: ``lengths`` or ``side`` does not fit.
    """
    if side not in ("right", "left"):
        raise ValueError(f"side: wanted right or left, got {side!r}")
    return _Padding(integers("lengths", lengths, 1), side == "left")


@dataclass(frozen=True, eq=False)
class _Prefix(RowMask):
    lengths: torch.Tensor

    def rows(self, sizes: Sizes) -> Rows:
        lengths = _on(self.lengths, "lengths", sizes)[:, None]
        high = torch.maximum(sizes.queries + 1, lengths)
        return torch.zeros_like(high), high

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.lengths,)

    @property
    def looks_ahead(self) -> bool:
        return True


def prefix(lengths: torch.Tensor) -> RowMask:
    """Let every query see a prefix, and after it the keys up to its own position (prefix-LM).

    Args:
        lengths: integers [B], the number of keys in each prefix.

    Raises:
        ValueError: ``lengths`` does not fit.
    """
    return _Prefix(integers("lengths", lengths, 1))


@dataclass(frozen=True, eq=False)
class _Chunked(RowMask):
    length: int

    def rows(self, sizes: Sizes) -> Rows:
        low = (sizes.queries + sizes.offset) // self.length * self.length
        return low, low + self.length


def chunked(length: int) -> RowMask:
    """Let a query see the keys of its own chunk of ``length`` positions (Llama 4).

    The position of query t is t, or t + S - T with ``causal="bottom_right"``; with documents, t.

    Raises:
        ValueError: ``length`` is not a positive int.
    """
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise ValueError(f"length: wanted a positive int, got {length!r}")
    return _Chunked(length)


@dataclass(frozen=True, eq=False)
class _Rows(RowMask):
    low: torch.Tensor
    high: torch.Tensor

    def rows(self, sizes: Sizes) -> Rows:
        low, high = torch.atleast_2d(self.low, self.high)
        if low.shape[1] != sizes.seq_q:
            raise ValueError(f"mask: wanted {sizes.seq_q} rows, one a query, got {low.shape[1]}")
        return _on(low, "rows", sizes), _on(high, "rows", sizes)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.low, self.high


def rows(low: torch.Tensor, high: torch.Tensor) -> RowMask:
    """Let query t see keys low[t] ... high[t] - 1, or none if high[t] <= low[t].

    Neither may decrease from one query to the next. This is checked on a CPU. On a GPU the check
    would make the host wait; there, an end that decreases is replaced by the largest before it.

    Args:
        low: integers [T] or [B, T].
        high: integers of the same shape.

    Raises:
        ValueError: ``low`` or ``high`` does not fit, or decreases.
    """
    low, high = integers("low", low, 1, 2), integers("high", high, 1, 2)
    if low.shape != high.shape:
        raise ValueError(f"high: wanted low's shape, {list(low.shape)}, got {list(high.shape)}")
    for name, x in {"low": low, "high": high}.items():
        if readable(x) and (x.diff(dim=-1) < 0).any():
            raise ValueError(f"{name}: wanted numbers that never fall from one query to the next")
    return _Rows(low, high)


@dataclass(frozen=True, eq=False)
class OfBounds(RowMask):
    """A mask whose bounds are computed already."""

    bounds: Bounds

    def rows(self, sizes: Sizes) -> Rows:
        """Return the bounds of the queries."""
        low, high = self.checked(sizes).keys.unbind(-1)
        return low, high

    def checked(self, sizes: Sizes) -> Bounds:
        """Return the bounds.

        Raises:
            ValueError: the bounds were made for other sizes.
        """
        keys, queries = self.bounds
        wanted, got = (sizes.seq_q, sizes.seq_kv), (keys.shape[1], queries.shape[1])
        if got != wanted or keys.shape[0] not in (1, sizes.batch):
            raise ValueError(
                f"mask: wanted one for B, T, S = {[sizes.batch, *wanted]}, got one for"
                f" {[keys.shape[0], *got]}"
            )
        _on(keys, "bounds", sizes)
        return self.bounds

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The bounds of the queries and of the keys."""
        return tuple(self.bounds)


def of_bounds(bounds: Bounds) -> RowMask:
    """Return a mask of ready-made bounds; a call with no other mask uses them as they are."""
    return OfBounds(bounds)


class _Head:
    """The head that a predicate is given when it is evaluated; using it is an error."""

    def _refuse(self, *_: object) -> Any:
        raise TypeError("a _Head has no value")

    __eq__ = __bool__ = _refuse  # Python and PyTorch refuse all else, with its name in the message
    __hash__ = object.__hash__


@dataclass(frozen=True, eq=False)
class _Of(RowMask):
    predicate: Predicate
    most: tuple[int, int, int] | None = None  # B, or 1 for any, and the most T and S

    def rows(self, sizes: Sizes) -> Rows:
        batch, seq_q, seq_kv = self.most or (1, sizes.seq_q, sizes.seq_kv)
        if batch not in (1, sizes.batch) or sizes.seq_q > seq_q or sizes.seq_kv > seq_kv:
            got = f"{sizes.batch, sizes.seq_q, sizes.seq_kv}"
            raise ValueError(f"mask: wanted B, T, S within the BlockMask's {self.most}, got {got}")
        keys = torch.vmap(self.predicate, (None, None, None, 0))
        queries = torch.vmap(keys, (None, None, 0, None))
        batches = torch.vmap(queries, (0, None, None, None))
        step = max(1, EVALUATED // max(1, sizes.batch * sizes.seq_kv))
        parts = [
            runs_of(_evaluated(batches, t, sizes), int(t[0]) if len(t) else 0)
            for t in sizes.queries[0].split(step)
        ]
        low, high = (torch.cat(x, dim=1) for x in zip(*parts, strict=True))
        return monotone(low, high)


def _evaluated(batches: Callable[..., Any], t: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """Evaluate a mapped predicate for queries t [n]; return which keys they see, bool [B, n, S].

    Raises:
        ValueError: the predicate cannot be evaluated, asks for the head, or returns no bool.
    """
    b, s = (torch.arange(n, device=sizes.device) for n in (sizes.batch, sizes.seq_kv))
    try:
        seen = batches(b, _Head(), t, s)
    except Exception as error:
        if _Head.__name__ in str(error):
            said = "one for all heads, but the predicate asks which head it is"
        else:
            said = f"the predicate cannot be evaluated by torch.vmap: {error}"
        raise ValueError(f"mask: {said}") from error
    if seen.dtype != torch.bool or seen.shape != (len(b), len(t), len(s)):
        got = f"{seen.dtype} {list(seen.shape[3:])}"
        raise ValueError(f"mask: wanted a predicate that returns one bool, got {got}")
    return seen


@dataclass(frozen=True, eq=False)
class _OfTensor(RowMask):
    seen: torch.Tensor

    def rows(self, sizes: Sizes) -> Rows:
        if tuple(self.seen.shape[1:]) != (sizes.seq_q, sizes.seq_kv):
            wanted, got = [sizes.seq_q, sizes.seq_kv], list(self.seen.shape[1:])
            raise ValueError(f"mask: wanted a bool tensor for T, S = {wanted}, got {got}")
        return monotone(*runs_of(_on(self.seen, "bool tensor", sizes), 0))

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.seen,)


def _of_blocks(mask: Any) -> RowMask:
    """Return FlexAttention's BlockMask: the blocks it visits, and ``mask_mod`` in partial ones."""
    rows, keys = mask.BLOCK_SIZE
    visited = mask.to_dense().bool()
    if (visited != visited[:, :1]).any():
        raise ValueError("mask: one for all heads, but the BlockMask visits others in each head")
    full = torch.zeros_like(visited)
    if mask.full_kv_num_blocks is not None:
        listed = mask.full_kv_num_blocks, mask.full_kv_indices
        full = mask.from_kv_blocks(*listed, BLOCK_SIZE=mask.BLOCK_SIZE).to_dense().bool()

    def seen(b: Any, h: Any, t: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        at = b if len(visited) > 1 else 0, 0, t // rows, s // keys
        return visited[at] & (full[at] | mask.mask_mod(b, h, t, s))

    return _Of(seen, (len(visited), *mask.seq_lengths))


def of(seen: torch.Tensor | Predicate) -> RowMask:
    """Make a mask of a tensor or a predicate by evaluating it once, for which the host waits.

    Each query must see one contiguous run of keys.

    Args:
        seen: a bool tensor [T, S], [B, T, S] or [B, 1, T, S]; a predicate of (b, h, t, s), like
            FlexAttention's ``mask_mod``, that does not use h; or a ``BlockMask``, whose blocks
            and ``mask_mod`` both count.

    Raises:
        ValueError: ``seen`` is none of these. In ``attention``: the keys of a query are not
            contiguous, or begin or end before those of the query before it.
    """
    if isinstance(seen, torch.Tensor):
        shape = dense("mask", seen).shape
        if seen.dtype != torch.bool or seen.ndim not in (2, 3, 4) or shape[1:-2] not in ((), (1,)):
            got = f"{seen.dtype} {list(shape)}"
            raise ValueError(f"mask: wanted bool [T, S], [B, T, S] or [B, 1, T, S], got {got}")
        return _OfTensor(seen.reshape(shape[:-2].numel(), *shape[-2:]))
    if hasattr(seen, "mask_mod"):
        return _of_blocks(seen)
    if not callable(seen):
        raise ValueError(f"mask: wanted a bool tensor or a predicate of (b, h, t, s), got {seen!r}")  # noqa: TRY004 - one kind of error for one kind of mistake
    return _Of(seen)


def runs_of(seen: torch.Tensor, first: int) -> Rows:
    """Return the run of keys [B, T] that each query sees, (S, 0) if it sees none."""
    s = torch.arange(seen.shape[-1], device=seen.device)
    low = s.where(seen, seen.shape[-1]).amin(-1) if len(s) else seen.sum(-1)
    high = (s + 1).where(seen, 0).amax(-1) if len(s) else seen.sum(-1)
    holes = (seen.sum(-1) != (high - low).clamp(min=0)).nonzero()
    if len(holes):
        row = first + int(holes[0, 1])
        raise ValueError(
            f"mask: query {row} sees keys that are not next to one another; FlexAttention has such"
        )
    return low, high


def monotone(low: torch.Tensor, high: torch.Tensor) -> Rows:
    """Return the runs with empty ones moved so that no end decreases from one query to the next.

    Raises:
        ValueError: an end decreases, or there is no such place for an empty run.
    """
    live, most = low < high, high.cummax(1).values  # high is 0 where nothing is seen
    low = torch.where(live, low, most)
    falls = (low.diff(dim=1) < 0) | (live & (high < most))[:, 1:]
    if falls.any():
        row = int(falls.nonzero()[0, 1]) + 1
        msg = f"mask: the keys that query {row} sees begin or end before those of the query before"
        raise ValueError(msg)
    return low, most


def integers(name: str, x: object, *dims: int) -> torch.Tensor:
    """Check that x is an integer tensor with one of these numbers of dimensions, and return it.

    Raises:
        ValueError: x is not such a tensor.
    """
    found = dense(name, x)
    if found.dtype not in INTEGERS or found.ndim not in dims:
        wanted = " or ".join(f"{n}-dimensional" for n in dims)
        got = f"{found.dtype} {list(found.shape)}"
        raise ValueError(f"{name}: wanted a {wanted} int32 or int64 tensor, got {got}")
    return found


def _on(x: torch.Tensor, name: str, sizes: Sizes) -> torch.Tensor:
    if x.device != sizes.device:
        raise ValueError(f"mask: wanted {name} on q's device, {sizes.device}, got {x.device}")
    return x


def readable(x: torch.Tensor) -> bool:
    """Return whether the host can read values without waiting for a device or breaking a trace."""
    return x.device.type == "cpu" and dispatch_is_trivial(x)
