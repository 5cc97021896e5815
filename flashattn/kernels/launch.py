"""What every launcher prepares on the host: operands, tile, fp32 precision, the current device.

Triton looks at every argument of every call to find the kernel that it compiled for the like of it,
which costs the host more than SDPA's whole call. So what is launched is planned once for all inputs
that are ``Like`` the first ones, and a ``Launch`` starts the kernel that Triton found then.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from triton import knobs
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from flashattn.kernels.constants import INTERPRETED
from flashattn.kernels.tiles import Kernel, Tile, block_d, padding, pick, pick_tf32

CUTTING = "bf16x6"
PARTS = {CUTTING: 3, "tf32": 2}  # of fp32 that comes cut
PRECISIONS = ("auto", CUTTING, "tf32x3", "tf32", "ieee")
DESCRIPTOR_ALIGNMENT = 16  # bytes, of addresses and of strides
PLANS = 1024  # kept by each launcher: shapes that keep changing shall not fill the memory
PRETENDED = 1
# Scores up to which tiles are loaded by pointers, counting at least 64 queries of a head: a host
# takes some 3 us to make a descriptor, and so few scores keep a GPU busy no longer. On an H200 with
# 2 heads of 64 queries a call took 29 us of the host, and 42 by descriptors, forward and backward
# 207 and 353; the device took 0.3 us less to 3 us more. Not in the interpreter, whose problems are
# all that small.
TINY = 0 if INTERPRETED.value else 1 << 16
LEAST_QUERIES = 64
# Scores from which on fp32 is cut beforehand, counted likewise. In the forward one more launch
# costs more than it saves before that, 5 of 28 us for one head of 1024, D = 64. In the backward
# both passes are then one launch, which always saves time (one head of 256, D = 64: 26 us for 42;
# of 64: 18 for 32), but descriptors take the host's. In the interpreter some problems are on either
# side.
CUT, CUT_FORWARD = (1 << n for n in ((13, 13) if INTERPRETED.value else (15, 20)))
_NOTHING = nullcontext()
# Past torch.cuda's question whether CUDA was initialized, to which a tensor there is the answer.
_current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)  # noqa: SLF001


def input_precision(asked: str, dtype: torch.dtype) -> str:
    """Return how the tensor cores multiply fp32.

    ``bf16x6`` cuts each operand into three bf16 numbers, which hold all 24 bits, and adds the six
    products of them that count. ``tf32x3`` cuts into two TF32 numbers, which takes the tensor cores
    as long; but sums of its products, of 22 bits each, lose more when a tensor core cuts them off:
    measured on an H200, o's mean error is 1.1 to 2.3 times as large, and the logsumexp of rows far
    below zero is off by up to 9 times its budget. ``tf32`` keeps 10 bits of mantissa, or 16 where
    three products of two parts of bf16 are the faster; ``ieee`` does without tensor cores. ``auto``
    is ``bf16x6`` unless torch's own setting (``torch.backends.cuda.matmul``) allows ``tf32``. It
    means nothing for half precision.

    Raises:
        ValueError: ``asked`` is none of these.
    """
    if asked not in PRECISIONS:
        msg = f"precision: wanted one of {', '.join(PRECISIONS)}, got {asked!r}"
        raise ValueError(msg)
    if dtype != torch.float32:
        return "ieee"
    if asked != "auto":
        return asked
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else CUTTING


Facts = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device, int]


class Like(NamedTuple):
    """What a launch depends on of a tensor: everything but where it lies, and what is in it."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int  # of its address from a multiple of 16 bytes

    @classmethod
    def of(cls, x: torch.Tensor) -> Like:
        """Look at a tensor."""
        return cls(*facts(x)[0])

    @property
    def dense(self) -> bool:
        """Whether rows are dense, as every kernel wants them, or there are none."""
        return self.strides[-1] == 1 or self.shape[-1] == 1 or 0 in self.shape

    @property
    def meta(self) -> torch.Tensor:
        """A tensor without memory, to ask PyTorch what it would do with one like this."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")

    @property
    def describable(self) -> bool:
        """Whether the bulk copy engine can address it: aligned, no stride 0, dense in the last."""
        size = self.dtype.itemsize
        return self.offset == 0 and all(
            n == 1 or (stride > 0 and stride * size % DESCRIPTOR_ALIGNMENT == 0)
            for n, stride in zip(self.shape[:-1], self.strides[:-1], strict=True)
        )


def facts(*tensors: torch.Tensor) -> tuple[Facts, ...]:
    """Return the fields of each tensor's ``Like``, which tell plans apart as well and cost less."""
    return tuple(
        [
            (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % DESCRIPTOR_ALIGNMENT)
            for x in tensors
        ]
    )


def dense(x: torch.Tensor) -> torch.Tensor:
    """Return x with dense rows: x itself, or one copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def scores(q: Like, k: Like) -> int:
    """Return how many scores there are, as ``TINY`` and ``CUT`` count them."""
    batch, heads, seq_q, _ = q.shape
    return batch * heads * max(seq_q, LEAST_QUERIES) * k.shape[2]


def pick_tile(kernel: Kernel, *inputs: Like, causal: bool, precision: str) -> Tile:
    """Return the table's tile, which there is; see ``find_tile``."""
    tile = find_tile(kernel, *inputs, causal=causal, precision=precision)
    if tile is None:
        raise KeyError(kernel)
    return tile


