"""The cost of the score matrix: time and memory of single-head attention over the length N.

Naive attention saves N x N numbers for backward, so its memory grows as N ** 2. The memory of the
tiled algorithm grows as N.
"""

from functools import partial

from flashattn.measure.memory import allocated_bytes, held_bytes, peak_bytes
from flashattn.problem import DTYPES, Problem
from flashattn.registry import get
from flashattn.testing.graph import Graph
from flashattn.testing.sweep import grid

PASSES = ["forward", "backward"]


def problems(head_dim, seq, dtype, impl):
    """Return a grid of causal single-head problems."""
    axes = {"head_dim": head_dim, "seq": seq, "dtype": dtype, "impl": impl, "pass": PASSES}
    return grid(batch=[8], causal=["top_left"], **axes)


LENGTHS = [256, 1024, 4096, 8192, 16384, 32768]
SWEEPS = {
    "smoke": [
        *problems([16, 64], [128, 256, 512], ["float32"], ["naive", "sdpa"]),
        *problems([16], [32, 64], ["float32"], ["tiled", "triton"]),
    ],
    "default": problems([64], LENGTHS[:-1], ["bfloat16"], ["naive", "triton"]),
    "full": [
        *problems([16, 32, 64, 128], LENGTHS, ["float32"], ["naive", "triton"]),
        *problems([64], LENGTHS[:3], ["float32"], ["tiled"]),
        *problems([64], LENGTHS, ["bfloat16"], ["naive", "sdpa", "triton"]),
    ],
}
SCORES = {"naive", "reference", "sdpa_math"}  # these save [B, N, N]


def must_hold(impl, problem):
    """Return the bytes that the algorithm saves for backward, except q, k and v."""
    wide, rows = DTYPES[problem.dtype], problem.batch * problem.seq_q
    if impl.name in SCORES:
        return (wide * rows + problem.seq_q) * problem.seq_kv  # the softmax and the mask
    return rows * (wide * problem.head_dim + 4)  # o and the logsumexp


def bench_pass(device_benchmark, case, facts, device, left_out, interpreted):
    """Record the bytes saved for backward and the peak; time one pass."""
    impl, shape = get(case.impl), {"batch": case.batch, "seq_q": case.seq}
    problem = Problem(**shape, head_dim=case.head_dim, causal=case.causal, dtype=case.dtype)
    facts |= {
        "flops": problem.flops(facts["pass"]),
        "predicted_bytes": must_hold(impl, problem),
        "held_bytes": None,
        "peak_bytes": None,
    }
    left_out(impl.why_not(problem, device, grad=True))
    ground = allocated_bytes(device)
    graph = Graph(impl, problem, device)
    facts["held_bytes"], o = held_bytes(graph.forward, without=graph.inputs)
    left_out(interpreted(impl))  # the bytes are real, but a time would say nothing about speed
    forward = facts["pass"] == "forward"
    call = graph.forward if forward else partial(graph.backward, *o)
    facts["peak_bytes"] = peak_bytes(call, device, ground)[1]
    if forward or graph.keep:
        device_benchmark.time(call)
    else:
        device_benchmark.time(graph.backward, setup=graph.forward)
