"""How fast the GPU's clock ran meanwhile, and what slowed it down: nvidia-smi in the background.

A number made while the clock was held down is true of that moment only, so it says so.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median
from threading import Lock, Thread
from typing import TYPE_CHECKING, NamedTuple

from flashattn.measure.device import gpu_facts

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch
    from typing_extensions import Self

PERIOD = 0.1  # seconds between samples
PATIENCE = 5.0  # seconds that nvidia-smi has to end when it is asked to

# Into a pipe nvidia-smi writes no line before it has many, and a line's time is when it comes.
UNBUFFERED = ("stdbuf", "-oL")

# The driver's bits that mean a clock below what the load asks for. The others (idle, a clock that
# the owner has set, a display) say that all is as wanted.
# Source: NVML's nvmlClocksEventReasons.
THROTTLES = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
# The second is what drivers before 535 call the first.
REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")


@dataclass(frozen=True)
class Reading:
    """What the GPU did in a span of time.

    Args:
        sm_hertz: median clock of the multiprocessors; None where it was not sampled.
        watts: median power; None where it was not sampled.
        throttled: what held the clock down at any moment of it, in words.
    """

    sm_hertz: float | None = None
    watts: float | None = None
    throttled: list[str] = field(default_factory=list)


class Sample(NamedTuple):
    """One line of nvidia-smi and when it came, by ``time.perf_counter``."""

    time: float
    hertz: float | None
    watts: float | None
    reasons: int


class Monitor:
    """Samples a GPU's clock, power and throttling between ``with`` and its end.

    Without nvidia-smi, and for a CPU, there are no samples, no thread and no error.

    Args:
        device: the one that is sampled.
        commands: that print ``clock in MHz, watts, bits`` line by line; the first that does is
            listened to. By default those for ``device``.
    """

    def __init__(
        self, device: torch.device, *, commands: Sequence[Sequence[str]] | None = None
    ) -> None:
        """Hold on to the commands; nothing runs yet."""
        self._commands = commands_for(device) if commands is None else commands
        self._samples: list[Sample] = []
        self._process: subprocess.Popen[str] | None = None
        self._ended = False
        self._lock = Lock()
        self._thread: Thread | None = None

    def __enter__(self) -> Self:
        """Start listening."""
        if self._commands:
            self._thread = Thread(target=self._listen, name="clock monitor", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the program and the thread."""
        if self._thread is None:
            return
        for how in (signal.SIGTERM, signal.SIGKILL):
            with self._lock:
                self._ended = True
                if self._process is not None:
                    _end(self._process, how)
            self._thread.join(PATIENCE)

    def between(self, start: float, end: float) -> Reading:
        """Return what was sampled from ``start`` to ``end``, two stamps of time.perf_counter()."""
        samples = [sample for sample in tuple(self._samples) if start <= sample.time <= end]
        seen = 0
        for sample in samples:
            seen |= sample.reasons
        return Reading(
            sm_hertz=_median(sample.hertz for sample in samples),
            watts=_median(sample.watts for sample in samples),
            throttled=[words for bit, words in THROTTLES.items() if seen & bit],
        )

    def _listen(self) -> None:
        """Follow the commands in turn, until one has told something."""
        for command in self._commands:
            self._follow(command)
            if self._samples:
                return

    def _follow(self, command: Sequence[str]) -> None:
        process = self._start(command)
        if process is None or process.stdout is None:
            return
        with process.stdout as lines:
            for line in lines:
                sample = parse(line, time.perf_counter())
                if sample is not None:
                    self._samples.append(sample)
        process.wait()

    def _start(self, command: Sequence[str]) -> subprocess.Popen[str] | None:
        """Start a program whose lines are read, or none if it is not to be had."""
        with self._lock:
            if self._ended:
                return None
            try:
                self._process = subprocess.Popen(  # noqa: S603 - nvidia-smi, or a test's own
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    encoding="utf-8",
                    errors="replace",
                    start_new_session=True,  # so that it can be ended with all that it started
                )
            except OSError:
                return None
            return self._process


def commands_for(device: torch.device) -> tuple[tuple[str, ...], ...]:
    """Return the commands that sample ``device`` every ``PERIOD``; none where nothing could."""
    uuid = gpu_facts(device).get("uuid") if device.type == "cuda" else None
    if uuid is None:
        return ()
    return tuple(
        (
            *UNBUFFERED,
            "nvidia-smi",
            f"--id={uuid}",
            f"--query-gpu=clocks.sm,power.draw,{reasons}",
            "--format=csv,noheader,nounits",
            f"--loop-ms={round(1e3 * PERIOD)}",
        )
        for reasons in REASONS
    )


def parse(line: str, at: float) -> Sample | None:
    """Return the sample that a line tells; None for a line that tells something else."""
    fields = line.strip().split(", ")
    if len(fields) != 3:  # noqa: PLR2004 - clock, power, reasons
        return None
    megahertz, watts, reasons = _number(fields[0]), _number(fields[1]), _bits(fields[2])
    if megahertz is watts is reasons is None:
        return None
    return Sample(at, None if megahertz is None else 1e6 * megahertz, watts, reasons or 0)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # [N/A]
        return None


def _bits(text: str) -> int | None:
    try:
        return int(text, 16)
    except ValueError:
        return None


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _end(process: subprocess.Popen[str], how: signal.Signals) -> None:
    """Signal a program and all that it started, unless it has ended and its number is free."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, how)
