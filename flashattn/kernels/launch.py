"""Launch: a kernel with all of its arguments but the tensors, started as Triton would start it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import MISSING, dataclass, fields
from functools import cache, lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from triton import knobs
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from flashattn.kernels.constants import INTERPRETED

_NOTHING = nullcontext()
# Past torch.cuda's question whether CUDA was initialized, to which a tensor there is the answer.
_current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)  # noqa: SLF001


class _Thread(threading.local):
    """Whether this thread is known to have a current CUDA context."""

    has_context = False


_thread = _Thread()


@dataclass(frozen=True, eq=False)
class Form:
    """What a kernel is compiled for of a descriptor: all but address, shape and strides.

    Args:
        kind: Triton's class of descriptors.
        common: the fields that descriptors of this form share.
    """

    kind: type
    common: dict[str, Any]

    def fields(self, shape: Sequence[int], strides: Sequence[int]) -> dict[str, Any]:
        """Return the fields of a descriptor, without its base."""
        return self.common | {"shape": list(shape), "strides": list(strides)}

    def describe(self, x: torch.Tensor, shape: Sequence[int], strides: Sequence[int]) -> Any:
        """Return a descriptor of x that Triton has checked."""
        return self.kind(**self.fields(shape, strides), base=x)


@cache
def form_of(kind: type, dtype: torch.dtype, block: tuple[int, ...], **others: Any) -> Form:
    """Return the form with these values; equal values have one form.

    Args:
        kind: Triton's class of descriptors.
        dtype: of the tensors.
        block: sizes of a tile.
        others: fields of this class.
    """
    del dtype  # is part of the cache key alone
    defaults = {x.name: x.default for x in fields(kind) if x.default is not MISSING}
    return Form(kind, defaults | {"block_shape": list(block)} | others)


Tiled = tuple[Form, Sequence[int], Sequence[int]]  # and the shape and the strides


class Described(Protocol):
    """What a kernel reaches in tiles by a descriptor."""

    def tiles(self, x: torch.Tensor) -> Tiled:
        """Return the form, shape and strides of a descriptor of x."""


class TileLoads(NamedTuple):
    """What a portable kernel loads in tiles, from where a tensor lies.

    Args:
        shape: of what is loaded.
        strides: likewise.
        block: sizes of a tile.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]

    def tiles(self, x: torch.Tensor) -> Tiled:
        """Return the form, shape and strides of a descriptor of x."""
        strides = described_strides(self.shape, self.strides)
        return form_of(TensorDescriptor, x.dtype, self.block), self.shape, strides


@lru_cache  # tensors of one call often lie alike
def described_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Return strides for a descriptor.

    A dimension of size 1 may have any stride, but TMA wants one that is aligned.
    """
    dense = -(-shape[-1] * shape[-2] // 16) * 16
    return *[s if n > 1 else dense for n, s in zip(shape[:-1], strides, strict=False)], 1


Operand = torch.Tensor | tuple[torch.Tensor | None, ...] | None  # of a kernel


class Launch:
    """A kernel with all of its arguments but the tensors, which come first, alone or in tuples.

    Args:
        kernel: what is launched.
        programs: how many.
        operands: each tensor: by a descriptor, or as it is.
        numbers: the arguments that follow, in the kernel's order.
        options: the others by name, and the compiler's.
    """

    def __init__(
        self,
        kernel: Any,
        programs: int,
        operands: Sequence[Described | None],
        numbers: Sequence[object],
        options: dict[str, Any],
    ) -> None:
        """Hold on to it; nothing is compiled yet."""
        self._kernel, self._grid = kernel, (programs, 1, 1)
        self._operands, self._numbers, self._options = operands, numbers, options
        self._described: list[tuple[int, type, dict[str, Any]]] = []
        self._compiled: Any = None
        self._known: tuple[object, ...] = ()
        self._rest: tuple[object, ...] = ()

    def __call__(self, *tensors: Operand) -> None:
        """Launch it on the current device's stream."""
        if self._compiled is None and self._first(tensors):
            return
        operands: Sequence[Any] = tensors
        if self._described:
            operands = list(tensors)
            for i, kind, common in self._described:
                descriptor: Any = object.__new__(kind)  # plans promise what Triton checks
                descriptor.__dict__.update(common, base=tensors[i])
                operands[i] = descriptor
        if _listened_to():
            self._compiled[self._grid](*operands, *self._rest)
        else:  # as that does, without making what it would tell, which takes as long as the launch
            self._run(*self._grid, self._stream(self._device), *self._known, *operands, *self._rest)

    def _first(self, tensors: Sequence[Any]) -> bool:
        """Keep what Triton compiled, for this launch or an earlier one of its key.

        Returns:
            whether Triton has launched it, too.
        """
        operands, tiled = list(tensors), []
        for i, operand in enumerate(self._operands):
            if operand is not None and tensors[i] is not None:
                tiled.append((i, *operand.tiles(tensors[i])))
                operands[i] = None
        forms = tuple([(i, form) for i, form, _, _ in tiled])
        key = _key(self._kernel, (*operands, *self._numbers), self._options, forms)
        compiled = earlier = _COMPILED.get(key)
        if compiled is None:
            for i, form, *lies in tiled:
                operands[i] = form.describe(tensors[i], *lies)
            compiled = self._kernel[self._grid](*operands, *self._numbers, **self._options)
            if INTERPRETED.value:
                return True
            if key is not None:
                _COMPILED[key] = compiled
        names = self._kernel.arg_names[len(operands) + len(self._numbers) :]
        self._rest = (*self._numbers, *map(self._options.__getitem__, names))
        self._described = [
            (i, form.kind, form.fields(shape, strides)) for i, form, shape, strides in tiled
        ]
        self._run, self._stream = compiled.run, driver.active.get_current_stream
        self._device = driver.active.get_current_device()
        self._known = compiled.function, compiled.packed_metadata, None, None, None
        self._compiled = compiled
        return earlier is None


