"""Clock, power and throttling of a GPU over time, sampled by a thread.

A time measured while the GPU throttles is not reproducible, so its row says so.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from threading import Event, Thread
from typing import NamedTuple

import torch
from typing_extensions import Self

from flashattn.measure.device import nvml, sm_clock

PERIOD = 0.1  # seconds between samples

# NVML clock event reasons that throttle. Others (idle, locked clocks, display) do not.
THROTTLES = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


@dataclass(frozen=True)
class Reading:
    """The state of the GPU over an interval.

    Args:
        sm_hertz: median SM clock; None if not sampled.
        watts: median power; None if not sampled.
        throttled: reasons for throttling at any moment of the interval.
    """

    sm_hertz: float | None = None
    watts: float | None = None
    throttled: list[str] = field(default_factory=list)


class Sample(NamedTuple):
    """NVML readings at one moment of ``time.perf_counter``."""

    time: float
    hertz: float | None
    watts: float | None
    reasons: int | None

    @classmethod
    def of(cls, device: torch.device) -> Sample:
        """Take one."""
        # The name before driver 535; later drivers accept it too.
        reasons = nvml(device, lambda ask, gpu: ask.nvmlDeviceGetCurrentClocksThrottleReasons(gpu))
        watts = nvml(device, lambda ask, gpu: ask.nvmlDeviceGetPowerUsage(gpu) / 1e3)
        return cls(time.perf_counter(), sm_clock(device), watts, reasons)


class Monitor:
    """Context manager that samples a GPU; on a CPU or without a driver it does nothing."""

    def __init__(self, device: torch.device) -> None:
        """Prepare the thread; entering the context starts it."""
        self._device, self._samples, self._stop = device, list[Sample](), Event()
        self._thread = Thread(target=self._sample, name="clock monitor", daemon=True)

    def __enter__(self) -> Self:
        """Start sampling if NVML answers any query."""
        if any(fact is not None for fact in Sample.of(self._device)[1:]):
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop sampling."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(PERIOD):
            self._samples.append(Sample.of(self._device))

    def between(self, start: float, end: float) -> Reading:
        """Summarize the samples from ``start`` to ``end``, two times of ``time.perf_counter``."""
        samples = [sample for sample in tuple(self._samples) if start <= sample.time <= end]
        return Reading(
            sm_hertz=_median(sample.hertz for sample in samples),
            watts=_median(sample.watts for sample in samples),
            throttled=[
                words
                for bit, words in THROTTLES.items()
                if any((sample.reasons or 0) & bit for sample in samples)
            ],
        )


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
