"""Source: kernels, and what they call, as plain Python on the emulated language."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.language.nvidia import hopper

from flashattn.emulate import barriers, language, mma, tma
from flashattn.kernels.hopper import bf16x3, compat, named, registers, score, semaphore

Edit = Callable[[str, str], str]
STAND_INS: dict[int, Any] = {
    id(gl): language,
    id(hopper.mbarrier): barriers,
    id(hopper.tma): tma,
    id(hopper.fence_async_shared): tma.fence_async_shared,
    id(hopper.warpgroup_mma): mma.warpgroup_mma,
    id(hopper.warpgroup_mma_wait): mma.warpgroup_mma_wait,
    id(compat.load_tile): tma.load_tile,
    id(compat.store_tile): tma.store_tile,
    id(compat.add_tile): tma.add_tile,
    id(registers.opaque): language.to_tensor,
    id(bf16x3.leading_bits): mma.leading_bits,
    id(registers.pack): mma.pack,
    id(registers.unpack): mma.unpack,
    id(registers.bits_as): mma.bits_as,
    id(registers.to_fp32): mma.to_fp32,
    id(registers.any_changes): mma.any_changes,
    id(registers.scale_where): mma.scale_where,
    id(score.capped): language.capped,
    id(score.tanh_approx): language.tanh_approx,
    id(named.barrier_arrive): barriers.barrier_arrive,
    id(named.barrier_wait): barriers.barrier_wait,
    id(compat.thread_barrier): barriers.thread_barrier,
    id(semaphore.wait_eq): tma.wait_eq,
    id(semaphore.fence_acquire): tma.fence_acquire,
    id(semaphore.arrive_inc): tma.arrive_inc,
}


class Source:
    """The kernels of some modules; ``edit`` maps a module's path and text to the text to run."""

    def __init__(self, edit: Edit | None = None) -> None:
        """Start without modules."""
        self._edit = edit or (lambda _, text: text)
        self._modules: dict[str, dict[str, Any]] = {}

    def plain(self, kernel: GluonJITFunction[Any]) -> Callable[..., Any]:
        """Return a kernel, or a function that kernels call, as plain Python."""
        function: Callable[..., Any] = self._names(kernel.fn.__module__)[kernel.fn.__name__]
        return function

    def _names(self, name: str) -> dict[str, Any]:
        """Return the globals of a module's kernels, including the kernels."""
        if name in self._modules:
            return self._modules[name]
        module = sys.modules[name]
        path = str(module.__file__)
        text = self._edit(path, Path(path).read_text(encoding="utf-8"))
        names = self._modules[name] = {
            key: self._stand_in(value, name) for key, value in vars(module).items()
        }
        exec(_device_code(name, path, text), names)  # noqa: S102
        return names

    def _stand_in(self, value: Any, name: str) -> Any:
        """Return what kernels of a module see for one of its globals."""
        if id(value) in STAND_INS:
            return STAND_INS[id(value)]
        if isinstance(value, gl.constexpr):
            return value.value
        if isinstance(value, GluonJITFunction) and value.fn.__module__ != name:
            return self.plain(value)
        if hasattr(value, "__triton_aggregate__") and value.__module__ != name:
            return self._names(value.__module__)[value.__name__]
        return value


@cache
def _device_code(name: str, path: str, text: str) -> CodeType:
    """Compile the device code in a module's text, without decorators."""
    tree = ast.parse(text)
    tree.body = [node for node in tree.body if _is_device_code(node, sys.modules[name])]
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            node.decorator_list = []
        elif isinstance(node, ast.Attribute) and getattr(node.value, "attr", None) == "type":
            node.value = node.value.value  # type: ignore[attr-defined]  # torch has x.layout
    return compile(tree, path, "exec", flags=annotations.compiler_flag, dont_inherit=True)


def _is_device_code(node: ast.stmt, module: ModuleType) -> bool:
    """Return whether a statement defines a kernel, what kernels call, or an aggregate."""
    value = vars(module).get(getattr(node, "name", ""))
    if id(value) in STAND_INS:
        return False
    return isinstance(value, GluonJITFunction) or hasattr(value, "__triton_aggregate__")
