"""The effect of warm-up: steps measured after 0, 1, 2 and 5 others, in new processes."""

from __future__ import annotations

from flashattn.testing.sweep import grid
from flashattn.testing.train_case import cold_steps

MEASURED = 10
WARM = [0, 1, 2, 5]
SWEEPS = {
    "smoke": grid(size=["tiny"], context=[32], batch=[4], precision=["fp32"], warm_steps=[0, 2]),
    "default": [
        *grid(size=["small"], context=[512], batch=[4], precision=["bf16"], warm_steps=WARM),
        *grid(size=["large"], context=[512], batch=[4], precision=["fp32"], warm_steps=WARM),
    ],
    "full": grid(
        size=["small", "large"],
        context=[512],
        batch=[4],
        precision=["fp32", "bf16"],
        warm_steps=WARM,
    ),
}


def bench_first_steps(device_benchmark, case, facts, device):
    """Time the steps after the warm-up, including the first."""
    seconds = cold_steps(
        size=case.size,
        context=case.context,
        batch=case.batch,
        precision=case.precision,
        warm_steps=case.warm_steps,
        measured=MEASURED,
        device=device.type,
    )
    facts |= {"first": seconds[0], "second": seconds[1], "in_order": seconds}
    device_benchmark.replay(seconds, tells="host time of waited-for steps")
