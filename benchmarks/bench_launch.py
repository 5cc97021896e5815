"""Launch overhead: host time of a call, eager, compiled and in a CUDA graph.

The problem is so small that the device finishes long before the host, so the time is spent in
Python, checks and launches.
"""

from functools import cache, partial

import torch
import triton

from flashattn import attention
from flashattn.kernels.launch import KernelLaunch
from flashattn.measure.timing import HostTime
from flashattn.problem import Problem
from flashattn.registry import get
from flashattn.report.studies.launch import FLOORS
from flashattn.testing.inputs import make_grads, make_inputs
from flashattn.testing.sweep import grid

ROUNDS = 20
PASSES = ["forward", "forward+backward"]
# Lower bounds: an autograd function in Python (``Nothing``), and one that also launches a Triton
# kernel in each pass. The forward pass alone needs no autograd function.
FLOOR, LAUNCHING = FLOORS


def calls(dtypes, modes):
    """Return the calls in every mode, and the floors of forward and backward together."""
    impls = ["sdpa", "naive", "triton"]
    return [
        *grid(dtype=dtypes, mode=modes, impl=impls, **{"pass": PASSES}),
        *grid(dtype=dtypes, mode=["eager"], impl=list(FLOORS), **{"pass": PASSES[1:]}),
    ]


MODES = ["eager", "compiled", "graph"]
SWEEPS = {
    "smoke": calls(["float32"], ["eager"]),
    "default": calls(["bfloat16"], MODES),
    "full": calls(["bfloat16", "float32"], MODES),
}


def bench_call(device_benchmark, case, facts, device, left_out, interpreted):
    """Time a call on the host."""
    problem = Problem(batch=1, heads=2, seq_q=64, head_dim=64, causal=True, dtype=case.dtype)
    facts["problem"] = str(problem)
    if case.impl == LAUNCHING and device.type != "cuda":
        left_out("a kernel needs CUDA")
    if case.impl not in FLOORS:
        impl = get(case.impl)
        left_out(impl.why_not(problem, device, grad=True) or interpreted(impl))
    if case.mode == "graph" and device.type != "cuda":
        left_out("a CUDA graph needs CUDA")
    inputs = make_inputs(problem, device=device)
    grad_o, _ = make_grads(problem, device=device)
    run = partial(_entry(case.impl), causal=True)
    if case.mode == "compiled":
        torch.compiler.reset()
        run = torch.compile(run, dynamic=False)
    if facts["pass"] == "forward":
        run = partial(run, *inputs)
    else:
        run = partial(_both, run, [x.requires_grad_() for x in inputs], grad_o)
    call = _as_graph(run) if case.mode == "graph" else run
    device_benchmark.clock = HostTime(device_benchmark.clock.synchronize)
    device_benchmark.time(call, rounds=ROUNDS)


def _entry(name):
    """Return the function that a user would call."""
    if name == "sdpa":
        return lambda q, k, v, causal: torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal
        )
    if name in FLOORS:
        function = Nothing if name == FLOOR else Launching
        return lambda q, k, v, causal: function.apply(q, k, v)[0]  # noqa: ARG005 - it does nothing
    return partial(attention, impl=name)


class Nothing(torch.autograd.Function):
    """Allocates the outputs of our kernels, forward and backward, without launching any."""

    @staticmethod
    def forward(ctx, q, k, v):
        """Return o and the logsumexp."""
        o, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx, grad_o, grad_lse):  # noqa: ARG004 - autograd's
        """Return the gradients of q, k and v; also allocate two numbers per row."""
        q, k, v, _, lse = ctx.saved_tensors
        _ = torch.empty_like(lse), torch.empty_like(lse)
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


@triton.jit
def flashattn_nothing(x):
    """Do nothing."""


@cache
def _nothing():
    """Return the launch of an empty kernel."""
    return KernelLaunch(flashattn_nothing, 1, (), {"num_warps": 4})


class Launching(Nothing):
    """Also launches an empty Triton kernel in each pass."""

    @staticmethod
    def forward(ctx, q, k, v):
        """Return o and the logsumexp."""
        o, lse = Nothing.forward(ctx, q, k, v)
        _nothing()(o)
        return o, lse

    @staticmethod
    def backward(ctx, grad_o, grad_lse):
        """Return the gradients of q, k and v."""
        grads = Nothing.backward(ctx, grad_o, grad_lse)
        _nothing()(grads[0])
        return grads


def _both(run, inputs, grad_o):
    return torch.autograd.grad(run(*inputs), inputs, grad_o)


def _as_graph(run):
    """Capture a call in a CUDA graph, after the warm-up on a side stream that capture requires."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay
