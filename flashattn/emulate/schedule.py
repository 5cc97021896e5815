"""The schedule: random draws of which warps go on, and when copies proceed."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from greenlet import getcurrent, greenlet

SPEEDS = (1, 32, 1024)  # weights of the draws: some warps and copies are much slower than others
OWN = str(Path(__file__).parent)


class DeadlockError(RuntimeError):
    """Not all warps have ended, none can go on, and no event is left that could change that."""


def always() -> bool:
    """Return True: wait for nothing, but let others run first."""
    return True


class Warps(greenlet):  # type: ignore[misc]
    """The warps of one role of a program, which run when it is their turn.

    Args:
        schedule: the schedule that gives turns.
        name: name of the warps in the message of a deadlock.
        body: code that the warps run.
        program: program that the warps belong to.
        threads: number of threads in all warps.
    """

    def __init__(
        self, schedule: Schedule, name: str, body: Callable[[], object], program: Any, threads: int
    ) -> None:
        """Wait for the first turn."""
        super().__init__(parent=schedule.runner)  # resumes when these end, and gets their error
        self.schedule, self.name, self.program, self.threads = schedule, name, program, threads
        self.body = body
        self.speed = schedule.random.choice(SPEEDS)
        self.ready: Callable[[], bool] = always
        self.products: list[Any] = []  # started, and not waited for
        self.stores: list[Any] = []
        self.unfenced: list[Callable[[], object]] = []

    def run(self) -> None:
        """Run the body."""
        self.body()
        self.schedule.warps.remove(self)

    def pause(self, ready: Callable[[], bool] = always) -> None:
        """Yield until ``ready`` returns true; only the running warps call this."""
        self.ready = ready
        self.parent.switch()

    def __str__(self) -> str:
        """Return the name, and the line of the kernel where the warps wait."""
        frame: FrameType | None = self.gr_frame
        while frame and str(Path(frame.f_code.co_filename).parent) == OWN:
            frame = frame.f_back
        if frame is None:
            return self.name
        code = frame.f_code
        return f"{self.name} in {code.co_name} ({Path(code.co_filename).name}:{frame.f_lineno})"


class Schedule:
    """Warps that run in turns, and events that happen between their turns, as drawn by a seed."""

    def __init__(self, seed: int = 0) -> None:
        """Start without warps."""
        self.random = random.Random(seed)  # noqa: S311 - repeatable
        self.runner = getcurrent()
        self.warps: list[Warps] = []
        self._events: list[tuple[int, Callable[[], object]]] = []

    def start(
        self, name: str, body: Callable[[], object], program: Any = None, threads: int = 128
    ) -> Warps:
        """Add warps to the schedule."""
        warps = Warps(self, name, body, program, threads)
        self.warps.append(warps)
        return warps

    def later(self, event: Callable[[], object]) -> None:
        """Let an event happen at some later time."""
        self._events.append((self.random.choice(SPEEDS), event))

    def run(self) -> None:
        """Give turns until all warps have ended and all events have happened.

        Raises:
            DeadlockError: the warps wait for one another.
        """
        try:
            while self.warps or self._events:
                chosen = self._draw()
                if isinstance(chosen, Warps):
                    chosen.switch()
                else:
                    chosen()
        finally:
            for warps in self.warps:
                warps.throw()  # ends those that wait

    def _draw(self) -> Warps | Callable[[], object]:
        """Draw warps that can go on, or an event, which is removed from the list."""
        ready = [warps for warps in self.warps if warps.ready is always or warps.ready()]
        if not ready and not self._events:
            raise DeadlockError("all wait: " + "; ".join(map(str, self.warps)))
        speeds = [warps.speed for warps in ready] + [speed for speed, _ in self._events]
        (at,) = self.random.choices(range(len(speeds)), speeds)
        return ready[at] if at < len(ready) else self._events.pop(at - len(ready))[1]


def here() -> Warps:
    """Return the warps that are running."""
    warps: Warps = getcurrent()
    return warps
