"""The passes of an implementation as calls to time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from flashattn.problem import Problem
from flashattn.registry import Impl
from flashattn.testing.inputs import make_grads, make_inputs, make_scored
from flashattn.testing.sample import LEARNED


class Call(NamedTuple):
    """A call to time, and a function that makes its arguments, untimed."""

    call: Callable[..., Any]
    setup: Callable[[], tuple[Any, ...]] = tuple


def prepared(
    passes: str, impl: Impl, problem: Problem, device: torch.device, **how: Any
) -> tuple[Call, dict[str, torch.Tensor | None]]:
    """Return a pass of an implementation as a call, and its results by name.

    Args:
        passes: "forward", "backward" or "forward+backward".
        impl: the implementation.
        problem: what to compute.
        device: where to run.
        how: keyword arguments of ``Graph``.
    """
    if passes == "forward":
        inputs = make_inputs(problem, device=device)
        options = problem.keywords | make_scored(problem, device=device)
        forward = partial(impl, *inputs, **options, scale=problem.head_dim**-0.5)
        return Call(forward), dict(zip(("o", "lse"), forward(), strict=True))
    graph = Graph(impl, problem, device, **how)
    o = graph.forward() if passes == "backward" else ()
    call = graph.backward if passes == "backward" else graph.both
    results: dict[str, torch.Tensor | None] = dict(zip(graph.grads, call(*o), strict=True))
    again = o and not graph.keep
    return Call(call, graph.forward) if again else Call(partial(call, *o)), results


class Graph:
    """The autograd graph of an implementation, built untimed.

    If ``learned``, a bias and sinks have gradients, too. ``options`` go to the implementation.

    Attributes:
        grads: names of the gradients, in order.
    """

    def __init__(
        self,
        impl: Impl,
        problem: Problem,
        device: torch.device,
        *,
        learned: bool = False,
        **options: Any,
    ) -> None:
        """Create the inputs and the gradient of o."""
        q, k, v = make_inputs(problem, device=device)
        scored = make_scored(problem, device=device)
        others = [name for name in LEARNED if learned and name in scored]
        self.inputs = [x.requires_grad_() for x in (q, k, v, *(scored[name] for name in others))]
        self.grads = ["dq", "dk", "dv", *(f"d{name}" for name in others)]
        self.grad_o, _ = make_grads(problem, device=device)
        # Compiled code reuses the buffers of the graph, so each call needs a new graph.
        self.keep = not impl.compiles
        how = problem.keywords | scored | options
        self._call = partial(impl, q, k, v, **how, scale=problem.head_dim**-0.5)

    def forward(self) -> tuple[torch.Tensor]:
        """Return o as a tuple of arguments for ``backward``."""
        return (self._call()[0],)

    def backward(self, o: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the gradients, in the order of ``grads``."""
        return torch.autograd.grad(o, self.inputs, self.grad_o, retain_graph=self.keep)

    def both(self) -> tuple[torch.Tensor, ...]:
        """Return the gradients through a new graph."""
        (o,) = self.forward()
        return torch.autograd.grad(o, self.inputs, self.grad_o)
