"""Schedule: which warps go on, and when a copy moves, drawn wherever one could wait."""

from __future__ import annotations

import random
import sys
import threading
from bisect import bisect
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from types import FrameType
from typing import Any

SPEEDS = (1, 32, 1024)  # some are much slower than others, so much later
OWN = {str(Path(__file__).parent), str(Path(threading.__file__).parent)}
_here = threading.local()


class DeadlockError(RuntimeError):
    """Nothing can move, and not all have ended."""


class _DroppedError(BaseException):
    """Ends a thread whose schedule is over."""


def always() -> bool:
    """Wait for nothing: others may run first."""
    return True


class Warps:
    """Some warps of a program, with one role: a thread that runs when it is its turn.

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
        self.schedule, self.name, self.program, self.threads = schedule, name, program, threads
        self.speed = schedule.random.choice(SPEEDS)
        self.ready: Callable[[], bool] = always
        self.ended = False
        self.products: list[Any] = []  # begun, and not waited for
        self.stores: list[Any] = []
        self.unfenced: list[Callable[[], object]] = []
        self._error: BaseException | None = None
        self._dropped = False
        self._turn, self._back = threading.Lock(), threading.Lock()  # faster than semaphores
        self._turn.acquire()
        self._back.acquire()
        self._thread = threading.Thread(target=self._run, args=(body,), daemon=True)
        self._thread.start()

    def _run(self, body: Callable[[], object]) -> None:
        _here.warps = self
        try:
            self._await_turn()
            body()
        except _DroppedError:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again by who gave the turn
            self._error = error
        self.ended = True
        self._back.release()

    def _await_turn(self) -> None:
        self._turn.acquire()
        if self._dropped:
            raise _DroppedError

    def go_on(self) -> None:
        """Give them the turn until they wait or end; raise what they raise."""
        self._turn.release()
        self._back.acquire()
        if self._error is not None:
            raise self._error

    def pause(self, ready: Callable[[], bool] = always) -> None:
        """Give the turn back until something is so: called by themselves."""
        self.ready = ready
        self._back.release()
        self._await_turn()

    def drop(self) -> None:
        """End them."""
        self._dropped = True
        self._turn.release()
        self._thread.join()

    def __str__(self) -> str:
        """Return who they are, and the line of the kernel where they wait."""
        frame: FrameType | None = sys._current_frames().get(self._thread.ident or 0)  # noqa: SLF001
        while frame and str(Path(frame.f_code.co_filename).parent) in OWN:
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
        self._warps: list[Warps] = []
        self._events: list[tuple[int, Callable[[], object]]] = []

    def start(
        self, name: str, body: Callable[[], object], program: Any = None, threads: int = 128
    ) -> Warps:
        """Let warps take part."""
        warps = Warps(self, name, body, program, threads)
        self._warps.append(warps)
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
            while self._warps or self._events:
                self._move()
        finally:
            for warps in self._warps:
                warps.drop()

    def _move(self) -> None:
        choices: list[tuple[int, Callable[[], object]]] = [
            (warps.speed, warps.go_on) for warps in self._warps if warps.ready()
        ]
        waiting = len(choices)
        choices += self._events
        if not choices:
            raise DeadlockError("all wait: " + "; ".join(map(str, self._warps)))
        speeds = list(accumulate(speed for speed, _ in choices))
        at = bisect(speeds, self.random.random() * speeds[-1], 0, len(choices) - 1)
        if at >= waiting:
            del self._events[at - waiting]
        choices[at][1]()
        if any(warps.ended for warps in self._warps):
            self._warps = [warps for warps in self._warps if not warps.ended]


def here() -> Warps:
    """Return the warps whose code this is."""
    warps: Warps = _here.warps
    return warps
