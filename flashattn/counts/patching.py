"""Triton's interpreter without a third of its time, which goes into asking what it knows."""

from __future__ import annotations

import inspect
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

Members = list[tuple[str, Any]]

_look_and_patch = interpreter._patch_builtin  # noqa: SLF001 - there is no public way to it
_builtins: dict[Any, Members] = {}


def _builtins_of(owner: Any) -> Members:
    """Return the builtins of a module or a class that are not replaced, by name."""
    if owner not in _builtins:
        members = inspect.getmembers(owner)
        _builtins[owner] = [(name, x) for name, x in members if tl.core.is_builtin(x)]
    return _builtins[owner]


def remember_builtins() -> None:
    """Find the builtins of Triton's language once, not at each call of each interpreted function.

    The interpreter replaces them for as long as a kernel runs, and looks through every module for
    them whenever a jitted function calls another, where most often they are replaced already. To be
    called before a first kernel, which leaves some of them replaced.
    """
    for owner in (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base):
        _builtins_of(owner)
    interpreter._patch_builtin = _patch  # noqa: SLF001


def _patch(owner: Any, *others: Any) -> None:
    """Replace those builtins of a module or a class that are not replaced yet."""
    for name, member in _builtins_of(owner):
        if getattr(owner, name) is member:
            interpreter._patch_attr(owner, name, member, *others)  # noqa: SLF001
