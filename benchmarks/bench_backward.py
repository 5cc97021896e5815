"""Backward: dq, dk and dv from the gradient of o, on a graph that is built outside the clock."""

from __future__ import annotations

from functools import partial

import torch

from flashattn.testing.inputs import make_grads, make_inputs


def bench_backward(device_benchmark, impl, problem, device, judge):
    """Time the backward pass on its own; never a difference of two times."""
    judge.admit("backward")
    inputs = [x.requires_grad_() for x in make_inputs(problem, device=device)]
    grad_o, _ = make_grads(problem, device=device)
    # Compiled code reuses the graph's buffers, so it needs a new graph for every call.
    keep = not impl.compiles

    def graph():
        o, _ = impl(*inputs, causal=problem.causal, scale=problem.head_dim**-0.5)
        return (o,)

    def backward(o):
        return torch.autograd.grad(o, inputs, grad_o, retain_graph=keep)

    (o,) = graph()
    dq, dk, dv = backward(o)
    judge.check(dq=dq, dk=dk, dv=dv)
    if keep:
        device_benchmark.time(partial(backward, o))
    else:
        device_benchmark.time(backward, setup=graph)
