"""Count the bytes that operators allocate and hold, on any device and on fake tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """Counts the bytes of live storages as operators take and return them.

    What an operator allocates internally, as a custom operator does, is not seen: call the function
    below it. Nor is a tensor that only a kernel reads, as on a GPU no operator takes it. To count
    only new memory, on any device, pass such tensors as ``given``: their storages do not count.

    Attributes:
        now: bytes of the live storages.
        peak: the maximum of ``now``.
        largest: bytes of the largest storage seen so far.
    """

    def __init__(self, *given: torch.Tensor) -> None:
        """Start with no bytes."""
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
        """Run an operator, and count the storages of its arguments and results."""
        del types
        result = op(*args, **(kwargs or {}))
        for x in tree_leaves((args, kwargs, result)):
            if isinstance(x, torch.Tensor):
                self._meet(x, counted=True)
        self.peak = max(self.peak, self.now)
        return result

    def _meet(self, x: torch.Tensor, *, counted: bool) -> None:
        """Track a tensor's storage; unless ``counted``, its bytes never count."""
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
