"""Effects of low precision: stagnating sums, dtypes under autocast, and LayerNorm in 16 bits.

All cases take milliseconds, so every sweep has all of them.
"""

from functools import partial

import torch

from flashattn.measure.precision import QUANTITIES, autocast_dtypes, layernorm, partial_sums
from flashattn.testing.sweep import grid


def sums(count, value, accumulators, addends=None, casts=("none",)):
    """Return sums of equal addends, which have the dtype of their accumulator by default."""
    return [
        point
        for dtype in accumulators
        for point in grid(
            count=[count], value=[value], accumulator=[dtype], addend=addends or [dtype], cast=casts
        )
    ]


ALL, HALF = ["float32", "float16", "bfloat16"], ["float16", "bfloat16"]
SUMS = [
    *sums(1000, 0.01, ALL),
    *sums(1000, 0.01, ["float32"], HALF, ["implicit", "explicit"]),
    *sums(10_000, 0.001, ALL),
]
STATISTICS = grid(dtype=HALF, scale=[1e-4, 1.0, 300.0], quantity=[*QUANTITIES])
CASES = {
    "bench_accumulation": SUMS,
    "bench_autocast": grid(dtype=HALF),
    "bench_layernorm": STATISTICS,
}
SWEEPS = dict.fromkeys(("smoke", "default", "full"), CASES)


def bench_accumulation(device_benchmark, case, facts):
    """Add the same number many times on the CPU; IEEE 754 determines the result."""
    dtypes = {name: getattr(torch, getattr(case, name)) for name in ("accumulator", "addend")}
    call = partial(partial_sums, case.value, case.count, **dtypes, cast=case.cast)
    curve = call()
    facts |= {"part": "accumulation", "curve": curve, "result": curve[-1][1]}
    device_benchmark.time(call, rounds=1)


def bench_autocast(device_benchmark, case, facts, device):
    """List the dtypes of tensors in a toy model under autocast."""
    call = partial(autocast_dtypes, getattr(torch, case.dtype), device)
    facts |= {"part": "autocast", "tensors": call()}
    device_benchmark.time(call, rounds=5)


def bench_layernorm(device_benchmark, case, facts, device):
    """Normalize a row with every operation in 16 bits; compare one quantity with fp64."""
    call = partial(layernorm, getattr(torch, case.dtype), case.scale, device=device)
    exact, got = (found[case.quantity] for found in call())
    facts |= {"part": "layernorm", "exact": exact, "got": got, "error": abs(got / exact - 1)}
    device_benchmark.time(call, rounds=5)
