"""Measure the roofs of the machine: matrix products and a copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import NamedTuple

import torch

from flashattn.measure.timing import Clock, clock_of

WARM_CALLS, CALLS = 3, 10


class Sizes(NamedTuple):
    """Problem sizes large enough to reach the roofs."""

    side: int  # rows of the square matrices
    copied: int  # bytes read, and as many written
    kinds: tuple[str, ...]  # precisions of the products: dtypes, or "tf32" for fp32 on tensor cores


SIZES = {
    "cuda": Sizes(side=8192, copied=2**31, kinds=("bfloat16", "float16", "tf32", "float32")),
    "cpu": Sizes(side=1024, copied=2**28, kinds=("float32",)),
}


def measure_roofs(device: torch.device) -> dict[str, float]:
    """Measure the roofs on random normal data (zeros draw less power and run faster).

    Returns:
        FLOP/s of each kind of product; under "copy", bytes read plus bytes written per second.
    """
    sizes, clock = SIZES[device.type], clock_of(device)
    roofs = {}
    for kind in sizes.kinds:
        dtype = getattr(torch, "float32" if kind == "tf32" else kind)
        a, b = (torch.randn(sizes.side, sizes.side, device=device).to(dtype) for _ in range(2))
        with _tf32(allowed=kind == "tf32"):
            roofs[kind] = 2 * sizes.side**3 / _seconds(partial(torch.mm, a, b), clock)
    source = torch.randn(sizes.copied // 4, device=device)
    target = torch.empty_like(source)
    return roofs | {"copy": 2 * sizes.copied / _seconds(partial(target.copy_, source), clock)}


def _seconds(call: Callable[[], object], clock: Clock) -> float:
    clock.samples(call, WARM_CALLS)
    return median(clock.samples(call, CALLS)[0])


@contextmanager
def _tf32(*, allowed: bool) -> Iterator[None]:
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    settings.fp32_precision = "tf32" if allowed else "ieee"
    try:
        yield
    finally:
        settings.fp32_precision = before
