"""The passes of an implementation as calls to time."""

from __future__ import annotations

from functools import partial

import torch

from flashattn.problem import Problem
from flashattn.registry import Impl
from flashattn.testing.inputs import make_grads, make_inputs


class Graph:
    """The autograd graph of an implementation, built untimed.

    Args:
        impl: the implementation.
        problem: the problem.
        device: where to run.
    """

    def __init__(self, impl: Impl, problem: Problem, device: torch.device) -> None:
        """Create the inputs and the gradient of o."""
        self.inputs = [x.requires_grad_() for x in make_inputs(problem, device=device)]
        self.grad_o, _ = make_grads(problem, device=device)
        # Compiled code reuses the buffers of the graph, so each call needs a new graph.
        self.keep = not impl.compiles
        self._call = partial(impl, *self.inputs, **problem.keywords, scale=problem.head_dim**-0.5)

    def forward(self) -> tuple[torch.Tensor]:
        """Return o as a tuple of arguments for ``backward``."""
        return (self._call()[0],)

    def backward(self, o: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return dq, dk and dv."""
        return torch.autograd.grad(o, self.inputs, self.grad_o, retain_graph=self.keep)

    def both(self) -> tuple[torch.Tensor, ...]:
        """Return dq, dk and dv through a new graph."""
        (o,) = self.forward()
        return torch.autograd.grad(o, self.inputs, self.grad_o)
