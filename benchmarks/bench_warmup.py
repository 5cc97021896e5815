"""The effect of warm-up: steps after 0, 1, 2 and 5 warm-up steps, each time in a new process."""

from flashattn.testing.sweep import grid
from flashattn.testing.train_case import cold_steps

MEASURED = 10


def steps(size, precision, *, context=512, warm=(0, 1, 2, 5)):
    """Return a grid of numbers of warm-up steps."""
    axes = {"size": size, "context": [context], "batch": [4], "precision": precision}
    return grid(**axes, warm_steps=warm)


SWEEPS = {
    "smoke": steps(["tiny"], ["fp32"], context=32, warm=[0, 2]),
    "default": [*steps(["small"], ["bf16"]), *steps(["large"], ["fp32"])],
    "full": steps(["small", "large"], ["fp32", "bf16"]),
}


def bench_first_steps(device_benchmark, case, facts, device):
    """Time each step after the warm-up."""
    seconds = cold_steps(**dict(case.facts), measured=MEASURED, device=device.type)
    facts |= {"first": seconds[0], "second": seconds[1], "in_order": seconds}
    device_benchmark.replay(seconds, tells="host time of waited-for steps")
