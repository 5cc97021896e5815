"""Tensor descriptors, through which TMA loads and stores tiles of a tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache, lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

MOST_ADDRESSES = 256  # kept per descriptor, so that changing addresses do not fill the memory


@dataclass(frozen=True, eq=False)
class Form:
    """The part of a descriptor that a kernel is compiled for: no address, shape or strides.

    Args:
        kind: Triton's class of descriptors.
        common: the fields that descriptors of this form share.
    """

    kind: type
    common: dict[str, Any]

    def fields(self, shape: Sequence[int], strides: Sequence[int]) -> dict[str, Any]:
        """Return the fields of a descriptor, without its base."""
        return self.common | {"shape": list(shape), "strides": list(strides)}

    def describe(self, x: torch.Tensor, shape: Sequence[int], strides: Sequence[int]) -> Any:
        """Return a descriptor of x that Triton has checked."""
        return self.kind(**self.fields(shape, strides), base=x)


@cache
def form_of(kind: type, dtype: torch.dtype, block: tuple[int, ...], **others: Any) -> Form:
    """Return the form with these values; equal values return the same object.

    Args:
        kind: Triton's class of descriptors.
        dtype: of the tensors.
        block: sizes of a tile.
        others: other fields of that class.
    """
    del dtype  # only part of the cache key
    defaults = {x.name: x.default for x in fields(kind) if x.default is not MISSING}
    return Form(kind, defaults | {"block_shape": list(block)} | others)


Tiled = tuple[Form, Sequence[int], Sequence[int]]  # form, shape, strides


class DescriptorSpec(Protocol):
    """A tensor whose tiles a kernel accesses by a descriptor."""

    def tiles(self, x: torch.Tensor) -> Tiled:
        """Return the form, shape and strides of a descriptor of x."""


class TileLoadSpec(NamedTuple):
    """Shape, strides and tile of a tensor that a portable kernel loads.

    Args:
        shape: of the tensor.
        strides: of the tensor.
        block: sizes of a tile.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]

    def tiles(self, x: torch.Tensor) -> Tiled:
        """Return the form, shape and strides of a descriptor of x."""
        strides = descriptor_strides(self.shape, self.strides)
        return form_of(TensorDescriptor, x.dtype, self.block), self.shape, strides


@lru_cache  # the tensors of one call often have the same layout
def descriptor_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Return strides for a descriptor.

    A dimension of size 1 may have any stride, but TMA wants one that is aligned.
    """
    dense = -(-shape[-1] * shape[-2] // 16) * 16
    return *[s if n > 1 else dense for n, s in zip(shape[:-1], strides, strict=False)], 1


def descriptor_of(kind: type, common: dict[str, Any], base: object) -> Any:
    """Return a descriptor of a tensor without Triton's checks, whose conditions a plan ensures."""
    descriptor: Any = object.__new__(kind)
    descriptor.__dict__.update(common, base=base)
    return descriptor


class Expanded(dict[int, list[Any]]):
    """The arguments into which Triton expands a descriptor (first a tensor map), by address.

    Making them takes the host as long as a launch, and a training step sees the same addresses
    again and again.

    Args:
        fill: Triton's function, compiled from C, that makes a tensor map.
        lies: the arguments of ``fill`` between address and shape; the shape; the strides.
    """

    def __init__(self, fill: Callable[..., Any], *lies: Sequence[Any]) -> None:
        """Start without addresses."""
        self._fill, self._lies = fill, lies

    def __missing__(self, address: int) -> list[Any]:
        """Make the arguments for an address."""
        if len(self) >= MOST_ADDRESSES:
            self.clear()
        tile, *lies = self._lies
        outside = 0  # out-of-bounds elements load as 0
        found = self[address] = [self._fill(address, *tile, *lies, outside), *lies[0], *lies[1]]
        return found
