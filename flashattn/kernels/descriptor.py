"""Descriptors: what TMA loads and stores, as a launch makes it of a tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache, lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

MOST_ADDRESSES = 256  # of a descriptor: addresses that keep changing must not fill the memory


@dataclass(frozen=True, eq=False)
class Form:
    """What a kernel is compiled for of a descriptor: all but address, shape and strides.

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
    """Return the form with these values; equal values have one form.

    Args:
        kind: Triton's class of descriptors.
        dtype: of the tensors.
        block: sizes of a tile.
        others: fields of this class.
    """
    del dtype  # is part of the cache key alone
    defaults = {x.name: x.default for x in fields(kind) if x.default is not MISSING}
    return Form(kind, defaults | {"block_shape": list(block)} | others)


Tiled = tuple[Form, Sequence[int], Sequence[int]]  # and the shape and the strides


class DescriptorSpec(Protocol):
    """What a kernel reaches in tiles by a descriptor."""

    def tiles(self, x: torch.Tensor) -> Tiled:
        """Return the form, shape and strides of a descriptor of x."""


class TileLoadSpec(NamedTuple):
    """What a portable kernel loads in tiles, from where a tensor lies.

    Args:
        shape: of what is loaded.
        strides: likewise.
        block: sizes of a tile.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]

    def tiles(self, x: torch.Tensor) -> Tiled:
        """Return the form, shape and strides of a descriptor of x."""
        strides = descriptor_strides(self.shape, self.strides)
        return form_of(TensorDescriptor, x.dtype, self.block), self.shape, strides


@lru_cache  # tensors of one call often lie alike
def descriptor_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Return strides for a descriptor.

    A dimension of size 1 may have any stride, but TMA wants one that is aligned.
    """
    dense = -(-shape[-1] * shape[-2] // 16) * 16
    return *[s if n > 1 else dense for n, s in zip(shape[:-1], strides, strict=False)], 1


def descriptor_of(kind: type, common: dict[str, Any], base: object) -> Any:
    """Return a descriptor of a tensor past Triton's checks: plans promise what these ask."""
    descriptor: Any = object.__new__(kind)
    descriptor.__dict__.update(common, base=base)
    return descriptor


class Expanded(dict[int, list[Any]]):
    """The arguments that Triton makes of a descriptor, the first a tensor map, by the address.

    Making them takes the host as long as a launch, and a training step sees the same addresses
    again and again.

    Args:
        fill: Triton's function, compiled from C, that makes a tensor map.
        lies: what that takes between the address and the shape; the shape and the strides.
    """

    def __init__(self, fill: Callable[..., Any], *lies: Sequence[Any]) -> None:
        """Know no address."""
        self._fill, self._lies = fill, lies

    def __missing__(self, address: int) -> list[Any]:
        """Make them."""
        if len(self) >= MOST_ADDRESSES:
            self.clear()
        tile, *lies = self._lies
        outside = 0  # is what is loaded there
        found = self[address] = [self._fill(address, *tile, *lies, outside), *lies[0], *lies[1]]
        return found
