"""The transformer end to end: four kinds of steps for each size, context and precision.

The same step runs in fp32, TF32 and bf16, eager and compiled, with naive attention, PyTorch's and
ours. At long contexts, where attention is most of a step, blocks are checkpointed; those steps are
eager, because compiling takes longer than measuring them.
"""

from __future__ import annotations

from functools import partial

from flashattn.measure.memory import above, peak_bytes
from flashattn.testing.sweep import grid

STEPS = ["forward", "backward", "forward+backward", "train"]
SIZES = ["small", "medium", "large", "xl", "2.7B"]
WARM, ROUNDS = 2, 10  # ``peak_bytes`` and the clock add four more warm-up calls
LONG = 16384  # from this context on a step takes seconds
LONG_ROUNDS = 2

STEP = {
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
            size=["large"],
            context=[1024],
            batch=[4],
            precision=["fp32", "tf32", "bf16"],
            compiled=[False],
            impl=["naive"],
            step=["backward"],
        ),
        *grid(
            size=["2.7B"],
            context=[1024],
            batch=[4],
            precision=["bf16"],
            compiled=[False, True],
            impl=["naive", "sdpa", "hopper"],
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


def long(size: list[str], context: list[int], impl: list[str], *, packed: bool = False, **axes):
    """Return checkpointed train steps of one sequence."""
    case = {"size": size, "context": context, "batch": [1], "precision": ["bf16"]}
    case |= {"checkpoint": [True], "packed": [packed], "compiled": [False], "impl": impl}
    return grid(**case | axes, step=["train"])


PEERS = ["sdpa", "flex"]
CONTEXTS = [8192, 32768, 65536]
LONG_STEP = {
    "smoke": [
        *long(["tiny"], [256], ["sdpa"], precision=["fp32"]),
        *long(["tiny"], [256], ["tiled"], precision=["fp32"], packed=True),
    ],
    "default": [
        *long(["large"], [8192, 65536], [*PEERS, "hopper"]),
        *long(["large"], [65536], ["flex", "hopper"], packed=True),
        *long(["2.7B"], CONTEXTS, [*PEERS, "hopper"]),
    ],
    "full": [
        *long(["large", "2.7B"], CONTEXTS, [*PEERS, "triton", "hopper"]),
        *long(["large", "2.7B"], CONTEXTS, ["flex", "triton", "hopper"], packed=True),
    ],
}
SWEEPS = {
    name: {"bench_step": STEP[name], "bench_long_step": LONG_STEP[name]}
    for name in ("smoke", "default", "full")
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


def bench_long_step(device_benchmark, case, facts, device, trained):
    """Time a step of up to ten seconds, and record its peak memory, after one warm-up step."""
    model = trained(case)
    call, setup = model.timed(case.step)
    call(*setup())
    rounds = LONG_ROUNDS if case.context >= LONG else ROUNDS // 2
    timed = partial(device_benchmark.time, call, setup=setup, rounds=rounds, warm=True)
    facts["peak_bytes"] = above(peak_bytes(timed, device)[0].peak, model.ground)
