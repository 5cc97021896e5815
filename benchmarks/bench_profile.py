"""Device time of a step by kernel and category, and of the three parts of naive attention."""

from __future__ import annotations

from dataclasses import asdict

import torch

from flashattn.measure.profile import phase, profile
from flashattn.testing.sweep import grid

STEPS = ["forward", "forward+backward", "train"]
KERNELS = 30
ROUNDS = 10


def steps(**axes):
    """Return a grid of training steps."""
    return grid(batch=[4], **axes, step=STEPS)


def parts(**axes):
    """Return a grid of attention problems."""
    return grid(batch=[4], **axes)


SWEEPS = {
    "smoke": {
        "bench_step": steps(
            size=["tiny"], context=[32], precision=["fp32"], compiled=[False], impl=["naive"]
        ),
        "bench_attention_parts": parts(heads=[4], seq=[64], head_dim=[32], dtype=["float32"]),
    },
    "default": {
        "bench_step": [
            *steps(
                size=["small"], context=[1024], precision=["bf16"], compiled=[False], impl=["naive"]
            ),
            *steps(
                size=["2.7B"],
                context=[1024],
                precision=["bf16"],
                compiled=[False],
                impl=["naive", "triton"],
            ),
        ],
        "bench_attention_parts": parts(
            heads=[32], seq=[1024], head_dim=[80], dtype=["float32", "bfloat16"]
        ),
    },
    "full": {
        "bench_step": [
            *steps(
                size=["small", "2.7B"],
                context=[128, 1024],
                precision=["fp32", "bf16"],
                compiled=[False],
                impl=["naive"],
            ),
            *steps(
                size=["2.7B"], context=[1024], precision=["bf16"], compiled=[True], impl=["naive"]
            ),
            *steps(
                size=["2.7B"],
                context=[1024],
                precision=["bf16"],
                compiled=[False, True],
                impl=["triton"],
            ),
        ],
        "bench_attention_parts": parts(
            heads=[12, 32], seq=[128, 1024, 4096], head_dim=[64], dtype=["float32", "bfloat16"]
        ),
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
