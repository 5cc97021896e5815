"""The transformer end to end: four kinds of steps for each size, context and precision.

The same step runs in fp32, TF32 and bf16, eager and compiled, with naive attention, PyTorch's and
ours.
"""

from __future__ import annotations

from functools import partial

from flashattn.measure.memory import above, peak_bytes
from flashattn.testing.sweep import grid

STEPS = ["forward", "backward", "forward+backward", "train"]
SIZES = ["small", "medium", "large", "xl", "2.7B"]
WARM, ROUNDS = 2, 10  # ``peak_bytes`` and the clock add four more warm-up calls

SWEEPS = {
    # A CPU without 16-bit products emulates them slowly, so one step is enough.
    "smoke": [
        *grid(
            size=["tiny"],
            context=[32],
            batch=[4],
            precision=["fp32"],
            compiled=[False],
            impl=["naive", "sdpa"],
            step=STEPS,
        ),
        *grid(
            size=["tiny"],
            context=[32],
            batch=[4],
            precision=["bf16"],
            compiled=[False],
            impl=["naive"],
            step=["train"],
        ),
    ],
    "default": [
        *grid(
            size=["small", "large"],
            context=[1024],
            batch=[4],
            precision=["fp32", "tf32", "bf16"],
            compiled=[False],
            impl=["naive", "triton"],
            step=["forward", "train"],
        ),
        *grid(
            size=["2.7B"],
            context=[1024],
            batch=[4],
            precision=["bf16"],
            compiled=[False, True],
            impl=["naive", "sdpa", "triton"],
            step=["train"],
        ),
    ],
    "full": [
        *grid(
            size=SIZES,
            context=[128, 256, 512, 1024],
            batch=[4],
            precision=["fp32", "tf32", "bf16"],
            compiled=[False],
            impl=["naive"],
            step=STEPS,
        ),
        *grid(
            size=SIZES,
            context=[1024],
            batch=[4],
            precision=["bf16"],
            compiled=[False],
            impl=["sdpa", "triton"],
            step=["forward", "train"],
        ),
        *grid(
            size=["small", "large", "2.7B"],
            context=[1024],
            batch=[4],
            precision=["bf16"],
            compiled=[True],
            impl=["naive", "sdpa", "triton"],
            step=["train"],
        ),
        # Out of memory on an H200, which also makes a row.
        *grid(
            size=["2.7B"],
            context=[4096],
            batch=[4],
            precision=["fp32"],
            compiled=[False],
            impl=["naive", "triton"],
            step=["train"],
        ),
    ],
}


def bench_step(device_benchmark, case, facts, device, trained):
    """Record the peak memory of a step and time it, with 6 warm-up steps and 10 measured ones."""
    model = trained(case)
    call, setup = model.timed(case.step)
    for _ in range(WARM):
        call(*setup())
    arguments = setup()
    peak = peak_bytes(partial(call, *arguments), device)[0]
    facts["peak_bytes"] = above(peak.peak, model.ground)
    del arguments
    device_benchmark.time(call, setup=setup, rounds=ROUNDS)
