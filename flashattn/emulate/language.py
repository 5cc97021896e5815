"""The part of Gluon's language that the kernels call, under the same names."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from flashattn.emulate.barriers import Barriers
from flashattn.emulate.memory import Pointer, Shared
from flashattn.emulate.schedule import here

bfloat16, float16, float32 = torch.bfloat16, torch.float16, torch.float32
int32, int64 = torch.int32, torch.int64
static_range = range
exp2, log2, permute, reshape = torch.exp2, torch.log2, torch.permute, torch.reshape
store, sum = Pointer.store, torch.sum  # noqa: A001


class Number(int):
    """An integer whose division rounds toward zero, as on a GPU."""

    def to(self, _: object) -> Number:
        """Return the same number: widths are not emulated."""
        return self

    def __floordiv__(self, other: Any) -> Any:
        """Divide, rounding toward zero."""
        return _divide(self, other)

    def __rfloordiv__(self, other: int) -> Number:
        """Divide ``other`` by the number."""
        return _divide(other, self)

    def __mod__(self, other: int) -> Number:
        """Return the remainder."""
        return Number(self - _divide(self, other) * other)

    def __rmod__(self, other: int) -> Number:
        """Return the remainder of ``other`` divided by the number."""
        return Number(other - _divide(other, self) * self)


def _divide(a: int, b: int) -> Number:
    quotient = builtins.abs(int(a)) // builtins.abs(int(b))
    return Number(quotient if (a < 0) == (b < 0) else -quotient)


def _kept(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operation of int with ``Number`` results."""

    def method(*given: Any) -> Any:
        result = operation(*given)
        return Number(result) if type(result) is int else result

    return method


for _name in ("add", "sub", "mul", "and", "or", "xor"):
    for _method in (f"__{_name}__", f"__r{_name}__"):
        setattr(Number, _method, _kept(getattr(int, _method)))
Number.__neg__ = _kept(int.__neg__)  # type: ignore[method-assign]
to_tensor = Number


def _layout(*_: object) -> None:
    """Stand in for a layout, which is not emulated."""


NVMMADistributedLayout = DotOperandLayout = SliceLayout = BlockedLayout = _layout
NVMMASharedLayout = _layout


def constexpr(x: Any) -> Any:
    """Return x unchanged."""
    return x


def static_assert(holds: bool) -> None:  # noqa: FBT001
    """Check a condition, as the compiler does.

    Raises:
        AssertionError: the condition does not hold.
    """
    if not holds:
        raise AssertionError("static_assert")


def num_warps() -> int:
    """Return the number of warps of the first role; elsewhere only layouts ask for it."""
    return 4


def program_id(_: int) -> Number:
    """Return the id of this program."""
    return Number(here().program.number)


def num_programs(_: int) -> Number:
    """Return the number of programs."""
    return Number(here().program.count)


def cdiv(a: int, b: int) -> Any:
    """Divide, and round up."""
    return (a + b - 1) // b


def abs(x: Any) -> Any:  # noqa: A001
    """Return the absolute value."""
    return x.abs() if isinstance(x, torch.Tensor) else builtins.abs(x)


def minimum(a: Any, b: Any) -> Any:
    """Return the minimum, elementwise for tensors."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return torch.minimum(torch.as_tensor(a), torch.as_tensor(b))
    return Number(min(a, b))


def maximum(a: Any, b: Any) -> Any:
    """Return the maximum, elementwise for tensors."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return torch.maximum(torch.as_tensor(a), torch.as_tensor(b))
    return Number(builtins.max(a, b))


def max(x: torch.Tensor, axis: int) -> Any:  # noqa: A001
    """Return the maximum along an axis."""
    result = x.amax(axis)
    return result if result.ndim else Number(result)


def where(condition: Any, a: Any, b: Any) -> Any:
    """Return a where the condition holds, and b elsewhere."""
    if isinstance(condition, bool):
        return Number(a if condition else b)
    return torch.where(condition, a, b)


def capped(s: torch.Tensor, cap: float) -> torch.Tensor:
    """Return tanh(s * cap)."""
    return (s * cap).tanh()


def tanh_approx(x: torch.Tensor) -> torch.Tensor:
    """Return tanh(x) with a GPU's relative error, 2^-16 up or down, and 1 from 10 on."""
    exact, up = x.tanh(), x.contiguous().view(torch.int32) & 1
    rounded = exact * (1 + (2.0 * up - 1) * 2.0**-16)
    return torch.where(x.abs() < 10, rounded, exact).clamp(-1, 1)  # noqa: PLR2004


def zeros(shape: Sequence[int], dtype: torch.dtype, _: object) -> torch.Tensor:
    """Return zeros."""
    return torch.zeros(shape, dtype=dtype)


def full(shape: Sequence[int], x: float, dtype: torch.dtype, layout: object) -> torch.Tensor:
    """Return a tensor filled with x."""
    del layout
    return torch.full(shape, x if type(x) is float else int(x), dtype=dtype)


def arange(start: int, end: int, layout: object) -> torch.Tensor:
    """Return start ... end - 1."""
    del layout
    return torch.arange(start, end, dtype=torch.int32)


def join(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Stack both tensors along a new last dimension."""
    return torch.stack((x, y), -1)


def convert_layout(x: torch.Tensor, _: object, *, assert_trivial: bool = False) -> torch.Tensor:
    """Return x unchanged."""
    del assert_trivial
    return x


def load(pointer: Pointer, *, mask: Any = True, other: float = 0.0) -> Any:
    """Load a tensor of elements or a single one, an integer as a ``Number``."""
    if isinstance(pointer.at, torch.Tensor) or pointer.elements.is_floating_point():
        return pointer.load(mask, other)
    return Number(pointer.cell)


def atomic_add(pointer: Pointer, x: int) -> Number:
    """Add to an integer in memory and return its old value."""
    here().pause()
    return Number(pointer.add(x))


def allocate_shared_memory(
    dtype: torch.dtype, shape: Sequence[int], layout: object
) -> Shared | Barriers:
    """Allocate shared memory of the program; 64-bit integers are barriers."""
    del layout
    if dtype == int64:
        return Barriers(shape[0])
    tile = Shared.allocate(shape, dtype)
    here().program.memory.append(tile)
    return tile


def warp_specialize(
    roles: Sequence[tuple[Callable[..., object], tuple[Any, ...]]],
    warps: Sequence[int],
    limits: object,
) -> None:
    """Run each role in warps of its own, and wait until all have ended."""
    del limits
    program = here().program
    started = [
        here().schedule.start(
            f"{role.__name__} {i} of program {program.number}",
            partial(role, *given),
            program,
            32 * size,
        )
        for i, ((role, given), size) in enumerate(zip(roles, (num_warps(), *warps), strict=True))
    ]

    def ended() -> bool:
        while started and started[-1].dead:
            started.pop()
        return not started

    here().pause(ended)
