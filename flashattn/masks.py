"""Masks that a window cannot say: padding, prefixes, chunks, rows, any predicate, packed documents.

``attention(mask=...)`` takes a ``RowMask``. Each query sees one run of keys, of which neither end
falls from one query to the next; ``&`` lets it see what both sides let it see. A mask keeps what it
has made for a call, so that the layers of a model share it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast
from weakref import ref

import torch
from torch.utils.weak import WeakIdKeyDictionary

from flashattn.bounds import Bounds, of_documents, of_rows
from flashattn.dispatch import dispatch_is_trivial
from flashattn.mask import Mask
from flashattn.problem import Lengths

Documents = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Rows = tuple[torch.Tensor, torch.Tensor]
Predicate = Callable[..., torch.Tensor]

INTEGERS = (torch.int32, torch.int64)
EVALUATED = 1 << 24  # elements of a predicate that are evaluated at a time
KEPT = 8  # bounds of one mask or tensor, as a model has few kinds of layers


@dataclass(frozen=True)
class Sizes:
    """For what a mask makes its rows.

    Args:
        batch: B.
        seq_q: T.
        seq_kv: S.
        device: of q.
    """

    batch: int
    seq_q: int
    seq_kv: int
    device: torch.device

    @property
    def queries(self) -> torch.Tensor:
        """The numbers of all queries, [1, T]."""
        return torch.arange(self.seq_q, device=self.device)[None]


class RowMask(ABC):
    """Which keys each query sees: one run of them."""

    @abstractmethod
    def rows(self, sizes: Sizes) -> Rows:
        """Return (low, high), integers [B or 1, T]: query t sees keys low ... high - 1.

        Raises:
            ValueError: the mask was not made for such sizes.
        """

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What the rows are made from: bounds are made anew when one of them has changed."""
        return ()

    @property
    def looks_ahead(self) -> bool:
        """Whether it lets a query see keys after its own position by intent."""
        return False

    def __and__(self, other: RowMask) -> RowMask:
        """Return the mask of what both let a query see."""
        return _Both(self, other)


@dataclass(frozen=True, eq=False)
class _Both(RowMask):
    one: RowMask
    other: RowMask

    def rows(self, sizes: Sizes) -> Rows:
        return _meet(self.one.rows(sizes), self.other.rows(sizes))

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.one.tensors + self.other.tensors

    @property
    def looks_ahead(self) -> bool:
        return self.one.looks_ahead or self.other.looks_ahead


def _meet(one: Rows, other: Rows) -> Rows:
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
    """Hide what pads a batch of sequences, which may be NaN.

    Args:
        lengths: integers [B], the keys of each sequence that are there.
        side: "right" or "left", where the padding is.

    Raises:
        ValueError: no such lengths, or no such side.
    """
    if side not in ("right", "left"):
        raise ValueError(f"side: wanted right or left, got {side!r}")
    return _Padding(_integers("lengths", lengths, 1), side == "left")


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
    """Let every query see a prefix, and behind it the keys up to its own position (prefix-LM).

    Args:
        lengths: integers [B], the keys of each prefix.

    Raises:
        ValueError: no such lengths.
    """
    return _Prefix(_integers("lengths", lengths, 1))


@dataclass(frozen=True, eq=False)
class _Chunked(RowMask):
    length: int

    def rows(self, sizes: Sizes) -> Rows:
        low = sizes.queries // self.length * self.length
        return low, low + self.length


def chunked(length: int) -> RowMask:
    """Let a query see the keys of its own chunk of ``length`` positions (Llama 4).

    Raises:
        ValueError: ``length`` is no positive int.
    """
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise ValueError(f"length: wanted a positive int, got {length!r}")
    return _Chunked(length)


@dataclass(frozen=True, eq=False)
class _Rows(RowMask):
    low: torch.Tensor
    high: torch.Tensor

    def rows(self, sizes: Sizes) -> Rows:
        low, high = (_matrix(x) for x in (self.low, self.high))
        if low.shape[1] != sizes.seq_q:
            raise ValueError(f"mask: wanted {sizes.seq_q} rows, one a query, got {low.shape[1]}")
        return _on(low, "rows", sizes), _on(high, "rows", sizes)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.low, self.high


