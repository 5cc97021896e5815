"""Count a kernel's work in Triton's interpreter: products, and bytes loaded and stored.

A product counts in full, with its padding and its masked scores, because the tensor cores multiply
these, too. Loads and stores count the elements that are not masked, or within the bounds of a
descriptor, each time that they are accessed: there is no cache. The numbers are those of the
interpreter's tile, and the same for every version of Triton.
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
# Methods that access memory or multiply, but are not counted. A method that this version of Triton
# lacks cannot be called.
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
    """The work of kernels."""

    dots: int = 0  # products of tiles
    flops: int = 0  # of these products; a multiply-add counts as two
    loaded: int = 0  # bytes
    stored: int = 0  # bytes


def _touched(pointers: TensorHandle, mask: TensorHandle) -> int:
    """Return the bytes of the elements that are not masked."""
    elements = np.count_nonzero(np.broadcast_to(mask.data, pointers.data.shape))
    return int(elements) * pointers.get_element_ty().primitive_bitwidth // 8


@contextmanager
def counting() -> Iterator[Counts]:
    """Count the work of the kernels that are interpreted meanwhile.

    Every load and store, by pointers or by descriptors, ends in the interpreter's masked one.

    Raises:
        NotImplementedError: a kernel calls what is not counted, such as an atomic exchange.
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
    """Return the work of each kernel on one problem.

    Args:
        problem: the problem.
        layout: layout of the inputs, a key of ``testing.inputs.LAYOUTS``.
    """
    options: dict[str, Any] = {"right": problem.band.right, "scale": problem.head_dim**-0.5}
    q, k, v = make_inputs(problem, layout=layout)
    grad_o, grad_lse = make_grads(problem)
    counts = {}
    with counting() as counts["fwd"]:
        o, lse = execute.forward(q, k, v, num_splits=1, **options)
    with counting() as counts["fwd_split"]:  # and the combine kernel
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
    """Count the work of kernels.

    Args:
        wanted: names of cases.
        _known: previous rows, which are not used.

    Returns:
        The rows, and what is wrong regardless of expectations: nothing.
    """
    patch_interpreter()
    rows: Rows = {}
    for problem, loading in CASES:
        named = {k: name for k, name in _names(problem, loading).items() if name in wanted}
        counts = count(problem, LAYOUTS[loading]) if named else {}
        rows |= {name: asdict(counts[kernel]) for kernel, name in named.items()}
    return rows, []
