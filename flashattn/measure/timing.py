"""Seconds that a call takes: on the device, behind a cold cache; on a CPU, by the host's clock.

A GPU runs behind the host, so a clock around a call times its launch. ``DeviceClock`` queues an
event before and after the call and reads both once the device is done. Ahead of the first event it
queues writes to twice the L2 cache: the call finds its inputs in memory and not in the cache, and
while the device writes, the host queues all of the call, so that gaps between launches drop out.
Where others keep the host from that, the device is seen to have begun before all was queued: such
a sample is late, and is made again behind more writes.
"""

from __future__ import annotations

import math
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, cast

import torch
from pytest_benchmark.fixture import BenchmarkFixture

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

BUDGET = 0.25  # seconds of measuring for one case
FEWEST_ROUNDS, MOST_ROUNDS = 5, 100
WARM_UP = 0.05  # seconds, beyond the first call, which may compile
LONGEST_LEAD = 4e-3  # seconds of writes ahead of a call, however long the host takes to queue it
RETAKES = 5  # of a sample that is late
INTERPRETER = str(Path("triton", "runtime", "interpreter.py"))


class Event(Protocol):
    """A moment on the device's timeline."""

    def record(self) -> None:
        """Queue it."""

    def query(self) -> bool:
        """Return whether the device has reached it."""

    def elapsed_time(self, end: Any, /) -> float:
        """Return the milliseconds from this moment to ``end``."""


class Clock(Protocol):
    """Seconds of calls.

    Attributes:
        tells: which seconds.
        late: of the calls last sampled, how many began before the host had queued all of them, so
            that they may hold its delays.
    """

    tells: ClassVar[str]
    late: int

    def synchronize(self) -> None:
        """Wait until the device is idle."""

    def cover(self, launch: float) -> float:
        """Prepare for calls that take ``launch`` seconds to queue; return the lead in seconds."""

    def samples(self, call: Callable[[], Any], calls: int) -> tuple[list[float], Any]:
        """Return the seconds of each of ``calls`` calls, and what the last one returned."""


class HostClock:
    """The host's own clock, for devices that finish before they return."""

    tells: ClassVar[str] = "host time, warm cache"
    late = 0
    now = staticmethod(time.perf_counter)

    def synchronize(self) -> None:
        """Do nothing: the device is idle."""

    def cover(self, launch: float) -> float:  # noqa: ARG002 - nothing is queued
        """Do nothing; the lead is 0."""
        return 0.0

    def samples(self, call: Callable[[], Any], calls: int) -> tuple[list[float], Any]:
        """See ``Clock``."""
        seconds, result = [], None
        for _ in range(calls):
            start = self.now()
            result = call()
            seconds.append(self.now() - start)
        return seconds, result


class ProcessorClock(HostClock):
    """Time that the process has run on any core: what others take from it does not count.

    Neither does waiting, so it compares work with work and is no duration.
    """

    tells: ClassVar[str] = "processor time, warm cache"
    now = staticmethod(time.process_time)


class DeviceClock:
    """Event pairs on a device that runs behind the host.

    Args:
        event: makes an event that can be timed.
        flush: queues a write to more than the device's cache.
        synchronize: waits until the device is idle.
    """

    tells: ClassVar[str] = "device time, cold L2"

    def __init__(
        self, event: Callable[[], Event], flush: Callable[[], Any], synchronize: Callable[[], Any]
    ) -> None:
        """Hold on to the three; nothing is queued yet."""
        self._event, self._flush, self._synchronize = event, flush, synchronize
        self._flushes = self._most = 1
        self.late = 0

    @classmethod
    def of(cls, device: torch.device) -> DeviceClock:
        """Return the clock of a CUDA device, which holds twice its L2 cache in memory."""
        size = 2 * torch.cuda.get_device_properties(device).L2_cache_size
        buffer = torch.empty(size, dtype=torch.uint8, device=device)
        event = partial(torch.cuda.Event, enable_timing=True)
        return cls(event, buffer.zero_, partial(torch.cuda.synchronize, device))

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        self._synchronize()

    def cover(self, launch: float) -> float:
        """Queue as many flushes ahead of each call as last twice ``launch``; see ``Clock``."""
        self._flushes = self._most = 1
        flush = min(self.samples(self._flush, 3)[0])
        self._most = max(1, math.ceil(LONGEST_LEAD / flush))
        self._flushes = min(max(1, math.ceil(2 * launch / flush)), self._most)
        return self._flushes * flush

    def samples(self, call: Callable[[], Any], calls: int) -> tuple[list[float], Any]:
        """Queue all calls, each behind its own flushes, and wait once; see ``Clock``.

        After a late one there are twice as many flushes ahead of a call, up to ``LONGEST_LEAD``.
        """
        pairs, result, self.late = [], None, 0
        for _ in range(calls):
            start, end = self._event(), self._event()
            for _ in range(self._flushes):
                self._flush()
            start.record()
            result = call()
            end.record()
            if start.query():
                self.late += 1
                self._flushes = min(2 * self._flushes, self._most)
            pairs.append((start, end))
        self._synchronize()
        return [start.elapsed_time(end) * 1e-3 for start, end in pairs], result


class Replayed:
    """Seconds that are known already.

    Args:
        seconds: of the calls to come.
    """

    tells: ClassVar[str] = "seconds measured before"
    late = 0

    def __init__(self, seconds: list[float]) -> None:
        """Begin at the first."""
        self._seconds = iter(seconds)

    def synchronize(self) -> None:
        """Do nothing: nothing runs."""

    def cover(self, launch: float) -> float:  # noqa: ARG002 - nothing is queued
        """Do nothing; the lead is 0."""
        return 0.0

    def samples(self, call: Callable[[], Any], calls: int) -> tuple[list[float], Any]:
        """Make the calls and return the next seconds; see ``Clock``."""
        results = [call() for _ in range(calls)]
        return [next(self._seconds) for _ in range(calls)], results[-1]


