"""Bytes that operators make and hold, counted as they run: on any device, also on fake tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """Counts the bytes of living storages as operators take and make them.

    What an operator allocates inside itself, as one of a library of its own does, is not seen: call
    what is below it. Nor is what only a kernel reads, which on a GPU no operator takes: it is given
    where only what was made is to count, on any device. Storages of given tensors do not count.

    Attributes:
        now: bytes of the storages that are alive.
        peak: the most there were at once.
        largest: bytes of the largest storage that was ever seen.
    """

    def __init__(self, *given: torch.Tensor) -> None:
        """Start with none."""
        super().__init__()
        self.now, self.peak, self.largest = 0, 0, 0
        self._storages: dict[int, weakref.ref[Any]] = {}
        for x in given:
            self._meet(x, counted=False)

    def __torch_dispatch__(
        self,
        op: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Count what the operator took and gave."""
        del types
        result = op(*args, **(kwargs or {}))
        for x in tree_leaves((args, kwargs, result)):
            if isinstance(x, torch.Tensor):
                self._meet(x, counted=True)
        self.peak = max(self.peak, self.now)
        return result

    def _meet(self, x: torch.Tensor, *, counted: bool) -> None:
        """Count a tensor's storage from now on, or never."""
        storage = x.untyped_storage()
        key = storage._cdata  # noqa: SLF001 - what identifies it
        if key in self._storages:
            return
        size = storage.nbytes() * (counted and not x.is_meta)
        self._storages[key] = weakref.ref(storage, partial(self._free, key, size))
        self.now, self.largest = self.now + size, max(self.largest, size)

    def _free(self, key: int, size: int, _: object) -> None:
        """Forget a storage."""
        del self._storages[key]
        self.now -= size
