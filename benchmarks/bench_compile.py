"""The effect of torch.compile on naive attention and on whole models.

Each case runs eager, then compiled, so that the machine is in the same state for both.
"""

from dataclasses import asdict
from functools import partial
from statistics import median

import torch

from flashattn.impls.naive import naive_attention
from flashattn.mask import CAUSAL
from flashattn.measure.compiling import compilation
from flashattn.measure.timing import retaken, warm_up
from flashattn.problem import Problem
from flashattn.testing.inputs import make_grads, make_inputs
from flashattn.testing.sweep import grid

ROUNDS = 10
PASSES = ["forward", "backward", "forward+backward"]
STEPS = ["forward", "forward+backward", "train"]


def attentions(head_dim, seq):
    """Return a grid of single-head problems in fp32."""
    axes = {"head_dim": head_dim, "seq": seq, "dtype": ["float32"], "impl": ["naive"]}
    return grid(subject=["attention"], batch=[8], **axes, **{"pass": PASSES})


def models(size, context, precision, impl, step=STEPS):
    """Return a grid of models."""
    axes = {"size": size, "context": context, "precision": precision, "impl": impl, "step": step}
    return grid(subject=["model"], batch=[4], **axes)


SWEEPS = {
    "smoke": {
        "bench_attention": attentions([64], [256]),
        "bench_model": models(["tiny"], [32], ["fp32"], ["naive"], ["forward"]),
    },
    "default": {
        "bench_attention": attentions([64], [1024, 4096]),
        "bench_model": models(["small"], [1024], ["bf16"], ["naive", "triton"]),
    },
    "full": {
        "bench_attention": attentions([16, 64, 128], [256, 1024, 4096, 16384]),
        "bench_model": models(["small", "medium"], [1024], ["fp32", "bf16"], ["naive", "triton"]),
    },
}


def bench_attention(device_benchmark, case, facts, device):
    """Time naive attention eager, then compiled; record the cost of compilation."""
    problem = Problem(
        batch=case.batch, seq_q=case.seq, head_dim=case.head_dim, causal=True, dtype=case.dtype
    )
    facts["flops"] = problem.flops(facts["pass"])
    inputs = [x.requires_grad_() for x in make_inputs(problem, device=device)]
    grad_o, _ = make_grads(problem, device=device)
    call = partial(naive_attention, mask=CAUSAL, scale=case.head_dim**-0.5)

    def timed(attention):
        # Compiled code reuses the graph's buffers, so each backward needs a new graph.
        def graph():
            return (attention(*inputs),)

        def backward(o):
            return torch.autograd.grad(o, inputs, grad_o)

        return {
            "forward": (graph, tuple),
            "backward": (backward, graph),
            "forward+backward": (lambda: backward(*graph()), tuple),
        }[facts["pass"]]

    compiled = torch.compile(call, dynamic=False, fullgraph=True)
    facts["eager_seconds"] = _eager(device_benchmark, *timed(call))
    _compiled(device_benchmark, *timed(compiled))


def bench_model(device_benchmark, case, facts, trained):
    """Time a step of a model eager, then compiled; record the cost of compilation."""
    facts["eager_seconds"] = _eager(device_benchmark, *trained(case).timed(case.step))
    _compiled(device_benchmark, *trained(case, compiled=True).timed(case.step))


def _eager(device_benchmark, call, setup):
    """Return the median time of a call in seconds, by the benchmark's clock."""
    clock = device_benchmark.clock
    pace = warm_up(call, clock=clock, setup=setup)
    again = setup if pace.launch < clock.cover(pace.launch) else None
    return median(retaken(clock, call, setup(), again=again)[0][0] for _ in range(ROUNDS))


def _compiled(device_benchmark, call, setup):
    """Record the cost of compiling in the first call, then time later calls."""
    device_benchmark.extra_info |= asdict(compilation(lambda: call(*setup())))
    device_benchmark.time(call, setup=setup, rounds=ROUNDS)