_COMPILED: dict[Hashable, Any] = {}  # Triton keeps the same, as long as its kernels live
# What Triton makes part of its own key at each launch; not every version has all of these.
_SETTINGS = (
    (knobs.runtime, "debug"),
    (knobs.compilation, "instrumentation_mode"),
    (knobs.compilation, "fpsan_homomorphic_casts"),
)


def _key(
    kernel: Any,
    given: Sequence[object],
    options: dict[str, Any],
    forms: tuple[tuple[int, Form], ...],
) -> Hashable | None:
    """Return all by which Triton tells compiled kernels apart, or None where it cannot be asked.

    Triton's own binder says what it compiles for of each argument: its type, whether it is 1, and
    whether 16 divides it, or its address. In place of descriptors it gets None.

    Args:
        kernel: what is launched.
        given: the arguments by position, without descriptors.
        options: the others.
        forms: of the descriptors, by their places.
    """
    if INTERPRETED.value:
        return None
    try:
        device = driver.active.get_current_device()
        *_, binder = kernel.device_caches[device]
        _, specialization, rest = binder(*given, **options)
        settings = tuple([getattr(owner, name, None) for owner, name in _SETTINGS])
        inspected = knobs.runtime.add_stages_inspection_hook is not None  # answers what it will
    except (AttributeError, KeyError, TypeError, ValueError):
        return None  # a Triton with another binder, or a kernel that is not Triton's
    if inspected:
        return None
    # The binder stands for its kernel, whose hash takes long, and for the device.
    return binder, forms, tuple(specialization), str(rest), settings


def _listened_to() -> bool:
    """Return whether somebody, a profiler, has asked Triton to be told of each launch."""
    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return getattr(hooks[0], "calls", True) or getattr(hooks[1], "calls", True)


def check_device(device: torch.device) -> None:
    """Refuse what no kernel can run on.

    Raises:
        ValueError: it is a CPU, and the kernels were compiled, not interpreted.
    """
    if device.type == "cpu" and not INTERPRETED.value:
        msg = f"wanted a CUDA tensor, got {device}; TRITON_INTERPRET=1, set before, interprets"
        raise ValueError(msg)


def _ensure_context(index: int) -> None:
    """Make a GPU's primary context current, unless this thread has a context.

    CUDA does so at a thread's first launch, but Triton 3.6 makes TMA descriptors before that.
    """
    cuda, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    cuda.cuCtxGetCurrent(ctypes.byref(context))
    if not context:
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), index)
        cuda.cuCtxSetCurrent(context)
    _thread.has_context = True


def on_device(x: torch.Tensor) -> AbstractContextManager[object]:
    """Make x's GPU the current one, with a context; a CPU tensor needs the interpreter.

    Raises:
        ValueError: see ``check_device``.
    """
    index = x.get_device()
    if index < 0:
        check_device(x.device)
    elif index != _current_device():
        return torch.cuda.device(index)
    elif not _thread.has_context:
        _ensure_context(index)
    return _NOTHING


Name = str | tuple[str | None, ...] | None


class Step(NamedTuple):
    """A launch of a plan.

    Args:
        launch: what is launched.
        operands: names of the tensors that it takes, alone or in tuples; None is no tensor.
    """

    launch: Launch
    operands: tuple[Name, ...]
