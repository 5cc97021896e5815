"""Intern Triton's types: creating and comparing them takes most of its interpreter's time.

Kernels compute the same results as before. What is replaced here depends on types alone, so it is
cached. Unusual arguments go to Triton's own function.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorDescHandle, TensorHandle

from flashattn.problem import ALIGNMENT
from flashattn.testing.operators import CASTS, NAMES, fast_cast, fast_dot, fast_index, fast_operator

# None of these has a public name.
_SEMANTIC = TritonSemantic(interpreter.interpreter_builder)
_BUILTIN = tl.core.full.__code__  # the code of every builtin's wrapper
_PLAIN = {int, float, bool, str, type(None), tl.dtype, tl.pointer_type, tl.block_type, tl.tensor}
_make_block, _make_pointer = tl.block_type.__init__, tl.pointer_type.__init__
_unwrap = tl.core._unwrap_if_constexpr  # noqa: SLF001
_item = tl.tuple.__getitem__
_cast, _broadcast = TritonSemantic.cast, TritonSemantic.broadcast_impl_value
_make_tensor = TritonSemantic.to_tensor
_triton_pointers = TensorDescHandle.materialize_pointers
_find_operands = TritonSemantic.binary_op_type_checking_impl
_BYTES = {
    name: max(8, tl.dtype(name).primitive_bitwidth) // 8
    for name in (*tl.dtype.SINT_TYPES, *tl.dtype.UINT_TYPES, *tl.dtype.FP_TYPES)
}
_TYPES: dict[Any, Any] = {x.name: x for x in vars(tl).values() if type(x) is tl.dtype}
_OPERANDS: dict[Any, tuple[Any, Any]] = {}
_FAST = {"__getitem__": fast_index, "to": fast_cast, "cast": fast_cast, "dot": fast_dot}


def intern_types() -> None:
    """Create each type only once in this process, which from now on only interprets kernels."""
    tl.dtype.of_tensors = (tl.constexpr(1), tl.tuple([]))
    makes = {tl.dtype: _dtype, tl.pointer_type: _pointer_type, tl.block_type: _block_type}
    for kind, make in makes.items():
        kind.__eq__ = _equal(kind.__eq__)
        kind.__hash__ = object.__hash__
        kind.__new__ = make
    tl.block_type.__init__ = tl.pointer_type.__init__ = lambda *_, **__: None
    tl.block_type.to_ir = lambda self, _: self
    tl.tensor.__init__ = _init_tensor
    TensorHandle.__init__ = _init_handle
    tl.tuple.__getitem__ = lambda self, i: self.values[i] if type(i) is int else _item(self, i)
    for module in (tl, tl.core):
        module._unwrap_if_constexpr = _unwrap_fast  # noqa: SLF001
    interpreter._validate_np_data_size = _fits  # noqa: SLF001
    interpreter._get_np_dtype = cache(interpreter._get_np_dtype)  # noqa: SLF001
    interpreter._patch_attr = _replace_builtin  # noqa: SLF001
    InterpreterBuilder.create_splat = _splat
    InterpreterBuilder.create_make_range = _make_range
    TritonSemantic.make_tensor = staticmethod(tl.tensor)
    TritonSemantic.to_tensor = _to_tensor
    TensorDescHandle.materialize_pointers = _pointers
    TritonSemantic.cast = _cast_unlike
    TritonSemantic.binary_op_type_checking_impl = _operands
    TritonSemantic.broadcast_impl_value = _broadcast_unlike


def _equal(compare: Any) -> Any:
    def equal(self: Any, other: Any) -> bool:
        if self is other or type(self) is type(other) is tl.dtype:
            return self is other
        return bool(compare(self, other))

    return equal


def _dtype(cls: type, name: Any) -> Any:
    return _TYPES.setdefault(_unwrap(name), object.__new__(cls))


def _pointer_type(cls: type, *given: Any, **options: Any) -> Any:
    made: Any = object.__new__(cls)
    _make_pointer(made, *given, **options)
    return _TYPES.setdefault((made.name, made.address_space), made)


def _block_type(cls: type, element_ty: Any, shape: Any) -> Any:
    """Return the type of such blocks, with the size and shape that their tensors share."""
    sizes = shape.values if type(shape) is tl.tuple else shape
    sizes = tuple([s.value if type(s) is tl.constexpr else s for s in sizes])
    known: Any = _TYPES.get((element_ty, sizes))
    if known is None:
        known = object.__new__(cls)
        _make_block(known, element_ty, list(sizes))
        known.sizes = sizes
        shape = tl.tuple([tl.constexpr(size) for size in sizes])
        known.of_tensors = (tl.constexpr(known.numel), shape)
        _TYPES[element_ty, sizes] = known
    return known


def _init_handle(handle: Any, data: Any, dtype: Any, attr: Any = None) -> None:
    handle.data, handle.dtype, handle.attr = data, dtype, attr or {}
    if data.itemsize > _BYTES.get(dtype.name, 8):
        handle.__post_init__()  # raises an error


def _init_tensor(tensor: Any, handle: Any, type: Any) -> None:  # noqa: A002 - Triton's name
    tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
    tensor.numel, tensor.shape = type.of_tensors


def _unwrap_fast(x: Any) -> Any:
    kind = type(x)
    if kind is tl.constexpr:
        return x.value
    return x if kind in _PLAIN else _unwrap(x)


@cache
def _interpreted(builtin: Any, name: str) -> Any:
    """Return a builtin in the form in which the interpreter calls it."""
    inner = builtin.__wrapped__ if getattr(builtin, "__code__", None) is _BUILTIN else builtin

    def call(*given: Any, **options: Any) -> Any:
        options["_semantic"] = _SEMANTIC
        return inner(*given, **options)

    if name in NAMES:
        return fast_operator(name, call)
    return _FAST[name](call) if name in _FAST else call


def _replace_builtin(owner: Any, name: str, builtin: Any, _: Any, scope: Any) -> None:
    scope.set_attr(owner, name, _interpreted(builtin, name))


def _fits(numbers: Any, dtype: Any) -> bool:
    """Return whether an array's items are no wider than those of the dtype, or are pointers."""
    return numbers.itemsize <= _BYTES.get(dtype.name, numbers.itemsize)


