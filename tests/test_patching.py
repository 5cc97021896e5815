"""The patched interpreter is exact and strict, and patches what Triton patches in less time."""

from __future__ import annotations

import inspect
from itertools import permutations, product

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from flashattn.testing import interned, operators, patching

interning = pytest.mark.why_not.with_args(
    lambda: None if patching.INTERNS else "types are made anew before Triton 3.7"
)


def replaced(patch, owner):
    """Return the names that ``patch`` replaces in an owner, after restoring them."""
    scope = interpreter._LangPatchScope()
    patch(owner, interpreter.interpreter_builder, scope)
    names = [name for _, name, _ in scope._changes]
    scope.restore()
    return names


@pytest.mark.parametrize("owner", [tl, tl.tensor, tl.math, tl.core], ids=str)
def test_all_builtins_are_replaced_once(owner):
    """Every builtin of a module or class is replaced once, and again after it is restored."""
    wanted = [name for name, x in inspect.getmembers(owner) if tl.core.is_builtin(x)]
    assert replaced(patching._patch, owner) == replaced(patching._patch, owner) == wanted != []
    scope = interpreter._LangPatchScope()
    patching._patch(owner, interpreter.interpreter_builder, scope)
    assert replaced(patching._patch, owner) == []
    scope.restore()


def of_a_module(**known):
    """Return a function whose globals are these modules."""
    return type(replaced)(replaced.__code__, known)


@pytest.mark.parametrize("known", [{"tl": tl}, {"core": tl.core}, {"tl": tl, "core": tl.core}])
def test_what_a_kernel_calls_replaces_what_is_left(known, monkeypatch):
    """A kernel patches what Triton does; a callee that knows no more modules patches nothing."""
    monkeypatch.setattr(tl.core, "range", patching._PLAIN[tl.core])  # left replaced by callees
    kernel, callee = of_a_module(tl=tl), of_a_module(**known)
    for _ in range(2):
        changes = []
        for patch in (patching._patch_language, patching._patch_once):
            scope = patch(kernel)
            changes.append([change[:2] for change in scope._changes])
            inner = patching._patch_once(callee)
            assert bool(inner._changes) == ("core" in known)
            assert patching._patch_once(callee)._changes == []
            inner.restore()
            scope.restore()
            assert tl.range is patching._PLAIN[tl]
            assert tl.tensor.T is patching._PLAIN_T
        assert changes[0] == changes[1]


@pytest.mark.interpreter
def test_tests_do_so():
    """Tests run kernels in the patched interpreter."""
    assert interpreter._patch_builtin is patching._patch
    assert interpreter._patch_lang is patching._patch_once
    assert interpreter.InterpreterBuilder.cast_impl is patching._cast_exactly


@triton.jit
def combine(x, y, out, HOW: tl.constexpr, SIZE: tl.constexpr):  # noqa: N803 - as in kernels
    """Combine numbers, or blocks of them."""
    at = 0 if SIZE == 1 else tl.arange(0, SIZE)
    a, b = tl.load(x + at), tl.load(y + at)
    if HOW == "add":
        c = a + b
    elif HOW == "sub":
        c = a - b
    else:
        c = a * b
    tl.store(out + at, c)


LARGEST = 2**31 - 1


@pytest.mark.interpreter  # a GPU's integers overflow silently
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("how", "a", "b", "fits"),
    [
        ("add", LARGEST, 0, True),
        ("add", LARGEST, 1, False),
        ("sub", -LARGEST, 1, True),
        ("sub", -LARGEST, 2, False),
        ("mul", 2**16, 2**15 - 1, True),
        ("mul", 2**16, 2**15, False),
    ],
)
def test_what_does_not_fit_is_refused(how, a, b, fits, size):
    """An int32 overflow is an error, where Triton's interpreter goes on; in int64 it fits."""
    x, y = (torch.tensor([0] * (size - 1) + [number]) for number in (a, b))
    wide, narrow = torch.zeros_like(x), torch.zeros_like(x, dtype=torch.int32)
    combine[(1,)](x, y, wide, how, size)
    assert torch.equal(wide, getattr(torch, how)(x, y))
    if fits:
        combine[(1,)](x.int(), y.int(), narrow, how, size)
        assert torch.equal(narrow.long(), wide)
    else:
        with pytest.raises(Exception, match=f"{how}: int32 has no") as error:
            combine[(1,)](x.int(), y.int(), narrow, how, size)
        assert isinstance(error.value.__cause__ or error.value, OverflowError)


