"""Time a call: device time with a cold L2 cache on a GPU, host time on a CPU.

A GPU runs asynchronously, so a host clock around a call times only its launch. ``DeviceClock``
queues an event before and after the call. Before the first event it queues writes to twice the L2
cache. The writes evict the inputs from the cache, and give the host time to queue the whole call,
so that gaps between launches do not count. A sample is late if the device reached the first event
before the host had queued the call. Late samples are repeated after more writes.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, NamedTuple, cast

import torch
from pytest_benchmark.fixture import BenchmarkFixture

BUDGET = 0.25  # seconds to measure one case
FEWEST_ROUNDS, MOST_ROUNDS = 5, 100
WARM_UP = 0.05  # seconds after the first call, which may compile
LONGEST_LEAD = 4e-3  # most seconds of writes before a call
RETAKES = 5  # most repeats of a late sample
INTERPRETER = str(Path("triton", "runtime", "interpreter.py"))


class Clock:
    """Times calls on a device whose queue is empty."""

    tells: ClassVar[str]  # the kind of time, in words
    takes_turns: ClassVar[bool] = False  # whether calls of several cases may alternate
    # Calls in the last ``samples`` that started before the host had queued them, so their times may
    # include host delays.
    late = 0

    def __init__(self, synchronize: Callable[[], Any] = lambda: None) -> None:
        """Store a function that waits until the device is idle."""
        self.synchronize = synchronize

    def cover(self, launch: float) -> float:
        """Prepare for calls that take ``launch`` seconds to queue; return the lead in seconds."""
        del launch
        return 0.0

    def samples(self, call: Callable[[], Any], calls: int) -> tuple[list[float], Any]:
        """Return the seconds of each of ``calls`` calls, and the result of the last."""
        raise NotImplementedError


class HostClock(Clock):
    """The host clock, for synchronous devices."""

    tells: ClassVar[str] = "host time, warm cache"
    BATCH: ClassVar[int] = 1  # consecutive calls; their mean is one sample
    now = staticmethod(time.perf_counter)

    def samples(self, call: Callable[[], Any], calls: int) -> tuple[list[float], Any]:
        """See ``Clock``."""
        means, result = [], None
        for _ in range(calls):
            self.synchronize()
            start = self.now()
            for _ in range(self.BATCH):
                result = call()
            means.append((self.now() - start) / self.BATCH)
        self.synchronize()
        return means, result


class ProcessorClock(HostClock):
    """CPU time of the process, which excludes preemption and waiting, so it is not a duration."""

    tells: ClassVar[str] = "processor time, warm cache"
    now = staticmethod(time.process_time)


class HostTime(HostClock):
    """Times how long the host is busy with a call, whatever the device does."""

    tells: ClassVar[str] = "host time of a call on an idle device"
    # 20 rounds of a 150 us call then take a third of a second, which averages over other load.
    BATCH: ClassVar[int] = 100


class DeviceClock(Clock):
    """Times calls with pairs of events on an asynchronous device.

    Args:
        event: creates an event with timing enabled.
        flush: queues a write larger than the device's cache.
        synchronize: waits until the device is idle.
    """

    tells: ClassVar[str] = "device time, cold L2"
    takes_turns: ClassVar[bool] = True

    def __init__(
        self, event: Callable[[], Any], flush: Callable[[], Any], synchronize: Callable[[], Any]
    ) -> None:
        """Store the functions; queue nothing yet."""
        super().__init__(synchronize)
        self._event, self._flush = event, flush
        self._flushes = self._most = 1

    @classmethod
    def of(cls, device: torch.device) -> DeviceClock:
        """Return the clock of a CUDA device; it allocates twice the size of the L2 cache."""
        size = 2 * torch.cuda.get_device_properties(device).L2_cache_size
        buffer = torch.empty(size, dtype=torch.uint8, device=device)
        event = partial(torch.cuda.Event, enable_timing=True)
        return cls(event, buffer.zero_, partial(torch.cuda.synchronize, device))

    def cover(self, launch: float) -> float:
        """Queue flushes for twice ``launch`` seconds before each call; see ``Clock``."""
        self._flushes = self._most = 1
        flush = min(self.samples(self._flush, 3)[0])
        self._most = max(1, math.ceil(LONGEST_LEAD / flush))
        self._flushes = min(max(1, math.ceil(2 * launch / flush)), self._most)
        return self._flushes * flush

    def samples(self, call: Callable[[], Any], calls: int) -> tuple[list[float], Any]:
        """Queue all calls, each after its own flushes, then synchronize once; see ``Clock``.

        Each late call doubles the flushes before later calls, up to ``LONGEST_LEAD``.
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
        self.synchronize()
        return [start.elapsed_time(end) * 1e-3 for start, end in pairs], result


class Replayed(Clock):
    """A clock that returns known times."""

    def __init__(self, seconds: list[float]) -> None:
        """Store the times of the calls to come."""
        super().__init__()
        self._seconds = iter(seconds)

    def samples(self, call: Callable[[], Any], calls: int) -> tuple[list[float], Any]:
        """Make the calls and return the next known times; see ``Clock``."""
        results = [call() for _ in range(calls)]
        return [next(self._seconds) for _ in range(calls)], results[-1]


