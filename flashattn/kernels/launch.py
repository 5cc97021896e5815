"""Launches: a kernel with all of its arguments except the tensors, started as Triton would."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from triton import knobs
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver

from flashattn.gpus import TRITON
from flashattn.kernels.cache_key import with_stable_key
from flashattn.kernels.constants import INTERPRETED
from flashattn.kernels.descriptor import DescriptorSpec, Expanded, Form, descriptor_of

_NOTHING = nullcontext()
# Skips torch.cuda's check that CUDA was initialized: a tensor on the GPU implies that.
_current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)  # noqa: SLF001


class _Thread(threading.local):
    """Whether this thread is known to have a current CUDA context."""

    has_context = False


_thread = _Thread()


class Launcher(NamedTuple):
    """Triton's compiled function that starts a kernel, and its arguments.

    Args:
        call: the function; it takes the grid, a stream, ``known``, and the kernel's arguments.
        known: the arguments that follow the stream.
        fill: Triton's compiled function that makes a tensor map.
        tiles: for each descriptor, the arguments of ``fill`` (see ``descriptor.Expanded``).
    """

    call: Callable[..., None]
    known: tuple[object, ...]
    fill: Callable[..., Any]
    tiles: Sequence[tuple[Any, ...]]


def launcher_of(compiled: Any) -> Launcher | None:
    """Return the compiled function that Triton 3.6 finally calls, or None where it is unknown.

    What Triton does in Python before that call takes the host longer, see docs/tuning-log.md.
    """
    if TRITON != (3, 6):
        return None
    run = compiled.run
    metadata: Sequence[Any] = ()
    call = getattr(run, "launch", None)
    if call is None or run.global_scratch_size or run.profile_scratch_size:
        return None
    if hasattr(call, "__code__"):  # a Python function that expands descriptors
        if call.__code__.co_freevars != ("launcher", "tensordesc_indices", "tensordesc_meta"):
            return None
        call, _, metadata = (cell.cell_contents for cell in call.__closure__)
    if any(x is None or x["fp4_padded"] for x in metadata):
        return None
    types = nvidia.TMA_DTYPE_DEVICE_TO_HOST
    tiles = [
        (x["swizzle"], x["elem_size"], types[x["elem_type"]], x["block_size"]) for x in metadata
    ]
    known = (
        *(compiled.function, run.launch_cooperative_grid, run.launch_pdl, None, None),
        *(compiled.packed_metadata, None, None, None),
    )
    return Launcher(call, known, driver.active.utils.fill_tma_descriptor, tiles)


Operand = torch.Tensor | tuple[torch.Tensor | None, ...] | None  # of a kernel


class KernelLaunch:
    """A kernel with all of its arguments except the tensors, which come first, alone or in tuples.

    Args:
        kernel: the kernel.
        programs: how many programs are launched.
        numbers: the arguments that follow the tensors, in the kernel's order.
        options: the other arguments by name, and those of the compiler.
        operands: descriptors for the first tensors; with None, and behind them, tensors are passed.
    """

    _launcher: Any
    _known: tuple[object, ...]
    _expanded: list[Expanded | None]

    def __init__(
        self,
        kernel: Any,
        programs: int,
        numbers: Sequence[object],
        options: dict[str, Any],
        operands: Sequence[DescriptorSpec | None] = (),
    ) -> None:
        """Keep the arguments; nothing is compiled yet."""
        self._kernel, self._grid = kernel, (programs, 1, 1)
        self._operands, self._numbers, self._options = operands, numbers, options
        self._compiled: Any = None

    def __call__(self, *tensors: Operand) -> None:
        """Launch it on the current device's stream."""
        if self._compiled is None and self._first(tensors):
            return
        operands: Sequence[Any]
        if _listened_to():
            self._compiled[self._grid](*self._checked(tensors), *self._rest)
        elif self._launcher is None:  # as above, but without the slow launch metadata for hooks
            operands = self._described(tensors)
            self._run(*self._grid, self._stream(self._device), *self._known, *operands, *self._rest)
        else:
            operands = self._expand(tensors) if self._expanded else tensors
            stream = self._stream(self._device)
            self._launcher(*self._grid, stream, *self._known, *operands, *self._rest)

    def _expand(self, tensors: Sequence[Any]) -> list[Any]:
        """Return the tensors, with descriptors expanded into their arguments."""
        operands: list[Any] = []
        for x, expanded in zip(tensors, self._expanded, strict=False):
            if expanded is None:
                operands.append(x)
            else:
                operands += expanded[x.data_ptr()]
        operands += tensors[len(self._expanded) :]
        return operands

    def _described(self, tensors: Sequence[Operand]) -> list[Any]:
        """Return the tensors, some as descriptors."""
        operands: list[Any] = list(tensors)
        for i, kind, common in self._descriptors:
            operands[i] = descriptor_of(kind, common, tensors[i])
        return operands

    def _checked(self, tensors: Sequence[Operand]) -> list[Any]:
        """Return the tensors, some as descriptors that Triton has checked."""
        operands: list[Any] = list(tensors)
        for i, form, *lies in self._tiled:
            operands[i] = form.describe(operands[i], *lies)
        return operands

    def _first(self, tensors: Sequence[Any]) -> bool:
        """Keep what Triton compiled, for this launch or an earlier one with the same key.

        Returns:
            whether Triton has also launched the kernel.
        """
        operands, tiled = list(tensors), []
        for i, how in enumerate(self._operands):
            if how is not None and tensors[i] is not None:
                tiled.append((i, *how.tiles(tensors[i])))
                operands[i] = None
        self._tiled = tiled
        forms = tuple([(i, form) for i, form, _, _ in tiled])
        key = _key(self._kernel, (*operands, *self._numbers), self._options, forms)
        found = earlier = _COMPILED.get(key)
        if found is None:
            given = *self._checked(tensors), *self._numbers
            compiled = with_stable_key(self._kernel)[self._grid](*given, **self._options)
            if INTERPRETED.value:
                return True
            found = compiled, launcher_of(compiled)
            if key is not None:
                _COMPILED[key] = found
        compiled, launcher = found
        names = self._kernel.arg_names[len(operands) + len(self._numbers) :]
        self._rest = (*self._numbers, *map(self._options.__getitem__, names))
        active = driver.active
        self._stream, self._device = active.get_current_stream, active.get_current_device()
        if launcher is None:
            self._launcher, self._run = None, compiled.run
            self._known = compiled.function, compiled.packed_metadata, None, None, None
            self._descriptors = [(i, form.kind, form.fields(*lies)) for i, form, *lies in tiled]
        else:
            self._launcher, self._known, fill, tiles = launcher
            self._expanded = [None] * (tiled[-1][0] + 1 if tiled else 0)
            for (i, _, shape, strides), tile in zip(tiled, tiles, strict=True):
                self._expanded[i] = Expanded(fill, tile, shape, strides)
        self._compiled = compiled
        return earlier is None


