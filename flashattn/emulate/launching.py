"""Launches: within ``emulated()``, Gluon kernels run on the emulator."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, is_dataclass, replace
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashattn.emulate.barriers import NamedBarrier
from flashattn.emulate.language import Number
from flashattn.emulate.memory import Descriptor, Pointer, Shared
from flashattn.emulate.schedule import Schedule, here
from flashattn.emulate.source import Edit, Source
from flashattn.kernels import execute
from flashattn.plan.gpu import Gpu


@dataclass
class Program:
    """A program of a launch."""

    number: int  # id of the program
    count: int  # number of programs of the launch
    memory: list[Shared] = field(default_factory=list)
    barriers: dict[int, NamedBarrier] = field(default_factory=lambda: defaultdict(NamedBarrier))


def run(
    kernel: Callable[..., object],
    programs: int,
    given: list[Any],
    schedule: Schedule,
    together: int,
) -> None:
    """Run ``programs`` programs, ``together`` at once; they start in order."""
    numbers = iter(range(programs))

    def multiprocessor() -> None:
        for number in numbers:
            program = here().program = Program(number, programs)
            kernel(*given)
            if amid := [number for number, x in program.barriers.items() if x.came]:
                raise RuntimeError(f"a program ends amid a phase of named barriers {amid}")
            for tile in program.memory:
                tile.wipe()  # the next program gets this memory

    for i in range(together):
        schedule.start(f"multiprocessor {i}", multiprocessor)
    schedule.run()


def _operand(x: Any) -> Any:
    """Return the argument that an emulated kernel gets for a launch's argument."""
    if isinstance(x, TensorDescriptor):
        return Descriptor(x)
    if isinstance(x, torch.Tensor):
        reach = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
        return Pointer(x.detach().as_strided((reach if x.numel() else 0,), (1,)))
    return Number(x) if type(x) is int else x


def _constant(x: Any) -> Any:
    """Return a constexpr argument as plain values; a config has constexpr fields."""
    if not is_dataclass(x):
        return x
    return SimpleNamespace(**{name: value.value for name, value in vars(x).items()})


@contextmanager
def emulated(*, seed: int = 0, num_sms: int = 1, edit: Edit | None = None) -> Iterator[list[str]]:
    """Emulate all Gluon kernels that are launched meanwhile, on CPU tensors.

    Other kernels run in Triton's interpreter, which must be on (TRITON_INTERPRET=1).

    Args:
        seed: seed of the schedule and of the delays.
        num_sms: number of emulated SMs; each runs one program at a time.
        edit: a function of (path of a module, its text) that returns the text to run.

    Yields:
        The names of the launched kernels, a list that grows.
    """
    source = Source(edit)
    launched: list[str] = []
    seeds = count(seed << 20)  # one per launch

    def chosen(kernel: GluonJITFunction[Any], grid: tuple[int, ...]) -> Callable[..., None]:
        def call(*operands: Any, **options: Any) -> None:
            launched.append(kernel.fn.__name__)
            rest = [_constant(options[name]) for name in kernel.arg_names[len(operands) :]]
            given = [*map(_operand, operands), *rest]
            run(source.plain(kernel), grid[0], given, Schedule(next(seeds)), num_sms)

        return call

    with ExitStack() as stack:
        stack.enter_context(patch.object(GluonJITFunction, "__getitem__", chosen))
        gpu = replace(Gpu.INTERPRETER, num_sms=num_sms)
        stack.enter_context(patch.object(execute, "gpu_of", lambda _: gpu))
        for bind in ("bind_forward", "bind_backward"):  # plans depend on the number of SMs
            unkept = getattr(execute, bind).__wrapped__
            stack.enter_context(patch.object(execute, bind, unkept))
        yield launched