def rows(low: torch.Tensor, high: torch.Tensor) -> RowMask:
    """Let query t see keys low[t] ... high[t] - 1; where high is not above low it sees none.

    Neither may fall from one query to the next. On a CPU that is checked. On a GPU the check would
    make the host wait; there an end that falls counts as the largest before it.

    Args:
        low: integers [T] or [B, T].
        high: likewise.

    Raises:
        ValueError: no such tensors; or an end falls.
    """
    found = [_integers(name, x, 1, 2) for name, x in {"low": low, "high": high}.items()]
    if low.shape != high.shape:
        raise ValueError(f"high: wanted low's shape, {list(low.shape)}, got {list(high.shape)}")
    for name, x in {"low": low, "high": high}.items():
        if readable(x) and (x.diff(dim=-1) < 0).any():
            raise ValueError(f"{name}: wanted numbers that never fall from one query to the next")
    return _Rows(*found)


@dataclass(frozen=True, eq=False)
class _OfBounds(RowMask):
    bounds: Bounds

    def rows(self, sizes: Sizes) -> Rows:
        low, high = self.checked(sizes).keys.unbind(-1)
        return low, high

    def checked(self, sizes: Sizes) -> Bounds:
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
        return tuple(self.bounds)


def of_bounds(bounds: Bounds) -> RowMask:
    """Return the mask of bounds that are made already: a call that asks for no more takes them."""
    return _OfBounds(bounds)


class _Head:
    """Stands for the head when a predicate is evaluated, and must not be looked at."""

    def _refuse(self, *_: object) -> Any:
        raise ValueError("mask: one for all heads, but the predicate asks which head it is")

    __eq__ = __lt__ = __gt__ = __le__ = __ge__ = __index__ = __add__ = __mul__ = __mod__ = _refuse
    __radd__ = __rmul__ = __floordiv__ = __sub__ = __rsub__ = _refuse
    __hash__ = object.__hash__


