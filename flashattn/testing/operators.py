"""Fast operators for tensors in Triton's interpreter.

Triton casts both operands, copies each to the shape of the result, and lets numpy compute it. These
steps depend on types alone. So Triton's own operator is called once for each pair of types; from
then on numpy is called directly, and broadcasts by itself.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

_SEMANTIC = TritonSemantic(interpreter.interpreter_builder)
LEAST, MOST = -(2**31), 2**31 - 1  # of int32
FP32 = np.finfo(np.float32)
WHOLE = slice(None)
BF16_BITS = 16  # bits of bf16, and low bits of fp32 that it lacks
Compute = Callable[[Any, Any], Any]


class Plan(NamedTuple):
    """How to compute an operator for two types."""

    casts: tuple[Any, Any]  # the dtype that each operand is cast to, or None
    compute: Compute  # returns the numbers, or None if Triton's own operator has to compute them
    dtype: Any  # of the result's handle
    type: Any  # of the result


def _in_32_bits(exact: Compute, many: Compute) -> Compute:
    """Return an integer operator that returns None if a result may not fit into 32 bits."""

    def compute(x: Any, y: Any) -> Any:
        if x.size == y.size == 1:
            return many(x, y) if LEAST <= exact(x.item(), y.item()) <= MOST else None
        a, b = x.min().item(), x.max().item()
        c, d = (y.item(),) * 2 if y.size == 1 else (y.min().item(), y.max().item())
        found = exact(a, c), exact(a, d), exact(b, c), exact(b, d)
        return many(x, y) if min(found) >= LEAST and max(found) <= MOST else None

    return compute


def _quotient(x: Any, y: Any) -> Any:
    return (x - np.fmod(x, y)) // y  # rounded towards zero


_INTEGERS: dict[str, Compute] = {
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "floordiv": _quotient,
}
_NUMBERS: dict[str, Compute] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "mod": np.fmod,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}
_OF_DTYPE: dict[str, dict[str, Compute]] = {
    "int1": {name: _INTEGERS[name] for name in ("and", "or", "xor")},
    "int32": _INTEGERS
    | _NUMBERS
    | {
        name: _in_32_bits(getattr(operator, name), _NUMBERS[name]) for name in ("add", "sub", "mul")
    },
    "int64": _INTEGERS | _NUMBERS,
    "fp32": _NUMBERS | {"truediv": np.divide},
}
_FLOATS = {"fp32", "fp64"}
_NUMERIC = {*_FLOATS, *tl.dtype.SINT_TYPES, *tl.dtype.UINT_TYPES}
CASTS = {(a, b) for a in _NUMERIC for b in (_NUMERIC | {"fp16", "bf16"}) - {"int1"}}
CASTS |= {("fp16", "fp32"), ("bf16", "fp32")}  # all direct casts
_NAMES = {name: (name, False) for found in _OF_DTYPE.values() for name in found}
NAMES = {f"__{r}{name}__": (name, bool(r)) for name in _NAMES for r in ("", "r")}


def fast_operator(name: str, triton: Compute) -> Compute:
    """Return a tensor method that does the same as Triton's."""
    name, swapped = NAMES[name]
    plans: dict[Any, Plan | None] = {}

    def call(a: Any, b: Any) -> Any:
        kind = type(b)
        if kind is tl.constexpr:
            b = b.value
            kind = type(b)
        if kind is tl.tensor:
            key = a.type, b.type
        elif (kind is int and LEAST <= b <= MOST) or (kind is float and _in_fp32(b)):
            key = a.type, kind
        else:
            return triton(a, b)
        if key not in plans:
            result = triton(a, b)
            plans[key] = _plan(name, a, b, result, swapped=swapped)
            return result
        plan = plans[key]
        if plan is None:
            return triton(a, b)
        (of_a, of_b), compute, dtype, type_ = plan
        x = a.handle.data if of_a is None else a.handle.data.astype(of_a)
        if kind is not tl.tensor:
            y = np.array([b], of_b)
        else:
            y = b.handle.data if of_b is None else b.handle.data.astype(of_b)
        found = compute(y, x) if swapped else compute(x, y)
        return triton(a, b) if found is None else tl.tensor(TensorHandle(found, dtype), type_)

    return call


def _in_fp32(x: float) -> bool:
    """Return whether Triton treats a number as fp32."""
    return x == 0 or FP32.tiny <= abs(x) <= FP32.max or abs(x) == np.inf


