"""Device time of a step by kernel and by category, and of naive attention's three parts."""

from dataclasses import asdict

import torch

from flashattn.measure.profile import phase, profile
from flashattn.testing.sweep import grid

STEPS = ["forward", "forward+backward", "train"]
KERNELS = 30
ROUNDS = 10


def steps(size, context, precision, impl, *, compiled=(False,)):
    """Return a grid of training steps."""
    axes = {"size": size, "context": context, "precision": precision, "compiled": compiled}
    return grid(batch=[4], **axes, impl=impl, step=STEPS)


def parts(heads, seq, head_dim, dtype):
    """Return a grid of attention problems."""
    return grid(batch=[4], heads=heads, seq=seq, head_dim=head_dim, dtype=dtype)


SWEEPS = {
    "smoke": {
        "bench_step": steps(["tiny"], [32], ["fp32"], ["naive"]),
        "bench_attention_parts": parts([4], [64], [32], ["float32"]),
    },
    "default": {
        "bench_step": [
            *steps(["small"], [1024], ["bf16"], ["naive"]),
            *steps(["2.7B"], [1024], ["bf16"], ["naive", "triton"]),
        ],
        "bench_attention_parts": parts([32], [1024], [80], ["float32", "bfloat16"]),
    },
    "full": {
        "bench_step": [
            *steps(["small", "2.7B"], [128, 1024], ["fp32", "bf16"], ["naive"]),
            *steps(["2.7B"], [1024], ["bf16"], ["naive"], compiled=[True]),
            *steps(["2.7B"], [1024], ["bf16"], ["triton"], compiled=[False, True]),
        ],
        "bench_attention_parts": parts([12, 32], [128, 1024, 4096], [64], ["float32", "bfloat16"]),
    },
}


def bench_step(device_benchmark, case, facts, device, trained):
    """Profile one step, and time it without the profiler."""
    call, setup = trained(case, phase=phase).timed(case.step)
    for _ in range(2):
        call()
    found = profile(call, device)
    facts |= {
        "kernels": [asdict(kernel) for kernel in found.kernels[:KERNELS]],
        "categories": found.categories,
        "phases": found.phases,
        "device_seconds": found.device_seconds,
    }
    device_benchmark.time(call, setup=setup, rounds=ROUNDS)


def bench_attention_parts(device_benchmark, case, facts, device):
    """Profile scores, softmax and values separately: seconds, FLOPs and bytes."""
    shape = (case.batch, case.heads, case.seq, case.head_dim)
    dtype = getattr(torch, case.dtype)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))

    def attention():
        with phase("scores"):
            scores = q @ k.mT
        with phase("softmax"):
            p = scores.softmax(-1)
        with phase("values"):
            return p @ v

    attention()
    found = profile(attention, device, calls=5)
    pairs, row = case.batch * case.heads * case.seq**2, q.numel() * q.element_size()
    matrix = pairs * q.element_size()
    # Softmax counts 5 FLOPs per score: maximum, difference, exponential, sum, quotient.
    costs = {
        "scores": (2 * pairs * case.head_dim, 2 * row + matrix),
        "softmax": (5 * pairs, 2 * matrix),
        "values": (2 * pairs * case.head_dim, 2 * row + matrix),
    }
    facts["parts"] = {
        name: {"seconds": found.phases[name], "flops": flops, "bytes": moved}
        for name, (flops, moved) in costs.items()
    }
    device_benchmark.time(attention)
