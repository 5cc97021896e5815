"""Transformers' mask functions as runs of keys: in closed form, on the device, never read.

A mask in transformers is a function of the positions of a query and a key, composed of a few basic
ones by ``and_masks``, and a 2-D tensor that hides padding. Functions are recognized by their code
object, as every call makes new closures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import masking_utils as hf

End = Tensor | None  # of a run; None means no bound
Run = tuple[End, End]


def _causal(at: Tensor) -> Run:
    return None, at + 1


def _full(at: Tensor) -> Run:
    del at
    return None, None


def _window(at: Tensor, sliding_window: int) -> Run:
    return at - sliding_window + 1, None


def _two_sided(at: Tensor, sliding_window: int) -> Run:
    return at - sliding_window, at + sliding_window + 1


def _chunk(at: Tensor, chunk_size: int, left_padding: Tensor) -> Run:
    origin = left_padding[:, None]
    start = (at - origin) // chunk_size * chunk_size + origin
    return start, start + chunk_size


def _packed(at: Tensor, packed_sequence_mask: Tensor) -> Run:
    del at  # there is no cache: each query is a key
    numbers = packed_sequence_mask.contiguous()
    start, end = (torch.searchsorted(numbers, numbers, right=right) for right in (False, True))
    return start, end


def _code(function: object) -> CodeType | None:
    return function.__code__ if isinstance(function, FunctionType) else None


_TENSOR = torch.zeros(1, 1, dtype=torch.int64)
AND = _code(hf.and_masks(hf.causal_mask_function))
PACKED = _code(hf.packed_sequence_mask_function(_TENSOR))
# In releases after 5.17: positions are counted within each document.
REMAPPED = _code(
    hf.remap_positions_for_packed_sequence(hf.causal_mask_function, _TENSOR)
    if hasattr(hf, "remap_positions_for_packed_sequence")
    else None
)
KNOWN: dict[CodeType | None, Callable[..., Run]] = {
    _code(hf.causal_mask_function): _causal,
    _code(hf.bidirectional_mask_function): _full,
    _code(hf.sliding_window_overlay(1)): _window,
    _code(hf.sliding_window_bidirectional_overlay(1)): _two_sided,
    _code(hf.chunked_overlay(1, _TENSOR)): _chunk,
    PACKED: _packed,
}


class Part(NamedTuple):
    """One basic function of a mask; a query sees a key if all of them allow it."""

    run: Callable[..., Run]  # maps positions of queries [B or 1, T] and ``values`` to runs of keys
    values: dict[str, Any]  # the closure variables of the function
    positions: Tensor | None  # [B, T], in place of token indices; None means the indices

    def rows(self, at: Tensor, first: int) -> Run:
        """Return the run of keys of queries at ``at`` [1, T], counted from key ``first``."""
        # Positions increase by one in a document, so keys are as far apart as their positions.
        positions = at if self.positions is None else self.positions
        low, high = self.run(positions, **self.values)
        shift = at - positions - first
        return None if low is None else low + shift, None if high is None else high + shift


def parts_of(function: object, *, aligned: bool) -> list[Part] | None:
    """Return the basic functions of a transformers mask function, or None if one is not known.

    torch.compile cannot read closures, so under it only plain functions are known.

    Args:
        function: a ``mask_function`` of transformers.
        aligned: whether query t is key t, as packed documents require.
    """
    if torch.compiler.is_compiling():
        plain = ((hf.causal_mask_function, _causal), (hf.bidirectional_mask_function, _full))
        return next(([Part(run, {}, None)] for f, run in plain if f is function), None)
    try:
        found = list(_parts(function, None))
    except KeyError:
        return None
    remapped = any(part.positions is not None for part in found)
    packed = any(part.run is _packed for part in found)
    return None if (remapped and not packed) or (packed and not aligned) else found


def _parts(function: object, positions: Tensor | None) -> Iterator[Part]:
    code = _code(function)
    values = _values(function)
    if code is not None and code is AND:
        for x in values["mask_functions"]:
            yield from _parts(x, positions)
    elif code is not None and code is REMAPPED:
        yield from _parts(values["mask_function"], values["position_ids"])
    else:
        yield Part(KNOWN[code], values, positions)


def _values(function: object) -> dict[str, Any]:
    """Return the closure variables of a function by name."""
    if not isinstance(function, FunctionType):
        raise KeyError
    cells = (cell.cell_contents for cell in function.__closure__ or ())
    return dict(zip(function.__code__.co_freevars, cells, strict=True))


def window_of(parts: list[Part]) -> tuple[int | None, int | None] | None:
    """Return (left, right) if all parts together are a window around a query, else None.

    In transformers, a causal ``sliding_window`` counts the query itself; a two-sided one does not.
    """
    lefts, rights = [], []
    for part in parts:
        if part.run is _causal:
            rights.append(0)
        elif part.run is _window:
            lefts.append(part.values["sliding_window"] - 1)
        elif part.run is _two_sided:
            lefts.append(part.values["sliding_window"])
            rights.append(part.values["sliding_window"])
        elif part.run is not _full:
            return None
    return min(lefts, default=None), min(rights, default=None)


def shown_by(padding: Tensor) -> tuple[Run, Tensor]:
    """Return the run of keys [B, 1] that a 2-D mask shows in each sequence, (S, 0) if none.

    Args:
        padding: bool [B, S], True for keys that are shown.

    Returns:
        The run, and a bool tensor: whether no key is hidden between shown ones.
    """
    s = torch.arange(padding.shape[1], device=padding.device)
    low = s.where(padding, len(s)).amin(1, keepdim=True)
    high = (s + 1).where(padding, 0).amax(1, keepdim=True)
    intact = padding.sum(1, keepdim=True) == (high - low).clamp(min=0)
    return (low, high), intact.all()


def meet(runs: list[Run], like: Tensor, seq_kv: int) -> tuple[Tensor, Tensor]:
    """Return the intersection of all runs and keys 0 ... seq_kv - 1; ``like`` is [1, T]."""
    lows, highs = ([x for x in ends if x is not None] for ends in zip(*runs, strict=True))
    zeros = torch.zeros_like(like)
    low = reduce(torch.maximum, lows, zeros)
    return low, reduce(torch.minimum, highs, zeros + seq_kv)