@cache
def _range(start: int, stop: int) -> Any:
    return np.arange(start, stop, dtype=np.int32)


def _make_range(_: Any, __: Any, start: int, stop: int) -> Any:
    return TensorHandle(_range(start, stop), tl.int32)


def _splat(_: Any, wanted: Any, x: Any) -> Any:
    dtype = x.dtype.scalar
    block = np.empty(wanted.sizes, interpreter._get_np_dtype(dtype))  # noqa: SLF001
    block.fill(x.data.item())
    return TensorHandle(block, dtype)


def _to_tensor(semantic: Any, x: Any, check_type: Any = True) -> Any:  # noqa: FBT002 - Triton's
    return x if type(x) is tl.tensor else _make_tensor(semantic, x, check_type)


def _pointers(descriptor: Any, offsets: Any) -> tuple[Any, Any]:
    """Return the pointers to a tile of a descriptor, and which of them are inside its tensor."""
    dtype, rank = descriptor.base.dtype, descriptor.ndim
    size = dtype.element_ty.primitive_bitwidth // 8
    if offsets[-1].data.item() * size % ALIGNMENT:
        raise AssertionError("block offset start must be 16-byte aligned")
    pointers, within = descriptor.base.data, np.True_
    for dim, length in enumerate(descriptor.block_shape):
        at = offsets[dim].data.astype(np.int64) + _range(0, length)
        inside = (at >= 0) & (at < descriptor.shape[dim].data)
        at = (size * at * descriptor.strides[dim].data).astype(np.uint64)
        form = (length,) + (1,) * (rank - 1 - dim)
        pointers, within = pointers + at.reshape(form), within & inside.reshape(form)
    return TensorHandle(pointers, dtype.scalar), TensorHandle(within, tl.int1)


def _cast_unlike(semantic: Any, x: Any, wanted: Any, rounding: Any = None) -> Any:
    """Cast x, unless it has that dtype."""
    old, new = x.dtype, wanted.scalar
    if old is new:
        return x
    if rounding is None and (old.name, new.name) in CASTS:
        dtype = _block_type(tl.block_type, new, x.type.sizes) if x.type.is_block() else new
        return tl.tensor(semantic.builder.cast_impl(x.handle, new), dtype)
    return _cast(semantic, x, wanted, rounding)


def _broadcast_unlike(semantic: Any, a: Any, b: Any) -> Any:
    """Broadcast two tensors to a common shape."""
    if a.type is b.type:
        return a, b
    if (a.type, b.type) not in _OPERANDS:
        x, y = _broadcast(semantic, a, b)
        _OPERANDS[a.type, b.type] = x.type, y.type
    x, y = _OPERANDS[a.type, b.type]
    return _become(semantic, a, x), _become(semantic, b, y)


def _operands(semantic: Any, a: Any, b: Any, *how: bool, **options: bool) -> Any:
    """Cast and broadcast two operands, as determined by their types."""
    x = a.type if type(a) is tl.tensor else semantic.to_tensor_type(a).name
    y = b.type if type(b) is tl.tensor else semantic.to_tensor_type(b).name
    key = (x, y, how, *options.items())
    if key not in _OPERANDS:
        x, y = _find_operands(semantic, a, b, *how, **options)
        _OPERANDS[key] = x.type, y.type
    x, y = _OPERANDS[key]
    return _become(semantic, a, x), _become(semantic, b, y)


def _become(semantic: Any, x: Any, wanted: Any) -> Any:
    """Cast and broadcast an operand to a type."""
    if type(x) is not tl.tensor:
        x = semantic._cast_to_computation_type(x, wanted.scalar)  # noqa: SLF001
    elif x.type is wanted:
        return x
    else:
        x = _cast_unlike(semantic, x, wanted.scalar)
    if x.type is wanted:
        return x
    if not x.type.is_block():
        return tl.tensor(_splat(None, wanted, x.handle), wanted)
    return tl.tensor(TensorHandle(np.broadcast_to(x.handle.data, wanted.sizes), x.dtype), wanted)