def clock_of(device: torch.device) -> Clock:
    """Return the clock that tells what ``device`` does."""
    return DeviceClock.of(device) if device.type == "cuda" else HostClock()


class Pace(NamedTuple):
    """Seconds of one warm call: until it is done, and until the host has queued it."""

    wall: float
    launch: float


def warm_up(
    call: Callable[..., Any], *, clock: Clock, setup: Callable[[], tuple[Any, ...]] = tuple
) -> Pace:
    """Call until compiled and warm.

    Args:
        call: what will be timed.
        clock: of the device it runs on.
        setup: makes the arguments of each call.

    Returns:
        The fastest call's pace.
    """
    call(*setup())
    walls: list[float] = []
    launches: list[float] = []
    begin = time.perf_counter()
    while len(walls) < 2 or time.perf_counter() - begin < WARM_UP:  # noqa: PLR2004 - one may be a fluke
        arguments = setup()
        clock.synchronize()
        start = time.perf_counter()
        call(*arguments)
        launches.append(time.perf_counter() - start)
        clock.synchronize()
        walls.append(time.perf_counter() - start)
    return Pace(min(walls), min(launches))


class DeviceBenchmark(BenchmarkFixture):
    """pytest-benchmark's fixture with the device's clock in place of the host's.

    ``time`` is the whole protocol. Calibration, ``pedantic`` and --benchmark-disable work as ever.
    """

    clock: Clock
    _anew: Callable[[], tuple[Any, ...]] | None = None  # arguments of a sample made again
    _retaken = _late = 0

    @classmethod
    def adopt(cls, benchmark: BenchmarkFixture, clock: Clock) -> DeviceBenchmark:
        """Turn the stock fixture into this one: the plugin accepts no object but its own."""
        adopted = cast("DeviceBenchmark", benchmark)
        adopted.__class__ = cls
        adopted.clock = clock
        return adopted

    def time(
        self,
        call: Callable[..., Any],
        *,
        setup: Callable[[], tuple[Any, ...]] = tuple,
        budget: float = BUDGET,
        rounds: int | None = None,
    ) -> Any:
        """Warm up, time as many calls as fit in the budget, and keep every sample.

        One that is late is made again, up to ``RETAKES`` times; "retaken" is how often that was,
        and "late" how many are kept that were late every time.

        Args:
            call: what is timed; checked by the caller beforehand.
            setup: makes the arguments of each call, outside the clock.
            budget: seconds for all rounds together; ``FEWEST_ROUNDS`` are made whatever they cost.
            rounds: how many calls to time, whatever they cost.

        Returns:
            What the last call returned.
        """
        if self.enabled:
            pace = warm_up(call, clock=self.clock, setup=setup)
            lead = self.clock.cover(pace.launch)
            cost = pace.wall + lead
            rounds = rounds or min(max(int(budget / cost), FEWEST_ROUNDS), MOST_ROUNDS)
            # What no lead can cover is late every time.
            self._anew = setup if pace.launch < lead else None
        result = self.pedantic(call, setup=lambda: (setup(), {}), rounds=rounds or 1)
        self._note(self.clock.tells)
        if self.enabled:
            self.extra_info |= {"late": self._late, "retaken": self._retaken}
        return result

    def replay(self, samples: list[float], *, tells: str | None = None) -> None:
        """Take seconds that were measured before, or otherwise, as the rounds of this case.

        Args:
            samples: seconds of each call.
            tells: which seconds they are; None leaves what the facts say already.
        """
        clock, self.clock = self.clock, Replayed(samples)
        try:
            self.pedantic(lambda: None, rounds=len(samples))
        finally:
            self.clock = clock
        self._note(tells or self.extra_info["clock"])

    def _note(self, tells: str) -> None:
        """Write down what every row has of its samples."""
        if self.enabled:
            self.extra_info |= {"status": "ok", "reason": None, "clock": tells}
            self.extra_info |= {
                "seconds": self.stats["median"],
                "mean": self.stats["mean"],
                "std": self.stats["stddev"],
                "rounds": self.stats["rounds"],
            }

    def _make_runner(
        self,
        function_to_benchmark: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Callable[..., Any]:
        call = partial(function_to_benchmark, *args, **kwargs)

        def runner(loops_range: range | None, timer: object = None) -> Any:  # noqa: ARG001
            calls, tries = len(loops_range) if loops_range else 1, RETAKES
            seconds, result = self.clock.samples(call, calls)
            while self._anew and self.clock.late and tries:
                tries -= 1
                self._retaken += 1
                again = partial(function_to_benchmark, *self._anew(), **kwargs)
                seconds, result = self.clock.samples(again, calls)
            self._late += self.clock.late
            return sum(seconds) if loops_range else (sum(seconds), result)

        return runner


class _InterpretedError(BaseException):
    """A kernel is about to be interpreted; nothing should catch this but ``interprets``."""


def interprets(call: Callable[[], Any]) -> bool:
    """Whether ``call`` runs a kernel in Triton's interpreter, whose time says nothing about it.

    The call is cut short at its first kernel. Triton is not imported to find out.
    """

    def watch(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        launched = event == "call" and code.co_name == "__call__"
        if launched and code.co_filename.endswith(INTERPRETER):
            raise _InterpretedError

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        call()
    except _InterpretedError:
        return True
    finally:
        sys.setprofile(before)
    return False
