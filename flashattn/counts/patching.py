"""Triton's interpreter without a third of its time, which goes into asking what it knows."""

from __future__ import annotations

import inspect
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

Members = list[tuple[str, Any]]

_look_and_patch = interpreter._patch_builtin  # noqa: SLF001 - there is no public way to it
_builtins: dict[Any, Members] = {}


def remember_builtins() -> None:
    """Find the builtins of Triton's language once, not at each call of each interpreted function.

    The interpreter replaces them for as long as a kernel runs, and looks through every module for
    them whenever a jitted function calls another, where most often they are replaced already.
    """
    interpreter._patch_builtin = _patch  # noqa: SLF001


def _patch(owner: Any, *others: Any) -> None:
    """Replace those builtins of a module or a class that are not replaced yet."""
    if owner not in _builtins:
        members = inspect.getmembers(owner)
        _builtins[owner] = [(name, x) for name, x in members if tl.core.is_builtin(x)]
    for name, member in _builtins[owner]:
        if getattr(owner, name) is member:
            interpreter._patch_attr(owner, name, member, *others)  # noqa: SLF001
