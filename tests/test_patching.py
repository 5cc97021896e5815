"""The interpreter does what it did before, though it looks for the same things once."""

from __future__ import annotations

import inspect
from itertools import permutations

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from flashattn.kernels.primitives import INTERPRETED
from flashattn.testing import patching

BUILDER = interpreter.interpreter_builder


def replaced(patch, owner):
    """Return what ``patch`` replaces of an owner, which is then as it was before."""
    scope = interpreter._LangPatchScope()
    patch(owner, BUILDER, scope)
    names = [name for _, name, _ in scope._changes]
    scope.restore()
    return names


@pytest.mark.parametrize(
    "owner", [tl, tl.tensor, tl.math, tl.core, tl.core.tensor_descriptor_base], ids=str
)
def test_the_same_is_replaced(owner):
    """Of every module and class it is what Triton replaces, each time anew."""
    wanted = replaced(patching._look_and_patch, owner)
    assert wanted
    for _ in range(2):
        assert replaced(patching._patch, owner) == wanted


def test_it_looks_once(monkeypatch):
    """What is replaced is not replaced again, nor looked for; what a kernel restored is."""

    class Owner:
        @tl.core.builtin
        def load(self, _semantic=None):
            """Do nothing."""

        def other(self):
            """Be no builtin."""

    looks, look = [], inspect.getmembers
    monkeypatch.setattr(inspect, "getmembers", lambda x: looks.append(x) or look(x))
    scope = interpreter._LangPatchScope()
    for _ in range(2):
        patching._patch(Owner, BUILDER, scope)
    assert [name for _, name, _ in scope._changes] == ["load"]
    scope.restore()
    assert replaced(patching._patch, Owner) == ["load"]
    assert looks == [Owner]


def of_a_module(**known):
    """Return a function of a module that knows some others."""
    return type(replaced)(replaced.__code__, known)


@pytest.mark.parametrize("known", [{"tl": tl}, {"core": tl.core}, {"tl": tl, "core": tl.core}])
def test_what_a_kernel_calls_replaces_what_is_left(known, monkeypatch):
    """A kernel replaces what Triton does; what it calls that knows no more replaces nothing."""
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


def test_dtypes_are_the_same():
    """Numbers, pointers and blocks of them have the dtypes of numpy that they had, each time."""
    numbers = [tl.int1, tl.int8, tl.uint16, tl.int64, tl.float16, tl.bfloat16, tl.float32]
    pointers = [tl.pointer_type(dtype) for dtype in (tl.float16, tl.int64)]
    for dtype in [*numbers, *pointers]:
        for of in (dtype, tl.block_type(dtype, [16]), tl.block_type(dtype, [4, 8])):
            wanted = patching._look_up(of)
            assert [patching._np_dtype(of) for _ in range(2)] == [wanted] * 2


@pytest.mark.skipif(not INTERPRETED.value, reason="kernels are compiled here")
def test_tests_do_so():
    """Kernels under test are interpreted so."""
    assert interpreter._patch_builtin is patching._patch
    assert interpreter._patch_lang is patching._patch_once
    assert interpreter._get_np_dtype is patching._np_dtype
    assert interpreter.InterpreterBuilder.cast_impl is patching._cast_exactly


@triton.jit
def combine(x, y, out, HOW: tl.constexpr):  # noqa: N803 - as in kernels
    """Combine two numbers."""
    a, b = tl.load(x), tl.load(y)
    if HOW == "add":
        c = a + b
    elif HOW == "sub":
        c = a - b
    else:
        c = a * b
    tl.store(out, c)


LARGEST = 2**31 - 1


@pytest.mark.skipif(not INTERPRETED.value, reason="a GPU's integers overflow without a word")
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
def test_what_does_not_fit_is_refused(how, a, b, fits):
    """An integer that 32 bits do not hold is an error, where Triton goes on; in 64 bits it fits."""
    x, y = (torch.tensor([number]) for number in (a, b))
    wide, narrow = torch.zeros_like(x), torch.zeros_like(x, dtype=torch.int32)
    combine[(1,)](x, y, wide, how)
    assert wide.item() == getattr(torch, how)(x, y).item()
    if fits:
        combine[(1,)](x.int(), y.int(), narrow, how)
        assert narrow.item() == wide.item()
    else:
        with pytest.raises(Exception, match=f"{how}: int32 has no") as error:
            combine[(1,)](x.int(), y.int(), narrow, how)
        assert isinstance(error.value.__cause__ or error.value, OverflowError)


@triton.jit
def convert(x, out, SIZE: tl.constexpr):  # noqa: N803 - as in kernels
    """Convert numbers to the dtype of the output."""
    at = tl.arange(0, SIZE)
    tl.store(out + at, tl.load(x + at).to(out.dtype.element_ty))


@pytest.mark.parametrize("dtypes", list(permutations([torch.float32, torch.bfloat16])), ids=str)
def test_conversions_are_pytorchs(device, dtypes):
    """Every bf16, and as many fp32 near and between them, become what PyTorch makes of them."""
    high = torch.arange(2**16, dtype=torch.int32, device=device) << 16
    for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        x = (high + low).view(torch.float32).to(dtypes[0])
        out = torch.empty_like(x, dtype=dtypes[1])
        convert[(1,)](x, out, 2**16)
        assert torch.allclose(out, x.to(dtypes[1]), rtol=0, atol=0, equal_nan=True)
