"""Forward: o from q, k and v."""

from __future__ import annotations

from functools import partial

from flashattn.testing.inputs import make_inputs


def bench_forward(device_benchmark, impl, problem, device, judge):
    """Time o (and lse, of those who return it) without gradients."""
    judge.admit("forward")
    q, k, v = make_inputs(problem, device=device)
    forward = partial(impl, q, k, v, causal=problem.causal, scale=problem.head_dim**-0.5)
    o, lse = forward()
    judge.check(o=o, lse=lse)
    device_benchmark.time(forward)