@triton.jit
def convert(x, out, SIZE: tl.constexpr):  # noqa: N803 - as in kernels
    """Convert numbers to the dtype of the output."""
    at = tl.arange(0, SIZE)
    tl.store(out + at, tl.load(x + at).to(out.dtype.element_ty))


@pytest.mark.parametrize("dtypes", list(permutations([torch.float32, torch.bfloat16])), ids=str)
def test_conversions_are_pytorchs(device, dtypes):
    """Every bf16, and fp32 numbers near and between them, convert as PyTorch converts them."""
    high = torch.arange(2**16, dtype=torch.int32, device=device) << 16
    for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        x = (high + low).view(torch.float32).to(dtypes[0])
        out = torch.empty_like(x, dtype=dtypes[1])
        convert[(1,)](x, out, 2**16)
        assert torch.allclose(out, x.to(dtypes[1]), rtol=0, atol=0, equal_nan=True)


SEMANTIC = interned._SEMANTIC
DTYPES = (tl.int1, tl.uint8, tl.int32, tl.int64, tl.float16, tl.bfloat16, tl.float32)


def of_dtype(dtype, *sizes):
    """Return a tensor of the interpreter: a scalar 1, or ones of some shape."""
    one = SEMANTIC.scalar_constant(1, dtype)
    return SEMANTIC.splat(one, list(sizes)) if sizes else one


def alike(a, b):
    """Return whether two tensors have equal types and numbers, or are the same error."""
    if isinstance(b, type):
        return a is b
    same = a.type == b.type and (a.handle.data.shape, a.dtype) == (b.handle.data.shape, b.dtype)
    return same and np.array_equal(a.handle.data, b.handle.data, equal_nan=a.dtype.is_floating())


@interning
@pytest.mark.interpreter
@pytest.mark.parametrize("second", [*DTYPES, 3, 3.5, 2**40], ids=str)
@pytest.mark.parametrize("first", DTYPES, ids=str)
def test_operands_become_what_triton_makes_of_them(first, second):
    """Cached operand types give Triton's operands, with Python numbers and with each broadcast."""
    shapes = ((), (4,), (1, 4), (2, 1), (2, 4))
    for one, two in product(shapes, shapes if isinstance(second, tl.dtype) else [None]):
        a = of_dtype(first, *one)
        b = second if two is None else of_dtype(second, *two)
        try:
            wanted = interned._find_operands(SEMANTIC, a, b)
        except (ValueError, TypeError) as error:
            for _ in range(2):
                with pytest.raises(type(error)):
                    interned._operands(SEMANTIC, a, b)
            continue
        for _ in range(2):
            assert all(map(alike, interned._operands(SEMANTIC, a, b), wanted))


def drawn(dtype, *sizes):
    """Return a tensor of small random numbers, few of them 0; pointers are numbers, too."""
    numbers = np.random.default_rng(len(sizes)).integers(-9, 9, sizes or 1)
    data = numbers.astype(interpreter._get_np_dtype(dtype))
    handle = interpreter.TensorHandle(data, dtype)
    return tl.tensor(handle, tl.block_type(dtype, list(sizes)) if sizes else dtype)


def outcome(function, *given):
    """Return what a function returns, or the kind of its error."""
    try:
        return function(*given)
    except Exception as error:  # noqa: BLE001 - whatever Triton raises
        return type(error)


OPERANDS = *DTYPES, tl.pointer_type(tl.float32), tl.pointer_type(tl.int1)
PAIRS = list(product(OPERANDS, repeat=2))
NUMBERS = (3, -3, 0, True, 3.5, 0.0, float("inf"), float("nan"), 1e-40, 2**40, tl.constexpr(2))


@interning
@pytest.mark.interpreter
@pytest.mark.parametrize("name", operators.NAMES)
def test_operators_are_tritons(name):
    """Fast operators give Triton's results, for each pair of types and kind of shapes."""
    method, block = getattr(tl.tensor, name), (2, 4)
    shapes = ((), ()), ((), block), (block, ()), ((2, 1), (1, 4)), ((4,), block), (block, block)

    def triton_does(a, b):
        return method(a, b, _semantic=SEMANTIC)

    fast = operators.fast_operator(name, triton_does)
    operands = [(drawn(x, *one), drawn(y, *two)) for x, y in PAIRS for one, two in shapes]
    operands += [(drawn(x, *one), y) for x in OPERANDS for one in ((), block) for y in NUMBERS]
    with np.errstate(all="ignore"):
        for a, b in operands:
            wanted, *found = (outcome(f, a, b) for f in (triton_does, fast, fast))
            for x in found:
                assert alike(x, wanted)