def find_tile(kernel: Kernel, *inputs: Like, causal: bool, precision: str) -> Tile | None:
    """Return the table's tile for q, k and others, or None.

    It has descriptors only if all inputs can have one, and there is enough to do; fp32, if it comes
    cut.

    Args:
        kernel: which.
        inputs: q, k and others.
        causal: whether scores are masked.
        precision: as ``input_precision`` returns it.
    """
    x, enough = inputs[0], scores(*inputs[:2])
    capability = None if INTERPRETED.value else torch.cuda.get_device_capability(x.device)
    describable = all(x.describable for x in inputs) and enough > TINY
    if x.dtype == torch.float32:
        large = enough > (CUT if kernel.startswith("bwd") else CUT_FORWARD)
        if precision == "tf32":
            how = {"descriptors": describable, "large": large}
            tile = pick_tf32(kernel, x.shape[-1], capability, **how)
            if tile is not None:
                return tile
        describable = precision == CUTTING and large
    return pick(
        kernel, x.dtype.itemsize, x.shape[-1], capability, causal=causal, descriptors=describable
    )


def cuts(tile: Tile, dtype: torch.dtype, precision: str) -> int:
    """Return into how many parts a tile's operands are ``cut`` beforehand; 0: they come whole.

    Three hold fp32; two, of 16 bits, more than TF32, whose 11 they stand in for.
    """
    return PARTS.get(precision, 0) if tile.cut and dtype == torch.float32 else 0


def row_options(
    head_dim: int, strides: Sequence[Sequence[int]], block: int, warps: int
) -> dict[str, Any]:
    """Return the keyword arguments of a kernel that takes rows ``block`` by ``block``, whole.

    Args:
        head_dim: D.
        strides: of all tensors, but for the last dimensions'.
        block: rows of a program.
        warps: likewise.
    """
    d = block_d(head_dim)
    return {
        "head_dim": head_dim,
        "PADDED": padding(head_dim, strides),
        "BLOCK": block,
        "BLOCK_D": d,
        "num_warps": warps,
    }


class Described(Protocol):
    """What a kernel reaches in tiles by a descriptor."""

    def describe(self, x: torch.Tensor) -> Any:
        """Return a descriptor of x, which holds it as ``base``."""


class Loaded(NamedTuple):
    """What a kernel loads in tiles of [rows, BLOCK_D]."""

    tile: Tile
    rows: int

    def describe(self, x: torch.Tensor) -> TensorDescriptor:
        """Return a descriptor of x."""
        block = [1, 1, self.rows, self.tile.block_d(x.shape[-1])]
        return TensorDescriptor(x, list(x.shape), described_strides(x), block)


def loaded(tile: Tile, rows: int) -> Loaded | None:
    """Return how a tile loads; None is by pointers."""
    return Loaded(tile, rows) if tile.descriptors else None


def described_strides(x: torch.Tensor) -> list[int]:
    """Return the strides of x for a descriptor.

    A dimension of size 1 may carry any stride; the bulk copy engine wants one that is aligned.
    """
    dense = -(-x.shape[-1] * x.shape[-2] // 16) * 16
    strides = [s if n > 1 else dense for n, s in zip(x.shape, x.stride(), strict=True)]
    return [*strides[:-1], 1]


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
        if self._compiled is None:
            self._first(tensors)
            return
        operands: Sequence[Any] = tensors
        if self._described:
            operands = list(tensors)
            for i, kind, fields in self._described:
                descriptor: Any = object.__new__(kind)  # the first of its like was checked
                descriptor.__dict__.update(fields, base=tensors[i])
                operands[i] = descriptor
        if _listened_to():
            self._compiled[self._grid](*operands, *self._rest)
        else:  # as that does, without making what it would tell, which takes as long as the launch
            self._run(*self._grid, self._stream(self._device), *self._known, *operands, *self._rest)

    def _first(self, tensors: Sequence[Operand]) -> None:
        """Launch it as Triton does, and keep what Triton compiled."""
        operands: list[Any] = list(tensors)
        described = []
        for i, (x, operand) in enumerate(zip(tensors, self._operands, strict=True)):
            if isinstance(x, torch.Tensor) and operand is not None:
                operands[i] = operand.describe(x)
                described.append((i, type(operands[i]), vars(operands[i]) | {"base": None}))
        compiled = self._kernel[self._grid](*operands, *self._numbers, **self._options)
        if INTERPRETED.value:
            return
        names = self._kernel.arg_names[len(operands) + len(self._numbers) :]
        self._rest = (*self._numbers, *(self._options[name] for name in names))
        self._described = described
        self._run, self._stream = compiled.run, driver.active.get_current_stream
        self._device = driver.active.get_current_device()
        self._known = compiled.function, compiled.packed_metadata, None, None, None
        self._compiled = compiled


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


def on_device(x: torch.Tensor) -> AbstractContextManager[object]:
    """Make x's GPU the current one; a CPU tensor needs the interpreter.

    Raises:
        ValueError: see ``check_device``.
    """
    index = x.get_device()
    if index < 0:
        check_device(x.device)
    elif index != _current_device():
        return torch.cuda.device(index)
    return _NOTHING


@cache
def multiprocessors(device: torch.device) -> int:
    """Return how many multiprocessors a device has; the interpreter pretends to one."""
    if device.type == "cpu":
        return PRETENDED
    return torch.cuda.get_device_properties(device).multi_processor_count
