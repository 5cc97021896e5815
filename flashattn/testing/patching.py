"""Patches for Triton's interpreter: as exact as a GPU, stricter, and fifteen times as fast.

Import this module before the first kernel runs, which leaves some of the language replaced.
"""

from __future__ import annotations

import inspect
import operator
from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import (
    GridExecutor,
    InterpretedFunction,
    InterpreterBuilder,
    TensorHandle,
)

from flashattn.testing.interned import intern_types
from flashattn.testing.operators import EXACT_CASTS

# None of these has a public name.
_patch_language = interpreter._patch_lang  # noqa: SLF001
_cast = InterpreterBuilder.cast_impl
_call = GridExecutor.__call__
# One original attribute of each module, and of their tensors: shows whether it is replaced now.
_PLAIN = {tl: tl.range, tl.core: tl.core.range}
_PLAIN_T = tl.tensor.__dict__["T"]
INTERNS = hasattr(TritonSemantic, "to_tensor_type")  # Triton 3.7 or newer
_called = set[Any]()  # jitted functions that the running kernel has called
# For two numbers, and for blocks: for single numbers numpy takes ten times as long as Python.
_EXACT: dict[str, tuple[Any, Any]] = {
    "add": (operator.add, np.add),
    "sub": (operator.sub, np.subtract),
    "mul": (operator.mul, np.multiply),
}


def patch_interpreter() -> None:
    """Make the interpreter exact, strict about integer overflow, and fast.

    bf16 and fp32 are cast to one another as on a GPU. Triton (3.6 and 3.9) truncates to bf16, where
    a GPU rounds to nearest, and casts denormal numbers to other ones, up to twice the smallest
    normal number.

    A sum, difference or product of integers that overflows its dtype is an error. Triton computes
    each a second time to detect that, but reports it only in debug mode.

    Floating-point overflow in a kernel gives inf or NaN without a warning, as on a GPU: rows past
    the last one hold such numbers, which are never stored.

    The builtins of the language are searched for once. Triton replaces them while a kernel runs,
    and searches every module for them whenever a jitted function calls another.
    """
    if INTERNS:
        intern_types()
    for owner in (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base):
        _builtins(owner)  # now, as a running kernel has replaced some
    GridExecutor.__call__ = _call_silently
    InterpretedFunction.__call__ = _call_function
    InterpreterBuilder.cast_impl = _cast_exactly
    TritonSemantic.binary_op_sanitize_overflow_impl = _refuse_overflow
    interpreter._patch_builtin = _patch  # noqa: SLF001
    interpreter._patch_lang = _patch_once  # noqa: SLF001


def _call_silently(kernel: Any, *arguments: Any, **options: Any) -> None:
    """Run a kernel without numpy's warnings."""
    _called.clear()
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        _call(kernel, *arguments, **options)


def _cast_exactly(builder: Any, x: Any, wanted: Any) -> Any:
    """Cast a tensor to another dtype, a scalar type or a block type."""
    cast = EXACT_CASTS.get((x.dtype.scalar.name, wanted.scalar.name))
    return TensorHandle(cast(x.data), wanted.scalar) if cast else _cast(builder, x, wanted)


def _refuse_overflow(_: Any, left: Any, right: Any, operation: Any) -> None:
    """Check a sum, difference or product of two tensors before it is computed.

    Raises:
        OverflowError: a result does not fit the dtype.
    """
    dtype = left.type.scalar
    if dtype.int_bitwidth >= 64:  # noqa: PLR2004 - as Triton: there is nothing wider
        return
    (one, many), a, b = _EXACT[operation.__name__], left.handle.data, right.handle.data
    if a.size == b.size == 1:
        least = most = one(a.item(), b.item())
    else:
        exact = many(a, b, dtype=np.int64)
        least, most = exact.min(), exact.max()
    if least < dtype.get_int_min_value() or most > dtype.get_int_max_value():
        raise OverflowError(f"{operation.__name__}: {dtype} has no {least} ... {most}")


@cache
def _builtins(owner: Any) -> list[tuple[str, Any]]:
    """Return the builtins of a module or class by name; first called before any is replaced."""
    return [(name, x) for name, x in inspect.getmembers(owner) if tl.core.is_builtin(x)]


def _patch(owner: Any, *others: Any) -> None:
    """Replace those builtins of a module or a class that are not replaced yet."""
    for name, member in _builtins(owner):
        if getattr(owner, name) is member:
            interpreter._patch_attr(owner, name, member, *others)  # noqa: SLF001


@cache
def _languages(fn: Any) -> list[Any]:
    return [x for x in fn.__globals__.values() if inspect.ismodule(x) and x in _PLAIN]


def _patch_once(fn: Any) -> Any:
    """Replace the language modules of a function, unless the kernel that calls it has done so."""
    within = tl.tensor.__dict__["T"] is not _PLAIN_T  # in a kernel, which restores it
    if within and all(x.range is not _PLAIN[x] for x in _languages(fn)):
        return interpreter._LangPatchScope()  # noqa: SLF001 - nothing to restore
    return _patch_language(fn)


def _call_function(function: Any, *given: Any, **options: Any) -> Any:
    """Call a jitted function from a kernel."""
    if function.fn not in _called:
        _patch_once(function.fn)
        _called.add(function.fn)
    called = function.rewritten_fn.get(function.fn) or function.rewrite()
    try:
        return called(*given, **options)
    except Exception as error:
        raise InterpreterError(repr(error)) from error
