"""Sample the clock and throttling of a GPU in a thread.

Times measured while the GPU throttles are not reproducible, so their rows record it.
"""

from __future__ import annotations

import time
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
    """The state of the GPU over an interval."""

    sm_hertz: float | None = None  # median SM clock; None if not sampled
    throttled: list[str] = field(default_factory=list)  # reasons at any time in the interval


class Sample(NamedTuple):
    """NVML readings at one moment of ``time.perf_counter``."""

    time: float
    hertz: float | None
    reasons: int | None

    @classmethod
    def of(cls, device: torch.device) -> Sample:
        """Take a sample."""
        # The name before driver 535; later drivers accept it too.
        reasons = nvml(device, lambda ask, gpu: ask.nvmlDeviceGetCurrentClocksThrottleReasons(gpu))
        return cls(time.perf_counter(), sm_clock(device), reasons)


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
        clocks = [sample.hertz for sample in samples if sample.hertz is not None]
        return Reading(
            sm_hertz=median(clocks) if clocks else None,
            throttled=[
                words
                for bit, words in THROTTLES.items()
                if any((sample.reasons or 0) & bit for sample in samples)
            ],
        )
