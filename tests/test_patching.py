"""The interpreter replaces the same builtins, though it looks for them once."""

from __future__ import annotations

import inspect

import pytest
import triton.language as tl
from triton.runtime import interpreter

from flashattn.counts import patching
from flashattn.kernels.primitives import INTERPRETED

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


@pytest.mark.skipif(not INTERPRETED.value, reason="kernels are compiled here")
def test_tests_do_so():
    """Kernels under test are interpreted so."""
    assert interpreter._patch_builtin is patching._patch
