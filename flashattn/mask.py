"""Masks: which keys a query sees, as two bounds that never decrease from one query to the next.

A ``Mask`` does not depend on the lengths. Applied to T queries and S keys it becomes a ``Band``,
which answers: does query t see key s, which keys does a query see, which tiles does an algorithm
visit, which of these need no mask, how many pairs are visible? Algorithms ask for nothing else, so
other masks (documents, prefixes, padding) can be other classes with the same methods.

``left`` and ``right`` count the keys before and after a query's own position, both inclusive, as
flash-attn's ``window_size`` does; a causal mask has ``right = 0``. Query 0 is aligned with key 0
("top_left", as in PyTorch's ``is_causal``), or the last query with the last key ("bottom_right", as
in flash-attn since 2.1). The corners differ only if T != S.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

import torch

Corner = Literal["top_left", "bottom_right"]
Causal = bool | Corner
Window = tuple[int | None, int | None]
Index = TypeVar("Index", int, torch.Tensor)

UNBOUNDED: Window = (None, None)
CORNERS: dict[object, Corner | None] = {
    False: None,
    True: "top_left",
    "top_left": "top_left",
    "bottom_right": "bottom_right",
}
ALL = "all"  # stands for no bound in a name


class BlockRange(NamedTuple):
    """A range of tiles by index: tiles first ... end - 1 are visited.

    In tiles full ... full_end - 1 every pair is visible, so they need no mask. Always
    first <= full <= full_end <= end.
    """

    first: int
    full: int
    full_end: int
    end: int


@dataclass(frozen=True)
class Mask:
    """A query sees keys from ``left`` before its own position to ``right`` after it.

    Args:
        left: at least 0; None means no bound.
        right: likewise; 0 is causal.
        corner: where queries and keys are aligned; "top_left" if nothing is masked.

    Raises:
        ValueError: a bound is neither None nor a nonnegative int.
    """

    left: int | None = None
    right: int | None = None
    corner: Corner = "top_left"

    def __post_init__(self) -> None:
        """Check the bounds, and normalize the corner so that equal masks compare equal."""
        for bound in (self.left, self.right):
            integer = isinstance(bound, int) and not isinstance(bound, bool)
            if bound is not None and not (integer and bound >= 0):
                raise ValueError(_wanted((self.left, self.right)))
        if self.left is None and self.right is None:
            object.__setattr__(self, "corner", "top_left")

    @classmethod
    def of(cls, causal: Causal = False, window: Window = UNBOUNDED) -> Mask:  # noqa: FBT002
        """Return the mask that the arguments of ``attention`` ask for.

        Args:
            causal: False, "top_left" (or True) or "bottom_right"; a causal mask's ``right`` is 0.
            window: (left, right); without ``causal``, positions are aligned at the top left.

        Raises:
            ValueError: an argument does not fit; the message names it, what was wanted and given.
        """
        try:
            corner = CORNERS[causal]
        except (KeyError, TypeError):
            msg = f'causal: wanted False, True, "top_left" or "bottom_right", got {causal!r}'
            raise ValueError(msg) from None
        if window is UNBOUNDED:
            return _UNBOUNDED[corner]
        try:
            left, right = window
        except (TypeError, ValueError):
            raise ValueError(_wanted(window)) from None
        asked = cls(left, right)
        return asked if corner is None else cls(left, 0, corner)

    @classmethod
    def parse(cls, name: str) -> Mask:
        """Return the mask with this name, the inverse of ``str``.

        Raises:
            ValueError: ``name`` is not the name of a mask.
        """
        bound = rf"(\d+|{ALL})"
        found = re.fullmatch(rf"full|causal(_br)?|window{bound}\+{bound}(_br)?", name)
        if found is None:
            raise ValueError(f"mask: wanted full, causal, window70+0 or the like, got {name!r}")
        causal_br, left, right, window_br = found.groups()
        corner: Corner = "bottom_right" if causal_br or window_br else "top_left"
        if left is None:
            return cls(None, None if name == "full" else 0, corner)
        first, last = (None if x == ALL else int(x) for x in (left, right))
        return cls(first, last, corner)

    def __str__(self) -> str:
        """Return the name used in test ids and reports: full, causal_br, window70+0."""
        corner = "_br" if self.corner == "bottom_right" else ""
        if self.left is None and self.right in (None, 0):
            return ("full" if self.right is None else "causal") + corner
        left, right = (ALL if x is None else x for x in (self.left, self.right))
        return f"window{left}+{right}{corner}"

    @property
    def causal(self) -> Literal[False] | Corner:
        """The corner if no query sees a key after its own position, else False."""
        return self.corner if self.right == 0 else False

    @property
    def window(self) -> Window:
        """The bounds (left, right) that ``causal`` does not imply."""
        return self.left, None if self.right == 0 else self.right

    def over(self, seq_q: int, seq_kv: int) -> Band:
        """Apply the mask to T queries and S keys; a bound that hides nothing becomes None."""
        shift = seq_kv - seq_q if self.corner == "bottom_right" else 0
        left = None if self.left is None else self.left - shift
        right = None if self.right is None else self.right + shift
        left = None if left is not None and left >= seq_q - 1 else left  # it hides nothing
        right = None if right is not None and right >= seq_kv else right
        return Band(seq_q, seq_kv, left, right)


class Band(NamedTuple):
    """A mask over T queries and S keys: query t sees keys ``t - left`` ... ``t + right``.

    Args:
        seq_q: T.
        seq_kv: S.
        left: None means no bound; may be negative, like ``right``, but never below ``-right``.
        right: likewise.
    """

    seq_q: int
    seq_kv: int
    left: int | None = None
    right: int | None = None

    def sees(self, t: Any, s: Any) -> Any:
        """Return whether query t sees key s, the definition of the mask, for ints or tensors."""
        seen = s < self.seq_kv
        if self.left is not None:
            seen = seen & (s >= t - self.left)
        if self.right is not None:
            seen = seen & (s <= t + self.right)
        return seen

    def keys_of(self, t: Index) -> tuple[Index | int, Index | int]:
        """Return (low, high): query t sees keys low ... high - 1. Neither decreases as t grows."""
        low = 0 if self.left is None else _clamp(t - self.left, self.seq_kv)
        high = self.seq_kv if self.right is None else _clamp(t + self.right + 1, self.seq_kv)
        return low, high

    @property
    def seen_keys(self) -> slice:
        """The keys from the first to the last that any query sees; all keys if T = 0."""
        if self.seq_q == 0:
            return slice(0, self.seq_kv)
        low = 0 if self.left is None else _clamp(-self.left, self.seq_kv)
        high = self.seq_kv if self.right is None else _clamp(self.seq_q + self.right, self.seq_kv)
        return slice(low, high)

    def queries_of(self, s: Index) -> tuple[Index | int, Index | int]:
        """Return (low, high): key s is seen by queries low ... high - 1."""
        low = 0 if self.right is None else _clamp(s - self.right, self.seq_q)
        high = self.seq_q if self.left is None else _clamp(s + self.left + 1, self.seq_q)
        return low, high

    def key_tiles(self, start: int, stop: int, block: int) -> BlockRange:
        """Return the tiles of keys that queries start ... stop - 1 visit."""
        return tiles_between(self.keys_of(start), self.keys_of(stop - 1), block, self.seq_kv)

    def query_tiles(self, start: int, stop: int, block: int) -> BlockRange:
        """Return the tiles of queries that visit keys start ... stop - 1."""
        return tiles_between(self.queries_of(start), self.queries_of(stop - 1), block, self.seq_q)

    def behind(self, prefix: int) -> list[Band]:
        """Return the bands of a prefix-LM: for the queries in the prefix, and for those after it.

        Args:
            prefix: the number of keys that every query may see; after these it sees the keys up to
                its own position.
        """
        t = min(prefix, self.seq_q)
        left = None if self.left is None else self.left - t
        inside = Band(t, min(prefix, self.seq_kv), self.left)
        return [inside, Band(self.seq_q - t, self.seq_kv, left, t)]

    @property
    def pairs(self) -> int:
        """The exact number of visible pairs of a query and a key."""
        high = self.seq_q * self.seq_kv if self.right is None else self._ramp(self.right + 1)
        return high - (0 if self.left is None else self._ramp(-self.left))

    def _ramp(self, shift: int) -> int:
        """Return the sum of t + shift over all queries, each clamped to 0 ... S."""
        first = min(max(0, -shift), self.seq_q)
        full = min(max(first, self.seq_kv - shift), self.seq_q)
        rising = (full - first) * (first + full - 1 + 2 * shift) // 2
        return rising + (self.seq_q - full) * self.seq_kv

    @property
    def fully_masked_rows(self) -> int:
        """The number of queries that see no key."""
        if self.seq_kv == 0:
            return self.seq_q
        before = 0 if self.right is None else min(max(0, -self.right), self.seq_q)
        behind = 0 if self.left is None else max(0, self.seq_q - max(0, self.seq_kv + self.left))
        return before + behind


FULL, CAUSAL = Mask(), Mask(right=0)
_UNBOUNDED = {None: FULL, "top_left": CAUSAL, "bottom_right": Mask(None, 0, "bottom_right")}


def _wanted(window: object) -> str:
    return f"window: wanted (left, right), each an int from 0 on or None, got {window!r}"


def _clamp(x: Index, most: int) -> Index:
    return x.clamp(0, most) if isinstance(x, torch.Tensor) else max(0, min(x, most))


def tiles_between(first: Sequence[int], last: Sequence[int], block: int, size: int) -> BlockRange:
    """Return the tiles that rows visit, given the bounds of the first row and of the last."""
    (low, high), (last_low, last_high) = first, last
    start = low // block
    if last_high <= low:
        return BlockRange(start, start, start, start)
    end = -(-last_high // block)
    full = min(max(-(-last_low // block), start), end)
    whole = end if high == size else high // block  # the last tile may be ragged
    return BlockRange(start, full, max(full, min(whole, end)), end)