@dataclass(frozen=True, eq=False)
class _Of(RowMask):
    predicate: Predicate

    def rows(self, sizes: Sizes) -> Rows:
        s = torch.arange(sizes.seq_kv, device=sizes.device)
        b = torch.arange(sizes.batch, device=sizes.device)
        keys = torch.vmap(self.predicate, (None, None, None, 0))
        queries = torch.vmap(keys, (None, None, 0, None))
        batches = torch.vmap(queries, (0, None, None, None))
        step = max(1, EVALUATED // max(1, sizes.batch * sizes.seq_kv))
        parts = [
            runs_of(batches(b, _Head(), t, s), int(t[0]) if len(t) else 0)
            for t in sizes.queries[0].split(step)
        ]
        low, high = (torch.cat(x, dim=1) for x in zip(*parts, strict=True))
        return monotone(low, high)


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


def of(seen: torch.Tensor | Predicate) -> RowMask:
    """Find the run of keys that each query sees by evaluating a mask once, which the host awaits.

    Args:
        seen: a bool tensor [T, S], [B, T, S] or [B, 1, T, S]; a predicate as FlexAttention's
            ``mask_mod``, of (b, h, t, s), that does not look at h; or a ``BlockMask``.

    Raises:
        ValueError: no such tensor. When ``attention`` asks: some query sees keys that are not next
            to one another, or begins or ends before the query before it.
    """
    if isinstance(seen, torch.Tensor):
        shape = seen.shape
        if seen.dtype != torch.bool or seen.ndim not in (2, 3, 4) or shape[1:-2] not in ((), (1,)):
            got = f"{seen.dtype} {list(shape)}"
            raise ValueError(f"mask: wanted bool [T, S], [B, T, S] or [B, 1, T, S], got {got}")
        return _OfTensor(seen.reshape(-1, *shape[-2:]))
    predicate = getattr(seen, "mask_mod", seen)  # of a BlockMask
    if not callable(predicate):
        msg = f"mask: wanted a bool tensor or a predicate of (b, h, t, s), got {seen!r}"
        raise ValueError(msg)  # noqa: TRY004 - one kind of error for one kind of mistake
    return _Of(predicate)


def runs_of(seen: torch.Tensor, first: int) -> Rows:
    """Return the run of keys [B, T] that each query sees, (S, 0) of those that see none."""
    s = torch.arange(seen.shape[-1], device=seen.device)
    low = s.where(seen, seen.shape[-1]).amin(-1) if len(s) else seen.sum(-1)
    high = (s + 1).where(seen, 0).amax(-1) if len(s) else seen.sum(-1)
    holes = (seen.sum(-1) != (high - low).clamp(min=0)).nonzero()
    if len(holes):
        row = first + int(holes[0, 1])
        msg = (
            f"mask: query {row} sees keys that are not next to one another; FlexAttention has such"
        )
        raise ValueError(msg)
    return low, high


def monotone(low: torch.Tensor, high: torch.Tensor) -> Rows:
    """Return runs of which no end falls, those of queries that see nothing placed between others.

    Raises:
        ValueError: there is no such place, or an end falls.
    """
    live, most = low < high, high.cummax(1).values  # high is 0 where nothing is seen
    low = torch.where(live, low, most)
    falls = (low.diff(dim=1) < 0) | (live & (high < most))[:, 1:]
    if falls.any():
        row = int(falls.nonzero()[0, 1]) + 1
        msg = f"mask: the keys that query {row} sees begin or end before those of the query before"
        raise ValueError(msg)
    return low, most


def check_documents(
    documents: object,
    q: torch.Tensor,
    k: torch.Tensor,
    names: tuple[str, str] = ("documents", "documents"),
) -> Rows:
    """Return the cumulative lengths of the queries and of the keys.

    Their values are checked on a CPU. On a GPU that would make the host wait; there a length that
    falls counts as the largest before it, and what lies outside of the rows as their nearest end.

    Args:
        documents: cu, or (cu_q, cu_k).
        q: [..., T, D].
        k: [..., S, D].
        names: of cu_q and cu_k in messages.

    Raises:
        ValueError: no integers [N + 1] on q's device; values that fall, or do not begin at 0.
    """
    pair = documents if isinstance(documents, tuple) else (documents, documents)
    if len(pair) != 2:  # noqa: PLR2004 - of queries and keys
        raise ValueError(f"documents: wanted cu or (cu_q, cu_k), got {len(pair)} of them")
    cu_q, cu_k = (_integers(name, x, 1) for name, x in zip(names, pair, strict=True))
    for name, x, rows in zip(names, (cu_q, cu_k), (q.shape[-2], k.shape[-2]), strict=True):
        if x.device != q.device:
            raise ValueError(f"{name}: wanted q's device, {q.device}, got {x.device}")
        if len(x) < 2 or len(x) != len(cu_q):  # noqa: PLR2004 - one document
            lengths = [len(cu_q), len(cu_k)]
            raise ValueError(f"{name}: wanted [N + 1] of queries and of keys, got {lengths}")
        if readable(x) and (x[0] != 0 or x[-1] > rows or (x.diff() < 0).any()):
            wanted = f"numbers from 0 to {rows} at the most that never fall"
            raise ValueError(f"{name}: wanted {wanted}, got {x.tolist()}")
    return cu_q, cu_k


def cumulative(documents: Lengths, device: torch.device) -> Rows:
    """Return the cumulative lengths of documents, int32 [N + 1] of the queries and of the keys."""
    lengths = torch.tensor([(0, 0), *documents], dtype=torch.int32, device=device)
    cu_q, cu_k = lengths.cumsum(0, dtype=torch.int32).T.contiguous()
    return cu_q, cu_k


def bounds_of(
    q: torch.Tensor, k: torch.Tensor, mask: Mask, documents: Documents | None, given: object
) -> Bounds:
    """Return the bounds of all that hides keys, kept for the next call that asks for the same.

    Args:
        q: [B, H, T, D], or [B, T, D].
        k: [B, G, S, D], or [B, S, D].
        mask: over the whole, or over each document.
        documents: see ``attention``.
        given: a ``RowMask``, or None.

    Raises:
        ValueError: an argument that does not fit.
    """
    if given is not None and not isinstance(given, RowMask):
        raise ValueError(f"mask: wanted an object of flashattn.masks, got {type(given).__name__}")
    if isinstance(given, RowMask) and given.looks_ahead and mask.causal:
        msg = "mask: it lets queries see keys after them, which causal hides: leave causal out"
        raise ValueError(msg)
    sizes = Sizes(q.shape[0], q.shape[-2], k.shape[-2], q.device)
    cu = None if documents is None else check_documents(documents, q, k)
    if isinstance(given, _OfBounds) and cu is None and mask == Mask():
        return given.checked(sizes)
    tensors = (*(given.tensors if given is not None else ()), *(cu or ()))
    owner = tensors[0] if given is None or isinstance(given, _OfBounds) else given
    return kept(q, owner, tensors, (sizes, mask), lambda: _make(sizes, mask, cu, given))


Made = TypeVar("Made")
_KEPT: Any = WeakIdKeyDictionary()


def kept(
    q: torch.Tensor,
    owner: object,
    tensors: tuple[torch.Tensor, ...],
    key: tuple[object, ...],
    make: Callable[[], Made],
) -> Made:
    """Return what ``make`` makes of tensors, or what it made of them before, unchanged as they are.

    Args:
        q: for whom it is made.
        owner: with whom it goes.
        tensors: that are read.
        key: of all else that it depends on.
        make: is called where there is none, or where none may be kept.
    """
    if not _keeps(q, tensors):
        return make()
    key = *key, tuple((id(x), x._version) for x in tensors)  # noqa: SLF001 - no public name
    of_owner = _KEPT.setdefault(owner, {})
    made, made_from = of_owner.get(key, (None, ()))
    if made is None or any(x() is None for x in made_from):  # another may have its id by now
        if len(of_owner) >= KEPT:
            of_owner.clear()
        made = make()
        of_owner[key] = made, [ref(x) for x in tensors]
    return cast("Made", made)


def _keeps(q: torch.Tensor, tensors: tuple[torch.Tensor, ...]) -> bool:
    """Whether bounds may be kept: not a compiler's, nor those of a CUDA graph that is captured."""
    if not dispatch_is_trivial(q, *tensors) or any(x.is_inference() for x in tensors):
        return False
    return not (q.is_cuda and torch.cuda.is_current_stream_capturing())


def _make(sizes: Sizes, mask: Mask, cu: Rows | None, given: RowMask | None) -> Bounds:
    if given is None and cu is not None:
        return of_documents(*cu, sizes.seq_q, sizes.seq_kv, mask)
    if cu is not None:
        keys = of_documents(*cu, sizes.seq_q, sizes.seq_kv, mask).keys.long()
        low, high = keys[..., 0], keys[..., 1]
    else:
        ends = mask.over(sizes.seq_q, sizes.seq_kv).keys_of(sizes.queries)
        low, high = (x + torch.zeros_like(sizes.queries) for x in ends)
    if given is not None:
        low, high = _meet((low, high), given.rows(sizes))
    shape = torch.broadcast_shapes(low.shape, high.shape)
    if shape[0] not in (1, sizes.batch):
        raise ValueError(f"mask: wanted rows for {sizes.batch} batches or one, got {shape[0]}")
    return of_rows(low.expand(shape), high.expand(shape), sizes.seq_kv)


def _integers(name: str, x: object, *dims: int) -> torch.Tensor:
    if not isinstance(x, torch.Tensor) or x.dtype not in INTEGERS or x.ndim not in dims:
        wanted = " or ".join(f"{n}-dimensional" for n in dims)
        got = f"{x.dtype} {list(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
        raise ValueError(f"{name}: wanted a {wanted} int32 or int64 tensor, got {got}")
    return x


def _on(x: torch.Tensor, name: str, sizes: Sizes) -> torch.Tensor:
    if x.device != sizes.device:
        raise ValueError(f"mask: wanted {name} on q's device, {sizes.device}, got {x.device}")
    return x


def _matrix(x: torch.Tensor) -> torch.Tensor:
    return x if x.ndim > 1 else x[None]


def readable(x: torch.Tensor) -> bool:
    """Whether the host can look at values without waiting for a device or a compiler."""
    return x.device.type == "cpu" and dispatch_is_trivial(x)
