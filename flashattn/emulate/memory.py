"""Memory: tiles that threads and copies share, and pointers and descriptors of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from flashattn.emulate.schedule import here

POISON = float("nan")


class Shared:
    """A tile in shared memory.

    Args:
        own: what threads see.
        outer: what copies and products see.
    """

    def __init__(self, own: torch.Tensor, outer: torch.Tensor) -> None:
        """Hold on to them."""
        self.own, self.outer = own, outer
        self._views: dict[Any, Shared] = {}

    @classmethod
    def allocate(cls, shape: Sequence[int], dtype: torch.dtype) -> Shared:
        """Return memory that nobody has written to."""
        tile = cls(torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype))
        tile.wipe()
        return tile

    @property
    def dtype(self) -> torch.dtype:
        """Of an element."""
        return self.own.dtype

    @property
    def shape(self) -> list[int]:
        """As the kernel sees it."""
        return list(self.own.shape)

    def wipe(self) -> None:
        """Put NaN everywhere, where there is one."""
        poison = POISON if self.dtype.is_floating_point else -1
        self.own.fill_(poison)
        self.outer.fill_(poison)

    def _view(self, view: Callable[..., torch.Tensor], *how: Any) -> Shared:
        if (view, how) not in self._views:
            self._views[view, how] = Shared(view(self.own, *how), view(self.outer, *how))
        return self._views[view, how]

    def index(self, i: int) -> Shared:
        """Return one of its tiles.

        Raises:
            IndexError: there are not so many.
        """
        if not 0 <= i < self.own.shape[0]:
            raise IndexError(f"tile {i} of {self.own.shape[0]}")
        return self._view(torch.select, 0, int(i))

    def reshape(self, shape: Sequence[int]) -> Shared:
        """Return it in another shape."""
        return self._view(torch.Tensor.view, *shape)

    def permute(self, order: Sequence[int]) -> Shared:
        """Return it with its dimensions in another order."""
        return self._view(torch.Tensor.permute, *order)

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        """Return a part of it."""
        return self._view(torch.narrow, dim, start, length)

    def store(self, x: torch.Tensor) -> None:
        """Let threads see x; copies and products do after a fence of who stored it.

        Raises:
            TypeError: x is not like the tile.
        """
        if (x.shape, x.dtype) != (self.own.shape, self.dtype):
            raise TypeError(f"stored {x.dtype} {list(x.shape)} in {self.dtype} {self.shape}")
        self.own.copy_(x)
        here().unfenced.append(lambda: self.outer.copy_(x))

    def load(self, _: object) -> torch.Tensor:
        """Return what threads see."""
        return self.own.clone()


class Pointer:
    """An address within a tensor.

    Args:
        elements: of the tensor, in a row.
        at: which of them; a tensor of numbers for a tensor of pointers.
    """

    def __init__(self, elements: torch.Tensor, at: Any = 0) -> None:
        """Point."""
        self.elements, self.at = elements, at

    def __add__(self, other: Any) -> Pointer:
        """Point further on."""
        return Pointer(self.elements, self.at + other)

    @property
    def cell(self) -> torch.Tensor:
        """The element that it points to."""
        return self.elements[int(self.at)]

    def store(self, x: Any, mask: Any) -> None:
        """Write where the mask says so.

        Raises:
            IndexError: outside of the tensor.
        """
        at, x, mask = map(torch.as_tensor, (self.at, x, mask))
        self.elements[self._within(at[mask])] = x[mask].to(self.elements.dtype)

    def load(self, mask: Any, other: float) -> torch.Tensor:
        """Read where the mask says so, and take another number elsewhere.

        Raises:
            IndexError: outside of the tensor.
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
        """Add to an integer and return what it was."""
        before = int(self.cell)
        self.elements[int(self.at)] += x
        return before


class Descriptor:
    """What copies reach of a tensor, in tiles.

    Args:
        given: Gluon's descriptor.
    """

    def __init__(self, given: Any) -> None:
        """Look at its tensor."""
        self._x = given.base.detach().as_strided(given.shape, given.strides)
        self.dtype, self.layout = self._x.dtype, given.layout
        self.block_shape: list[int] = list(given.block_shape)
        size = self.dtype.itemsize * torch.Size(self.block_shape).numel()
        self.block_type = SimpleNamespace(nbytes=size)

    def within(self, at: Sequence[int]) -> tuple[torch.Tensor, tuple[slice, ...]]:
        """Return what of the tensor a tile there has, and where in the tile that is."""
        outer, inner = [], []
        for start, n, size in zip(map(int, at), self.block_shape, self._x.shape, strict=True):
            first = min(max(start, 0), size)
            last = max(min(start + n, size), first)
            outer.append(slice(first, last))
            inner.append(slice(first - start, last - start))
        return self._x[tuple(outer)], tuple(inner)
