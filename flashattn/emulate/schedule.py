"""Schedule: which warps go on, and when a copy moves, drawn wherever one could wait."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from greenlet import getcurrent, greenlet

SPEEDS = (1, 32, 1024)  # some are much slower than others, so much later
OWN = str(Path(__file__).parent)


class DeadlockError(RuntimeError):
    """Nothing can move, and not all have ended."""


def always() -> bool:
    """Wait for nothing: others may run first."""
    return True


class Warps(greenlet):  # type: ignore[misc]
    """Some warps of a program, with one role, which run when it is their turn.

    Args:
        schedule: whose turns.
        name: what a deadlock calls them.
        body: what they do.
        program: what they are part of.
        threads: how many they have.
    """

    def __init__(
        self,
        schedule: Schedule,
        name: str,
        body: Callable[[], object],
        program: Any,
        threads: int,
    ) -> None:
        """Wait for the first turn."""
        super().__init__(parent=schedule.runner)  # goes on when these end, with their error
        self.schedule, self.name, self.program, self.threads = schedule, name, program, threads
        self.body = body
        self.speed = schedule.random.choice(SPEEDS)
        self.ready: Callable[[], bool] = always
        self.products: list[Any] = []  # begun, and not waited for
        self.stores: list[Any] = []
        self.unfenced: list[Callable[[], object]] = []

    def run(self) -> None:
        """Do what they do."""
        self.body()
        self.schedule.warps.remove(self)

    def pause(self, ready: Callable[[], bool] = always) -> None:
        """Give the turn away until something is so: called by themselves."""
        self.ready = ready
        self.parent.switch()

    def __str__(self) -> str:
        """Return who they are, and the line of the kernel where they wait."""
        frame: FrameType | None = self.gr_frame
        while frame and str(Path(frame.f_code.co_filename).parent) == OWN:
            frame = frame.f_back
        if frame is None:
            return self.name
        code = frame.f_code
        return f"{self.name} in {code.co_name} ({Path(code.co_filename).name}:{frame.f_lineno})"


class Schedule:
    """Warps that run in turns, and events that happen meanwhile.

    Args:
        seed: of the draws.
    """

    def __init__(self, seed: int = 0) -> None:
        """Nobody runs yet."""
        self.random = random.Random(seed)  # noqa: S311 - repeatable
        self.runner = getcurrent()
        self.warps: list[Warps] = []
        self._events: list[tuple[int, Callable[[], object]]] = []

    def start(
        self, name: str, body: Callable[[], object], program: Any = None, threads: int = 128
    ) -> Warps:
        """Let warps take part."""
        warps = Warps(self, name, body, program, threads)
        self.warps.append(warps)
        return warps

    def later(self, event: Callable[[], object]) -> None:
        """Let something happen, some time from now on."""
        self._events.append((self.random.choice(SPEEDS), event))

    def run(self) -> None:
        """Give turns until all warps have ended and all has happened.

        Raises:
            DeadlockError: they wait for one another.
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
        """Return warps that can go on, or an event, which is no longer to come."""
        ready = [warps for warps in self.warps if warps.ready is always or warps.ready()]
        if not ready and not self._events:
            raise DeadlockError("all wait: " + "; ".join(map(str, self.warps)))
        speeds = [warps.speed for warps in ready] + [speed for speed, _ in self._events]
        (at,) = self.random.choices(range(len(speeds)), speeds)
        return ready[at] if at < len(ready) else self._events.pop(at - len(ready))[1]


def here() -> Warps:
    """Return the warps whose code this is."""
    warps: Warps = getcurrent()
    return warps
