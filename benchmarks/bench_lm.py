"""The transformer end to end: four kinds of steps for each size, context and precision.

The same step runs in fp32, TF32 and bf16, eager and compiled, with naive attention, PyTorch's
attention and ours. At long contexts, where attention is most of a step, blocks are checkpointed.
Those steps run only eager, because compiling them takes longer than measuring them.
"""

from functools import partial
from typing import Any

from flashattn.measure.memory import peak_bytes
from flashattn.testing.sweep import Point, grid

STEPS = ["forward", "backward", "forward+backward", "train"]
SIZES = ["small", "medium", "large", "xl", "2.7B"]
SOME = ["small", "large", "2.7B"]
ALL, HALF = ["fp32", "tf32", "bf16"], ["bf16"]
BOTH = [False, True]  # eager and compiled
WARM, ROUNDS = 2, 10  # ``peak_bytes`` and the clock add four more warm-up calls
LONG = 16384  # shortest context at which a step takes seconds
LONG_ROUNDS = 2


def steps(size, context, precision, impl, step=STEPS, *, compiled=(False,)):
    """Return a grid of steps that keep their activations."""
    axes = {"size": size, "context": context, "batch": [4], "precision": precision}
    return grid(**axes, compiled=compiled, impl=impl, step=step)


STEP = {
    # A CPU without 16-bit products emulates them slowly, so one step is enough.
    "smoke": [
        *steps(["tiny"], [32], ["fp32"], ["naive", "sdpa"]),
        *steps(["tiny"], [32], ["bf16"], ["naive"], ["train"]),
    ],
    "default": [
        *steps(["small", "large"], [1024], ALL, ["naive", "triton"], ["forward", "train"]),
        *steps(["large"], [1024], ALL, ["naive"], ["backward"]),
        *steps(["2.7B"], [1024], HALF, ["naive", "sdpa", "hopper"], ["train"], compiled=BOTH),
    ],
    "full": [
        *steps(SIZES, [128, 256, 512, 1024], ALL, ["naive"]),
        *steps(SIZES, [1024], HALF, ["sdpa", "triton"], ["forward", "train"]),
        *steps(SOME, [1024], HALF, ["naive", "sdpa", "triton"], ["train"], compiled=[True]),
        # These run out of memory on an H200, which is also a row.
        *steps(["2.7B"], [4096], ["fp32"], ["naive", "triton"], ["train"]),
    ],
}


def long(
    size: list[str], context: list[int], impl: list[str], *, packed: bool = False, **axes: list[str]
) -> list[Point]:
    """Return checkpointed train steps of one sequence."""
    case: dict[str, Any] = {"size": size, "context": context, "batch": [1], "precision": ["bf16"]}
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
    """Record the peak memory of a step and time it, with 6 warm-up and 10 measured steps."""
    model = trained(case)
    call, setup = model.timed(case.step)
    for _ in range(WARM):
        call(*setup())
    _, facts["peak_bytes"] = peak_bytes(partial(call, *setup()), device, model.ground)
    device_benchmark.time(call, setup=setup, rounds=ROUNDS)


def bench_long_step(device_benchmark, case, facts, device, trained):
    """Time a step of up to ten seconds and record its peak memory, after one warm-up step."""
    model = trained(case)
    call, setup = model.timed(case.step)
    call(*setup())
    rounds = LONG_ROUNDS if case.context >= LONG else ROUNDS // 2
    timed = partial(device_benchmark.time, call, setup=setup, rounds=rounds, warm=True)
    _, facts["peak_bytes"] = peak_bytes(timed, device, model.ground)
