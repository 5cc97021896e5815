"""Work that Triton's interpreter sees a kernel do: products, and bytes loaded and stored.

A product counts whole, its padding and its hidden scores included: that is what the tensor cores
multiply. Of loads and stores only the elements that are not masked count, or lie within what a
descriptor describes, and each time that they are touched: no cache comes between. The numbers are
those of the interpreter's tile, the same for every version of Triton.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from flashattn.counts.expect import Rows
from flashattn.counts.single_kernel import Recomputation
from flashattn.kernels import execute
from flashattn.kernels.portable import steps
from flashattn.problem import Problem
from flashattn.testing.inputs import make_grads, make_inputs
from flashattn.testing.patching import patch_interpreter

FILE = "interpreter.json"
KERNELS = ("fwd", "fwd_split", "bwd_preprocess", *steps.KERNELS)
# What would touch memory or multiply past the three that count. A method that this version of
# Triton lacks cannot be called.
NOT_COUNTED = ("create_atomic_cas", "create_dot_scaled")


def _bf16(**sizes: Any) -> Problem:
    return Problem(dtype="bfloat16", **sizes)


PLAIN = _bf16(seq_q=128)  # whole tiles: numbers that can be checked by hand
CAUSAL = _bf16(seq_q=192, causal=True)  # almost half of the tiles are skipped
ROUGH = _bf16(seq_q=45, seq_kv=70, head_dim=24, causal=True)  # ragged and padded at once
PROBLEMS = [
    PLAIN,
    CAUSAL,
    ROUGH,
    _bf16(seq_q=129, seq_kv=65),  # one row into the next tile, of queries and of keys
    _bf16(seq_q=1, seq_kv=200),  # decoding
    _bf16(seq_q=64, seq_kv=200, causal=True),  # nobody sees the last keys
    _bf16(seq_q=64, seq_kv=200, causal="bottom_right"),  # everybody sees the first keys
    _bf16(seq_q=200, seq_kv=64, causal=True),  # the last queries see everything
    _bf16(seq_q=200, seq_kv=64, causal="bottom_right"),  # the first queries see nothing
    _bf16(batch=2, heads=4, kv_heads=2, seq_q=70, causal=True),  # two query heads a key head
    _bf16(seq_q=64, head_dim=8),  # as narrow as a product can be, half of it padding
    _bf16(seq_q=64, head_dim=256, causal=True),  # as wide as it can be
    replace(CAUSAL, dtype="float32"),  # twice the bytes, the same products
    Problem(seq_q=70, seq_kv=45, head_dim=80, causal="bottom_right"),  # fp32, padded
]
CASES = [
    *((problem, "descriptors") for problem in PROBLEMS),
    *((problem, "pointers") for problem in (PLAIN, CAUSAL, ROUGH)),  # the same, by another path
]
LAYOUTS = {"descriptors": "contiguous", "pointers": "misaligned"}


@dataclass
class Counts:
    """What kernels did."""

    dots: int = 0  # products of tiles
    flops: int = 0  # of those, a multiply-add as two
    loaded: int = 0  # bytes
    stored: int = 0  # bytes


def _touched(pointers: TensorHandle, mask: TensorHandle) -> int:
    """Return the bytes of the elements that a mask lets through."""
    elements = np.count_nonzero(np.broadcast_to(mask.data, pointers.data.shape))
    return int(elements) * pointers.get_element_ty().primitive_bitwidth // 8


@contextmanager
def counting() -> Iterator[Counts]:
    """Count what the kernels do that are interpreted meanwhile.

    Every way to load or store ends in the interpreter's masked one, of pointers or of descriptors.

    Raises:
        NotImplementedError: a kernel does what is not counted, such as an atomic exchange.
    """
    counts = Counts()

    def load(
        _: object, pointers: TensorHandle, mask: TensorHandle, *__: object, **___: Any
    ) -> None:
        counts.loaded += _touched(pointers, mask)

    def store(_: object, pointers: TensorHandle, __: object, mask: TensorHandle, *___: Any) -> None:
        counts.stored += _touched(pointers, mask)

    def atomic(
        _: object, __: object, pointers: TensorHandle, ___: object, mask: TensorHandle, *____: Any
    ) -> None:
        counts.loaded += _touched(pointers, mask)
        counts.stored += _touched(pointers, mask)

    def dot(_: object, a: TensorHandle, b: TensorHandle, *__: object) -> None:
        counts.dots += 1
        counts.flops += 2 * a.data.size * b.data.shape[-1]

    def first(look: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
        def both(*arguments: Any, **options: Any) -> Any:
            look(*arguments, **options)
            return method(*arguments, **options)

        return both

    hooks: dict[str, Callable[..., Any]] = {
        "create_masked_load": load,
        "create_masked_store": store,
        "create_atomic_rmw": atomic,
        "create_dot": dot,
    }
    with ExitStack() as stack:
        for name, look in hooks.items():
            hooked = first(look, getattr(InterpreterBuilder, name))
            stack.enter_context(patch.object(InterpreterBuilder, name, hooked))
        for name in NOT_COUNTED:
            if hasattr(InterpreterBuilder, name):
                refusal = NotImplementedError(f"{name} is not counted")
                refuse = patch.object(InterpreterBuilder, name, side_effect=refusal)
                stack.enter_context(refuse)
        yield counts


def count(problem: Problem, layout: str) -> dict[str, Counts]:
    """Return what each kernel does for one problem.

    Args:
        problem: which.
        layout: of the inputs, a key of ``testing.inputs.LAYOUTS``.
    """
    options: dict[str, Any] = {"right": problem.band.right, "scale": problem.head_dim**-0.5}
    q, k, v = make_inputs(problem, layout=layout)
    grad_o, grad_lse = make_grads(problem)
    counts = {}
    with counting() as counts["fwd"]:
        o, lse = execute.forward(q, k, v, num_splits=1, **options)
    with counting() as counts["fwd_split"]:  # and combined
        execute.forward(q, k, v, num_splits=2, **options)
    given = Recomputation(
        q=q, k=k, v=v, grad_o=grad_o, grad_lse=grad_lse, o=o, lse=lse, num_splits=1, **options
    )
    with counting() as counts["bwd_preprocess"]:
        _ = given.preprocessed
    for kernel in steps.KERNELS:
        with counting() as counts[kernel]:
            given.gradients(kernel)
    return counts


def _names(problem: Problem, loading: str) -> dict[str, str]:
    """Return the name of each kernel's case."""
    return {kernel: f"{kernel} {problem} {loading}" for kernel in KERNELS}


def names() -> list[str]:
    """Return the names of all cases, without counting any."""
    return [name for case in CASES for name in _names(*case).values()]


def collect(wanted: Container[str], _known: Rows) -> tuple[Rows, list[str]]:
    """Count what kernels do.

    Args:
        wanted: names of cases.
        _known: rows of before, which spare nothing.

    Returns:
        The rows, and what is wrong whatever is expected: nothing.
    """
    patch_interpreter()
    rows: Rows = {}
    for problem, loading in CASES:
        named = {k: name for k, name in _names(problem, loading).items() if name in wanted}
        counts = count(problem, LAYOUTS[loading]) if named else {}
        rows |= {name: asdict(counts[kernel]) for kernel, name in named.items()}
    return rows, []