def clock_of(device: torch.device) -> Clock:
    """Return the clock for calls on ``device``."""
    return DeviceClock.of(device) if device.type == "cuda" else HostClock()


class Pace(NamedTuple):
    """Seconds of one warm call until it is complete (wall), and until it is queued (launch)."""

    wall: float
    launch: float


def warm_up(
    call: Callable[..., Any], *, clock: Clock, setup: Callable[[], tuple[Any, ...]] = tuple
) -> Pace:
    """Call until compiled and warm; return the shortest wall and launch times.

    ``setup`` makes the arguments of each call.
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


def rounds_of(seconds: float) -> int:
    """Return how many calls of ``seconds`` each are timed within ``BUDGET``."""
    return min(max(int(BUDGET / seconds), FEWEST_ROUNDS), MOST_ROUNDS)


def retaken(
    clock: Clock,
    call: Callable[..., Any],
    arguments: tuple[Any, ...],
    *,
    again: Callable[[], tuple[Any, ...]] | None,
    calls: int = 1,
) -> tuple[list[float], Any, int]:
    """Return the samples and the result of a call, and how often late samples were repeated.

    ``again`` makes the arguments of a repeat; None keeps late samples.
    """
    seconds, result = clock.samples(partial(call, *arguments), calls)
    tries = 0
    while again and clock.late and tries < RETAKES:
        tries += 1
        seconds, result = clock.samples(partial(call, *again()), calls)
    return seconds, result, tries


class DeviceBenchmark(BenchmarkFixture):
    """The pytest-benchmark fixture with the clock of the device.

    Call ``time`` to measure. Calibration, ``pedantic`` and --benchmark-disable work as usual.
    """

    clock: Clock
    _retake_setup: Callable[[], tuple[Any, ...]] | None = None  # None: late samples are kept
    _retaken = _late = 0

    @classmethod
    def adopt(cls, benchmark: BenchmarkFixture, clock: Clock) -> DeviceBenchmark:
        """Change the class of the plugin's fixture, the only object that the plugin accepts."""
        adopted = cast("DeviceBenchmark", benchmark)
        adopted.__class__ = cls
        adopted.clock = clock
        return adopted

    def time(
        self,
        call: Callable[..., Any],
        *,
        setup: Callable[[], tuple[Any, ...]] = tuple,
        rounds: int | None = None,
        warm: bool = False,
    ) -> Any:
        """Warm up, then time as many calls as fit in ``BUDGET``, at least ``FEWEST_ROUNDS``.

        A late sample is repeated up to ``RETAKES`` times. ``extra_info`` counts the repeats as
        "retaken", and the samples that stayed late as "late".

        Args:
            call: the call to time; the caller has checked its result.
            setup: makes the arguments of each call, untimed.
            rounds: number of calls to time, regardless of ``BUDGET``.
            warm: the caller has warmed up. For calls that take seconds, together with ``rounds``;
                late samples are kept.

        Returns:
            The result of the last call.
        """
        if self.enabled and warm:
            self.clock.cover(0)
        elif self.enabled:
            pace = warm_up(call, clock=self.clock, setup=setup)
            lead = self.clock.cover(pace.launch)
            rounds = rounds or rounds_of(pace.wall + lead)
            # If the launch outlasts every lead, a repeated sample would be late again.
            self._retake_setup = setup if pace.launch < lead else None
        result = self.pedantic(call, setup=lambda: (setup(), {}), rounds=rounds or 1)
        self._note(self.clock.tells)
        if self.enabled:
            self.extra_info |= {"late": self._late, "retaken": self._retaken}
        return result

    def replay(self, samples: list[float], *, tells: str | None = None) -> None:
        """Record times measured earlier as the rounds of this case.

        ``tells`` is the kind of time; None keeps the kind in ``extra_info``.
        """
        clock, self.clock = self.clock, Replayed(samples)
        try:
            self.pedantic(lambda: None, rounds=len(samples))
        finally:
            self.clock = clock
        self._note(tells or self.extra_info["clock"])

    def _note(self, tells: str) -> None:
        """Record the statistics that every row has."""
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
        call = partial(function_to_benchmark, **kwargs)

        def runner(loops_range: range | None, timer: object = None) -> Any:  # noqa: ARG001
            seconds, result, tries = retaken(
                self.clock,
                call,
                args,
                again=self._retake_setup,
                calls=len(loops_range) if loops_range else 1,
            )
            self._retaken += tries
            self._late += self.clock.late
            return sum(seconds) if loops_range else (sum(seconds), result)

        return runner


class _InterpretedError(BaseException):
    """A kernel is about to be interpreted; only ``interprets`` should catch this."""


def interprets(call: Callable[[], Any]) -> bool:
    """Return whether ``call`` runs a kernel in Triton's interpreter, where times mean nothing.

    The call stops at its first interpreted kernel. Triton is not imported.
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
