"""Memory: shared-memory tiles, and pointers and descriptors of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from flashattn.emulate.schedule import here

POISON = float("nan")


@dataclass(eq=False)
class Shared:
    """A tile in shared memory."""

    own: torch.Tensor  # the contents that threads see
    outer: torch.Tensor  # the contents that copies and products see
    _views: dict[Any, Shared] = field(default_factory=dict)

    @classmethod
    def allocate(cls, shape: Sequence[int], dtype: torch.dtype) -> Shared:
        """Allocate memory that nobody has written to."""
        tile = cls(torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype))
        tile.wipe()
        return tile

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of an element."""
        return self.own.dtype

    @property
    def shape(self) -> list[int]:
        """The shape that the kernel sees."""
        return list(self.own.shape)

    def wipe(self) -> None:
        """Fill the tile with NaN, or with -1 if it holds integers."""
        poison = POISON if self.dtype.is_floating_point else -1
        self.own.fill_(poison)
        self.outer.fill_(poison)

    def _view(self, view: Callable[..., torch.Tensor], *how: Any) -> Shared:
        if (view, how) not in self._views:
            self._views[view, how] = Shared(view(self.own, *how), view(self.outer, *how))
        return self._views[view, how]

    def index(self, i: int) -> Shared:
        """Return the i-th tile.

        Raises:
            IndexError: there is no such tile.
        """
        if not 0 <= i < self.own.shape[0]:
            raise IndexError(f"tile {i} of {self.own.shape[0]}")
        return self._view(torch.select, 0, int(i))

    def reshape(self, shape: Sequence[int]) -> Shared:
        """Return a view in another shape."""
        return self._view(torch.Tensor.view, *shape)

    def permute(self, order: Sequence[int]) -> Shared:
        """Return a view with the dimensions in another order."""
        return self._view(torch.Tensor.permute, *order)

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        """Return a view of a part."""
        return self._view(torch.narrow, dim, start, length)

    def store(self, x: torch.Tensor) -> None:
        """Store x: threads see it, and after a fence of the storing warps copies and products do.

        Raises:
            TypeError: x has another shape or dtype than the tile.
        """
        if (x.shape, x.dtype) != (self.own.shape, self.dtype):
            raise TypeError(f"stored {x.dtype} {list(x.shape)} in {self.dtype} {self.shape}")
        self.own.copy_(x)
        here().unfenced.append(lambda: self.outer.copy_(x))

    def load(self, _: object) -> torch.Tensor:
        """Return the contents that threads see."""
        return self.own.clone()


@dataclass(eq=False)
class Pointer:
    """An address within a tensor."""

    elements: torch.Tensor  # of the tensor, in one dimension
    at: Any = 0  # index of the element; a tensor of indices for a tensor of pointers

    def __add__(self, other: Any) -> Pointer:
        """Return a pointer further on."""
        return Pointer(self.elements, self.at + other)

    @property
    def cell(self) -> torch.Tensor:
        """The element that it points to."""
        return self.elements[int(self.at)]

    def store(self, x: Any, mask: Any) -> None:
        """Store where the mask is true.

        Raises:
            IndexError: an element is outside of the tensor.
        """
        at, x, mask = map(torch.as_tensor, (self.at, x, mask))
        self.elements[self._within(at[mask])] = x[mask].to(self.elements.dtype)

    def load(self, mask: Any, other: float) -> torch.Tensor:
        """Load where the mask is true, and return ``other`` elsewhere.

        Raises:
            IndexError: an element is outside of the tensor.
        """
        at, mask = map(torch.as_tensor, (self.at, mask))
        there = torch.broadcast_to(mask, at.shape)
        found = torch.full(at.shape, other, dtype=self.elements.dtype)
        found[there] = self.elements[self._within(at[there])]
        return found

    def _within(self, at: torch.Tensor) -> torch.Tensor:
        at = at.long()
        if at.numel() and not 0 <= at.min() <= at.max() < self.elements.numel():
            raise IndexError(f"element {at.max()} of {self.elements.numel()}")
        return at

    def add(self, x: int) -> int:
        """Add to an integer and return its old value."""
        before = int(self.cell)
        self.elements[int(self.at)] += x
        return before


class Descriptor:
    """A tensor descriptor, by which copies access a tensor in tiles."""

    def __init__(self, given: Any) -> None:
        """View the tensor of Gluon's descriptor."""
        self._x = given.base.detach().as_strided(given.shape, given.strides)
        self.dtype, self.layout = self._x.dtype, given.layout
        self.block_shape: list[int] = list(given.block_shape)
        size = self.dtype.itemsize * torch.Size(self.block_shape).numel()
        self.block_type = SimpleNamespace(nbytes=size)

    def within(self, at: Sequence[int]) -> tuple[torch.Tensor, tuple[slice, ...]]:
        """Return the part of the tensor that a tile covers, and its slices in the tile."""
        outer, inner = [], []
        for start, n, size in zip(map(int, at), self.block_shape, self._x.shape, strict=True):
            first = min(max(start, 0), size)
            last = max(min(start + n, size), first)
            outer.append(slice(first, last))
            inner.append(slice(first - start, last - start))
        return self._x[tuple(outer)], tuple(inner)
