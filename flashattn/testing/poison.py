"""Poison: NaN in memory that must not be read, and in outputs before they are written.

It is also a canary: its bits, all ones, are a NaN that no arithmetic on numbers produces, so stray
writes are detected, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import torch

MARGIN = 4096  # elements on both sides of a tensor; also keeps its address aligned
BYTE = 0xFF


def poisoned(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor filled with poison, of ``like``'s dtype and on its device."""
    bytes_ = torch.full((*shape, like.element_size()), BYTE, dtype=torch.uint8, device=like.device)
    return bytes_.view(like.dtype)[..., 0]


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """Return all bytes of x's storage."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())


def surrounded(x: torch.Tensor, *, copy: bool = True) -> torch.Tensor:
    """Return a tensor with x's strides in its own memory, with ``MARGIN`` poison on both sides.

    With ``copy`` it has x's values, also in the gaps; without, it is filled with poison.
    """
    memory = x.untyped_storage().nbytes()
    margin = MARGIN * x.element_size()
    around = poisoned(x, (memory // x.element_size() + 2 * MARGIN,))
    if copy:
        _bytes(around)[margin : margin + memory] = _bytes(x)
    offset = MARGIN + x.storage_offset()
    return around.new_empty(0).set_(around.untyped_storage(), offset, x.shape, x.stride())


def _is_poisonable(x: torch.Tensor) -> bool:
    return x.is_floating_point() and x.layout == torch.strided and x.device.type in ("cpu", "cuda")


@contextmanager
def _empty_is_poisoned(made: list[torch.Tensor]) -> Iterator[None]:
    """Let ``torch.empty`` and ``empty_like`` return poison that is surrounded by poison."""

    def poisonous(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(*args: object, **options: object) -> torch.Tensor:
            x = make(*args, **options)
            if not _is_poisonable(x):
                return x
            made.append(surrounded(x, copy=False))
            return made[-1]

        return call

    empty, like = poisonous(torch.empty), poisonous(torch.empty_like)
    with patch.object(torch, "empty", empty), patch.object(torch, "empty_like", like):
        yield


@contextmanager
def _allocator_fills(device: torch.device) -> Iterator[None]:
    """Let memory that PyTorch allocates in C++ be filled with NaN, too."""
    before = torch.get_deterministic_debug_mode()
    # On a GPU this would choose other kernels, and fail where there are none. Unlike
    # use_deterministic_algorithms, it does not import the compiler, which takes two seconds.
    torch.set_deterministic_debug_mode("error" if device.type == "cpu" else before)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


@contextmanager
def guard(*tensors: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """Yield the inputs surrounded by poison, fill new memory with poison, and check both after use.

    Reads outside an input, and elements of an output that are never written, show as NaN.

    Raises:
        AssertionError: an input, its gaps or memory around an input or an output was written to.
    """
    inputs = [surrounded(x) for x in tensors]
    before = [_bytes(x).clone() for x in inputs]
    made: list[torch.Tensor] = []
    with _empty_is_poisoned(made), _allocator_fills(tensors[0].device):
        yield inputs
    sound = [(_bytes(x) == memory).all() for x, memory in zip(inputs, before, strict=True)]
    for x in made:
        margin, memory = MARGIN * x.element_size(), _bytes(x)
        around = torch.cat([memory[:margin], memory[-margin:]])
        sound.append((around == BYTE).all().to(inputs[0].device))
    what = [f"input {i}, or the memory around it," for i in range(len(inputs))]
    what += [f"the memory around an output of shape {list(x.shape)}" for x in made]
    for said, is_sound in zip(what, torch.stack(sound).tolist(), strict=True):
        if not is_sound:
            raise AssertionError(f"{said} was written to")
