"""Compute bounds from documents and masks, and cache them: the layers of a model share them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast
from weakref import ref

import torch
from torch.utils.weak import WeakIdKeyDictionary

from flashattn.bounds import Bounds, of_documents, of_rows
from flashattn.dispatch import dispatch_is_trivial
from flashattn.mask import Mask
from flashattn.masks import OfBounds, RowMask, Rows, Sizes, integers, meet, prefix, readable
from flashattn.problem import Lengths

Documents = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

KEPT = 8  # cached for each mask or tensor, as a model has few kinds of layers


def check_documents(
    documents: object,
    q: torch.Tensor,
    k: torch.Tensor,
    names: tuple[str, str] = ("documents", "documents"),
) -> Rows:
    """Check packed documents; return the cumulative lengths of the queries and of the keys.

    The values are checked on a CPU. On a GPU that would make the host wait; there, a value that
    decreases is replaced by the largest before it, and values beyond the rows are clamped.

    Args:
        documents: cu, or (cu_q, cu_k).
        q: [..., T, D].
        k: [..., S, D].
        names: the names of cu_q and cu_k in error messages.

    Raises:
        ValueError: not integers [N + 1] on q's device; or values decrease, exceed the rows, or do
            not start at 0.
    """
    pair = documents if isinstance(documents, tuple) else (documents, documents)
    if len(pair) != 2:  # noqa: PLR2004 - of queries and keys
        raise ValueError(f"documents: wanted cu or (cu_q, cu_k), got {len(pair)} of them")
    cu_q, cu_k = (integers(name, x, 1) for name, x in zip(names, pair, strict=True))
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


def bounds_of_lengths(
    documents: Lengths | None,
    first: int | None,
    mask: Mask,
    seq_q: int,
    seq_kv: int,
    device: torch.device,
) -> Bounds:
    """Return the bounds of documents, with the mask in each, or of a prefix of ``first`` keys."""
    sizes = Sizes(1, seq_q, seq_kv, device)
    cu = None if documents is None else cumulative(documents, device)
    given = None if first is None else prefix(torch.tensor([first], device=device))
    return _make(sizes, mask, cu, given)


def bounds_of(
    q: torch.Tensor, k: torch.Tensor, mask: Mask, documents: Documents | None, given: object
) -> Bounds:
    """Return the bounds of everything that hides keys, cached for the next such call.

    Args:
        q: [B, H, T, D], or [B, T, D].
        k: [B, G, S, D], or [B, S, D].
        mask: over the whole sequence, or within each document.
        documents: see ``attention``.
        given: a ``RowMask``, or None.

    Raises:
        ValueError: an argument does not fit.
    """
    given = check_mask(mask, given)
    shifted = mask.corner == "bottom_right" and documents is None
    offset = k.shape[-2] - q.shape[-2] if shifted else 0
    sizes = Sizes(q.shape[0], q.shape[-2], k.shape[-2], q.device, offset)
    cu = None if documents is None else check_documents(documents, q, k)
    if isinstance(given, OfBounds) and cu is None and mask == Mask():
        return given.checked(sizes)
    tensors = (*(given.tensors if given is not None else ()), *(cu or ()))
    owner = tensors[0] if given is None or isinstance(given, OfBounds) else given
    return kept(q, owner, tensors, (sizes, mask), lambda: _make(sizes, mask, cu, given))


def check_mask(mask: Mask, given: object) -> RowMask | None:
    """Return a ``RowMask``, or None, checked beside the causal mask and the window.

    Raises:
        ValueError: it is something else, or shows what a causal mask hides.
    """
    if given is not None and not isinstance(given, RowMask):
        raise ValueError(f"mask: wanted an object of flashattn.masks, got {type(given).__name__}")
    if given is not None and given.looks_ahead and mask.causal:
        msg = "mask: it lets queries see keys after them, which causal hides: leave causal out"
        raise ValueError(msg)
    return given


Made = TypeVar("Made")
_KEPT: Any = WeakIdKeyDictionary()


def kept(
    q: torch.Tensor,
    owner: object,
    tensors: tuple[torch.Tensor, ...],
    key: tuple[object, ...],
    make: Callable[[], Made],
) -> Made:
    """Return the result of ``make``, cached as long as the tensors that it reads do not change.

    PyTorch counts changes of a tensor. Writes that it does not see are not noticed: through numpy
    or ``.data``, by a kernel that PyTorch does not know, or by the replay of a CUDA graph.

    Args:
        q: the q of the call, which may forbid caching (see ``_keeps``).
        owner: the object with which the cached results are freed.
        tensors: the tensors that ``make`` reads.
        key: everything else that the result depends on.
        make: called if there is no cached result, or caching is not possible.
    """
    if not _keeps(q, tensors):
        return make()
    key = *key, tuple((id(x), x._version) for x in tensors)  # noqa: SLF001 - no public name
    of_owner = _KEPT.setdefault(owner, {})
    made, made_from = of_owner.get(key, (None, ()))
    if made is None or any(x() is None for x in made_from):  # its id may be reused
        if len(of_owner) >= KEPT:
            of_owner.clear()
        with torch.inference_mode(mode=False):  # a later call may save it for its backward
            made = make()
        of_owner[key] = made, [ref(x) for x in tensors]
    return cast("Made", made)


def _keeps(q: torch.Tensor, tensors: tuple[torch.Tensor, ...]) -> bool:
    """Return whether caching is possible: not under torch.compile, nor in CUDA graph capture."""
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
        low, high = meet((low, high), given.rows(sizes))
    shape = torch.broadcast_shapes(low.shape, high.shape)
    if shape[0] not in (1, sizes.batch):
        raise ValueError(f"mask: wanted rows for {sizes.batch} batches or one, got {shape[0]}")
    return of_rows(low.expand(shape), high.expand(shape), sizes.seq_kv)
