"""Barriers in shared memory: phases that flip when all have arrived and all bytes have come."""

from __future__ import annotations

from flashattn.emulate.schedule import here


class Barrier:
    """An mbarrier: arrivals and bytes that its phase still waits for."""

    def __init__(self) -> None:
        """Nobody has set it up."""
        self.count = self.pending = self.bytes = self.phase = 0

    def arrive(self, count: int = 1, expected: int = 0) -> None:
        """Count arrivals, and bytes that will come.

        Raises:
            RuntimeError: more arrive than the phase waits for.
        """
        if count > self.pending:
            raise RuntimeError(f"{count} arrive at a barrier that waits for {self.pending}")
        self.pending -= count
        self.land(-expected)

    def land(self, size: int) -> None:
        """Count bytes that have come; the phase flips when nothing is missing."""
        self.bytes -= size
        if self.pending == self.bytes == 0:
            self.phase ^= 1
            self.pending = self.count


class Barriers:
    """Some of them, of shape [n, 1]."""

    def __init__(self, count: int) -> None:
        """Make them."""
        self._barriers = [Barrier() for _ in range(count)]

    def index(self, i: int) -> Barrier:
        """Return one.

        Raises:
            IndexError: there are not so many.
        """
        if not 0 <= i < len(self._barriers):
            raise IndexError(f"barrier {i} of {len(self._barriers)}")
        return self._barriers[i]


class NamedBarrier:
    """A barrier of the program's that has a number."""

    def __init__(self) -> None:
        """Nobody has come."""
        self.came = self.phase = 0

    def arrive(self, threads: int) -> int:
        """Count these warps as some of the threads, and return which phase it was.

        Raises:
            RuntimeError: more arrive than belong to it.
        """
        here().pause()
        self.came += here().threads
        if self.came > threads:
            raise RuntimeError(f"{self.came} threads arrive at a barrier of {threads}")
        phase = self.phase
        self.phase += self.came // threads
        self.came %= threads
        return phase


# What kernels call.


class MBarrierLayout:
    """Of barriers; there is nothing to say of it."""


def init(barrier: Barrier, count: int) -> None:
    """Let each phase wait for so many arrivals."""
    barrier.count = barrier.pending = count


def wait(barrier: Barrier, phase: int) -> None:
    """Wait until the phase of that parity is over."""
    here().pause(lambda: barrier.phase != phase)


def arrive(barrier: Barrier, count: int = 1) -> None:
    """Arrive."""
    here().pause()
    barrier.arrive(count)


def expect(barrier: Barrier, size: int) -> None:
    """Arrive once, and let the phase wait for bytes."""
    here().pause()
    barrier.arrive(expected=size)


def barrier_arrive(number: int, threads: int) -> None:
    """Arrive at the program's barrier of that number."""
    here().program.barriers[int(number)].arrive(threads)


def barrier_wait(number: int, threads: int) -> None:
    """Arrive, and wait until all threads have."""
    barrier = here().program.barriers[int(number)]
    phase = barrier.arrive(threads)
    here().pause(lambda: barrier.phase != phase)


def thread_barrier() -> None:
    """Do nothing: the threads of a role are one here."""