@interning
@pytest.mark.interpreter
@pytest.mark.parametrize("sizes", [(), (4,), (2, 4)])
def test_indices_are_tritons(sizes):
    """Fast indexing gives Triton's results, with new dimensions and for indices that it refuses."""

    def triton_does(x, at):
        return tl.tensor.__getitem__(x, at, _semantic=SEMANTIC)

    fast, x = operators.fast_index(triton_does), drawn(tl.int32, *sizes)
    whole, indices = slice(None), []
    for keys in product((None, whole, slice(0, 2), 0), repeat=3):
        indices += [keys, keys[:2], keys[0]]
    for at in indices:
        wanted, *found = (outcome(f, x, at) for f in (triton_does, fast, fast))
        for y in found:
            assert alike(y, wanted)


@interning
@pytest.mark.interpreter
@pytest.mark.parametrize("pair", list(product(DTYPES, repeat=2)), ids=str)
def test_casts_are_tritons(pair):
    """Fast casts give Triton's results, of numbers and of bits."""

    def triton_does(*given):
        return tl.cast(*given, _semantic=SEMANTIC)

    fast = operators.fast_cast(triton_does)
    for sizes, bitcast in product(((), (2, 4)), (False, True)):
        x = drawn(pair[0], *sizes)
        wanted = outcome(triton_does, x, pair[1], None, bitcast)
        for _ in range(2):
            y = outcome(fast, x, pair[1], None, bitcast)
            assert alike(y, wanted)
        assert bitcast or alike(wanted, interned._cast(SEMANTIC, x, pair[1]))


@interning
@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [tl.float16, tl.float32])
def test_products_are_tritons(dtype):
    """Fast products of tiles with an accumulator give Triton's results."""

    def triton_does(*given):
        return tl.dot(*given, _semantic=SEMANTIC)

    fast = operators.fast_dot(triton_does)
    a, b, acc = drawn(dtype, 16, 32), drawn(dtype, 32, 16), drawn(tl.float32, 16, 16)
    for _ in range(2):
        assert alike(fast(a, b, acc), triton_does(a, b, acc))


@interning
@pytest.mark.interpreter
@pytest.mark.parametrize("start", [-3, 0, 2**31 - 8])
def test_pointers_of_descriptors_are_tritons(start):
    """Fast pointers of descriptors are Triton's, at a tensor's edges and beyond 32 bits."""

    def handle(x, dtype=tl.int64):
        return interpreter.TensorHandle(np.array([x], interpreter._get_np_dtype(dtype)), dtype)

    base = handle(1 << 40, tl.pointer_type(tl.bfloat16))
    sizes, strides = [handle(x) for x in (3, 2**31, 60)], [handle(x) for x in (2**38, 64, 1)]
    descriptor = interpreter.TensorDescHandle(base, sizes, strides, [1, 16, 64], None)
    at = [handle(x, tl.int32) for x in (1, start, 8)]
    for x, y in zip(
        interned._pointers(descriptor, at), interned._triton_pointers(descriptor, at), strict=True
    ):
        assert (x.dtype, x.data.dtype) == (y.dtype, y.data.dtype)
        assert np.array_equal(x.data, y.data)


@interning
@pytest.mark.interpreter
def test_types_are_made_once():
    """Equal types are one object, however they are made, so that identity compares them."""
    assert tl.dtype("fp32") is tl.float32
    pointer = tl.pointer_type(tl.float32)
    assert pointer is tl.pointer_type(tl.float32) != tl.pointer_type(tl.float32, const=True)
    for element in (tl.float32, pointer):
        block = tl.block_type(element, [2, 4])
        assert block is tl.block_type(element, tl.tuple([2, 4])) is block.with_element_ty(element)
        assert block != tl.block_type(element, [4, 2])
    assert (block.numel, list(block.shape), block.scalar) == (8, [2, 4], pointer)