def _plan(name: str, a: Any, b: Any, result: Any, *, swapped: bool) -> Plan | None:
    """Return how to compute an operator for such operands, or None if it is not that simple."""
    how = True, True, True, name in ("truediv", "floordiv", "mod")
    wanted = TritonSemantic.binary_op_type_checking_impl(_SEMANTIC, a, b, *how)
    common = [x.dtype for x in wanted]
    given = [x.dtype if type(x) is tl.tensor else None for x in (a, b)]
    made = result.handle.dtype, result.type
    if common[0].is_ptr() and name == "add" and given[1] in (tl.int32, tl.int64):
        size = np.uint64(max(1, common[0].element_ty.primitive_bitwidth // 8))
        order = (lambda n, p: p + n * size) if swapped else (lambda p, n: p + n * size)
        return Plan((None, np.uint64), order, *made)
    compute = _OF_DTYPE.get(common[0].name, {}).get(name)
    if compute is None or not {x.name for x in given if x} <= {"fp16", *_OF_DTYPE}:
        return None
    numpy = interpreter._get_np_dtype(common[0])  # noqa: SLF001
    casts = [None if x is common[0] else numpy for x in given]
    return Plan((casts[0], casts[1]), compute, *made)


def fast_index(triton: Compute) -> Compute:
    """Return a method that inserts dimensions into blocks, as Triton's does."""
    plans: dict[Any, Any] = {}

    def call(x: Any, at: Any) -> Any:
        keys = at if type(at) is tuple else (at,)
        if not x.type.is_block() or not all(
            k is None or (type(k) is slice and k == WHOLE) for k in keys
        ):
            return triton(x, at)
        key = x.type, tuple([k is None for k in keys])
        if key not in plans:
            plans[key] = triton(x, at).type
        return tl.tensor(TensorHandle(x.handle.data[keys], x.handle.dtype), plans[key])

    return call


def _from_bf16(data: Any) -> Any:
    return (data.astype(np.uint32) << BF16_BITS).view(np.float32)


def _to_bf16(data: Any) -> Any:
    bits = np.ascontiguousarray(data).view(np.uint32)
    even = bits >> BF16_BITS & 1
    nearest = bits + (even + ((1 << BF16_BITS - 1) - 1)).astype(np.uint32)
    quiet = bits | np.uint32(1 << 22)
    return (np.where(np.isnan(data), quiet, nearest) >> BF16_BITS).astype(np.uint16)


EXACT_CASTS = {("bf16", "fp32"): _from_bf16, ("fp32", "bf16"): _to_bf16}


def fast_cast(triton: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function, or a method of tensors, that casts as Triton's does."""
    plans: dict[Any, Any] = {}

    def call(x: Any, dtype: Any, rounding: Any = None, *how: Any, **others: Any) -> Any:
        wanted = dtype.value if type(dtype) is tl.constexpr else dtype
        bitcast = how[0] if how else others.pop("bitcast", False)
        if type(x) is not tl.tensor or rounding is not None or others or len(how) > 1:
            return triton(x, wanted, rounding, bitcast, *how[1:], **others)
        if x.dtype is wanted:
            return x
        key = x.type, wanted, bitcast
        if key not in plans:
            result = triton(x, wanted, rounding, bitcast)
            plans[key] = _cast_plan(x.dtype, wanted, bitcast=bitcast), result.type
            return result
        cast, type_ = plans[key]
        if cast is None:
            return triton(x, wanted, rounding, bitcast)
        return tl.tensor(TensorHandle(cast(x.handle.data), wanted), type_)

    return call


def _cast_plan(old: Any, new: Any, *, bitcast: bool) -> Callable[[Any], Any] | None:
    """Return a function that casts to another dtype, or None if it is not that simple."""
    numpy = interpreter._get_np_dtype(new)  # noqa: SLF001
    if bitcast:
        same = old.primitive_bitwidth == new.primitive_bitwidth
        return (lambda data: data.view(numpy)) if same else None
    exact = EXACT_CASTS.get((old.name, new.name))
    if exact or (old.name, new.name) not in CASTS:
        return exact
    return lambda data: data.astype(numpy)


def fast_dot(triton: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that multiplies matrices as Triton's does."""
    plans: dict[Any, Any] = {}

    def call(a: Any, b: Any, acc: Any = None, *rest: Any, **options: Any) -> Any:
        if type(acc) is not tl.tensor or rest or options:
            return triton(a, b, acc, *rest, **options)
        key = a.type, b.type, acc.type
        if key not in plans:
            result = triton(a, b, acc)
            plans[key] = {x.dtype for x in (a, b, acc)} == {tl.float32} and result.type
            return result
        if not plans[key]:
            return triton(a, b, acc)
        handles = (x.handle for x in (a, b, acc))
        return tl.tensor(_SEMANTIC.builder.create_dot(*handles, None, 0), plans[key])

    return call
