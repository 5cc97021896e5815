"""Stable cache keys: Triton finds a kernel on disk, whatever the process compiled before.

Before Triton 3.9, a kernel's key includes the constants of a function that it calls only if that
function's own key was computed before (triton-lang/triton#10494). So a process that launched
kernels in another order than the last one compiled them again.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

from triton.runtime.jit import JITCallable

from flashattn.kernels.constants import INTERPRETED

_known: set[int] = set()  # ids, because hashing a function computes its key


def with_stable_key(kernel: Any) -> Any:
    """Return a kernel after computing its key, and before it those of all that it calls."""
    compiled = isinstance(kernel, JITCallable) and not INTERPRETED.value
    if compiled and id(kernel) not in _known:
        _known.add(id(kernel))
        for called in _called(kernel):
            with_stable_key(called)
        _ = kernel.cache_key
    return kernel


def _called(function: Any) -> Iterator[Any]:
    """Yield all global objects that a function names, and the methods of aggregates."""
    names, found = function.fn.__code__.co_names, function.fn.__globals__
    for value in map(found.get, names):
        of_module = names if isinstance(value, ModuleType) else ()
        for x in (value, *(getattr(value, name, None) for name in of_module)):
            yield from (x, *getattr(x, "hash_attrs", ()))