# Triton itself keeps these for as long as its kernels live.
_COMPILED: dict[Hashable, tuple[Any, Launcher | None]] = {}


def _key(
    kernel: Any,
    given: Sequence[object],
    options: dict[str, Any],
    forms: tuple[tuple[int, Form], ...],
) -> Hashable | None:
    """Return the key by which Triton distinguishes compiled kernels, or None if it is unknown.

    Triton's own binder says how it specializes on each argument: its type, whether it is 1, and
    whether 16 divides it, or its address. It gets None in place of descriptors.

    Args:
        kernel: the kernel.
        given: the positional arguments, with None for descriptors.
        options: the keyword arguments.
        forms: of the descriptors, with their positions.
    """
    if INTERPRETED.value:
        return None
    try:
        device = driver.active.get_current_device()
        *_, binder = kernel.device_caches[device]
        _, specialization, rest = binder(*given, **options)
        # Settings that Triton adds to its own key at each launch; not every version has all.
        settings = (
            knobs.runtime.debug,
            getattr(knobs.compilation, "instrumentation_mode", None),
            getattr(knobs.compilation, "fpsan_homomorphic_casts", None),
        )
        inspected = knobs.runtime.add_stages_inspection_hook is not None  # may change the key
    except (AttributeError, KeyError, TypeError, ValueError):
        return None  # a Triton with another binder, or a kernel that is not Triton's
    if inspected:
        return None
    # The binder identifies the kernel, whose hash takes long, and the device.
    return binder, forms, tuple(specialization), str(rest), settings


def _listened_to() -> bool:
    """Return whether a launch hook, such as a profiler's, is registered with Triton."""
    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return getattr(hooks[0], "calls", True) or getattr(hooks[1], "calls", True)


def check_device(device: torch.device) -> None:
    """Check that kernels can run on a device.

    Raises:
        ValueError: it is a CPU, and kernels are compiled, not interpreted.
    """
    if device.type == "cpu" and not INTERPRETED.value:
        msg = f"wanted a CUDA tensor, got {device}; TRITON_INTERPRET=1, set before, interprets"
        raise ValueError(msg)


def _ensure_context(index: int) -> None:
    """Make a GPU's primary context current, unless this thread has a context.

    CUDA does that at a thread's first launch, but Triton 3.6 makes TMA descriptors earlier.
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
        launch: the kernel launch.
        operands: names of the tensors that it takes, alone or in tuples; None is no tensor.
    """

    launch: KernelLaunch
    operands: tuple[Name, ...]
