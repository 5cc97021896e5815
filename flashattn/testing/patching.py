"""Triton's interpreter, exact where a GPU is, stricter, and in a fifteenth of its time.

To be imported before a first kernel runs, which leaves some of the language replaced.
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

# There is no public way to any of these.
_patch_language = interpreter._patch_lang  # noqa: SLF001
_cast = InterpreterBuilder.cast_impl
_call = GridExecutor.__call__
# Of each module, and of the tensors that both have, something that is not replaced yet.
_PLAIN = {tl: tl.range, tl.core: tl.core.range}
_PLAIN_T = tl.tensor.__dict__["T"]
INTERNS = hasattr(TritonSemantic, "to_tensor_type")  # Triton 3.7 or newer
_called = set[Any]()  # functions that the kernel that runs has called
# Of two numbers, and of blocks: numpy takes ten times as long as Python to compute one number.
_EXACT: dict[str, tuple[Any, Any]] = {
    "add": (operator.add, np.add),
    "sub": (operator.sub, np.subtract),
    "mul": (operator.mul, np.multiply),
}


def patch_interpreter() -> None:
    """Let kernels be interpreted as they are tested: exactly, without overflows, and fast.

    bf16 and fp32 become one another as on a GPU. Triton (3.6 and 3.9) cuts off what bf16 does not
    hold, where a GPU rounds to nearest, and makes denormal numbers others, up to twice the smallest
    normal one.

    Sums, differences and products of integers fail that do not fit their dtype. Triton computes
    each of them a second time to find out, and then says nothing, unless it debugs.

    What overflows in a kernel is inf or NaN without a warning, as on a GPU: rows beyond the last
    hold such numbers, which nobody stores.

    The builtins of the language are looked for once. Triton replaces them for as long as a kernel
    runs, and looks through every module for them whenever a jitted function calls another.
    """
    if INTERNS:
        intern_types()
    for owner in (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base):
        _builtins(owner)  # now: a kernel that runs has replaced some
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
    """Return a tensor in another dtype, a scalar one or that of blocks."""
    cast = EXACT_CASTS.get((x.dtype.scalar.name, wanted.scalar.name))
    return TensorHandle(cast(x.data), wanted.scalar) if cast else _cast(builder, x, wanted)


def _refuse_overflow(semantic: Any, left: Any, right: Any, operation: Any) -> None:
    """Look at a sum, difference or product of two tensors before it is computed.

    Raises:
        OverflowError: it has numbers that its dtype has not.
    """
    del semantic
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
    """Return the builtins of a module or a class by name; asked before any is replaced."""
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
    """Replace the language that a function knows, unless the kernel that calls it has done so."""
    within = tl.tensor.__dict__["T"] is not _PLAIN_T  # a kernel, which restores it
    if within and all(x.range is not _PLAIN[x] for x in _languages(fn)):
        return interpreter._LangPatchScope()  # noqa: SLF001 - nothing to restore
    return _patch_language(fn)


def _call_function(function: Any, *given: Any, **options: Any) -> Any:
    """Call a jitted function that a kernel calls."""
    if function.fn not in _called:
        _patch_once(function.fn)
        _called.add(function.fn)
    called = function.rewritten_fn.get(function.fn) or function.rewrite()
    try:
        return called(*given, **options)
    except Exception as error:
        raise InterpreterError(repr(error)) from error
