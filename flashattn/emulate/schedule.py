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
        self.turn = threading.Lock()  # faster than a semaphore
        self.turn.acquire()
        self._thread = threading.Thread(target=self._run, args=(body,), daemon=True)
        self._thread.start()

    def _run(self, body: Callable[[], object]) -> None:
        _here.warps = self
        try:
            self._await_turn()
            body()
        except _DroppedError:
            return
        except BaseException as error:  # noqa: BLE001 - raised again by Schedule.run
            self.schedule.error = error
        self.ended = True
        self.schedule.warps.remove(self)
        self.schedule.next_turn().release()

    def _await_turn(self) -> None:
        self.turn.acquire()
        if self.schedule.over:
            raise _DroppedError

    def pause(self, ready: Callable[[], bool] = always) -> None:
        """Give the turn away until something is so: called by themselves."""
        if self.schedule.over:
            raise _DroppedError
        self.ready = ready
        turn = self.schedule.next_turn()
        if turn is not self.turn:
            turn.release()
            self._await_turn()

    def drop(self) -> None:
        """End them, who wait for a turn."""
        self.turn.release()
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
        self.error: BaseException | None = None  # that ended it
        self.over = False
        self._turn = threading.Lock()  # of who runs the schedule: the last
        self._turn.acquire()
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
            turn = self.next_turn()
            if turn is not self._turn:
                turn.release()
                self._turn.acquire()
        finally:
            self.over = True
            for warps in self.warps:
                warps.drop()
        if self.error is not None:
            raise self.error

    def next_turn(self) -> threading.Lock:
        """Let events happen until warps are drawn, and return what gives them the turn.

        Who has the turn calls this, so that no other thread runs between two turns.
        """
        try:
            while self.error is None and (self.warps or self._events):
                chosen = self._draw()
                if isinstance(chosen, Warps):
                    return chosen.turn
                chosen()
        except BaseException as error:  # noqa: BLE001 - raised again by run
            self.error = error
        return self._turn

    def _draw(self) -> Warps | Callable[[], object]:
        """Return warps that can go on, or an event, which is no longer to come."""
        ready = [warps for warps in self.warps if warps.ready is always or warps.ready()]
        if not ready and not self._events:
            raise DeadlockError("all wait: " + "; ".join(map(str, self.warps)))
        speeds = [warps.speed for warps in ready] + [speed for speed, _ in self._events]
        total = list(accumulate(speeds))
        at = bisect(total, self.random.random() * total[-1], 0, len(total) - 1)
        return ready[at] if at < len(ready) else self._events.pop(at - len(ready))[1]


def here() -> Warps:
    """Return the warps whose code this is."""
    warps: Warps = _here.warps
    return warps
