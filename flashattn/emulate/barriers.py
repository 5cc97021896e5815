"""Barriers: mbarriers, whose phase flips when all arrivals and bytes are in, and named ones."""

from __future__ import annotations

from flashattn.emulate.schedule import here


class Barrier:
    """An mbarrier: the arrivals and bytes that its phase still waits for."""

    count = pending = bytes = phase = 0

    def arrive(self, count: int = 1, expected: int = 0) -> None:
        """Count arrivals, and bytes to expect.

        Raises:
            RuntimeError: there are more arrivals than the phase waits for.
        """
        if count > self.pending:
            raise RuntimeError(f"{count} arrive at a barrier that waits for {self.pending}")
        self.pending -= count
        self.land(-expected)

    def land(self, size: int) -> None:
        """Count bytes that have landed; the phase flips when nothing is missing."""
        self.bytes -= size
        if self.pending == self.bytes == 0:
            self.phase ^= 1
            self.pending = self.count


class Barriers:
    """An array of mbarriers, of shape [n, 1]."""

    def __init__(self, count: int) -> None:
        """Create the barriers."""
        self._barriers = [Barrier() for _ in range(count)]

    def index(self, i: int) -> Barrier:
        """Return the i-th barrier.

        Raises:
            IndexError: there is no such barrier.
        """
        if not 0 <= i < len(self._barriers):
            raise IndexError(f"barrier {i} of {len(self._barriers)}")
        return self._barriers[i]


class NamedBarrier:
    """A named barrier of a program."""

    came = phase = 0

    def arrive(self, threads: int) -> int:
        """Count the threads of the running warps, and return the phase in which they arrive.

        Raises:
            RuntimeError: more threads arrive than belong to the barrier.
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
    """The layout of barriers, which is not emulated."""


def init(barrier: Barrier, count: int) -> None:
    """Make each phase wait for ``count`` arrivals."""
    barrier.count = barrier.pending = count


def wait(barrier: Barrier, phase: int) -> None:
    """Wait until the phase of this parity is complete."""
    here().pause(lambda: barrier.phase != phase)


def arrive(barrier: Barrier, count: int = 1) -> None:
    """Arrive at an mbarrier."""
    here().pause()
    barrier.arrive(count)


def expect(barrier: Barrier, size: int) -> None:
    """Arrive once, and make the phase wait for ``size`` bytes."""
    here().pause()
    barrier.arrive(expected=size)


def barrier_arrive(number: int, threads: int) -> None:
    """Arrive at a named barrier of the program."""
    here().program.barriers[int(number)].arrive(threads)


def barrier_wait(number: int, threads: int) -> None:
    """Arrive at a named barrier, and wait until all threads have arrived."""
    barrier = here().program.barriers[int(number)]
    phase = barrier.arrive(threads)
    here().pause(lambda: barrier.phase != phase)


def thread_barrier() -> None:
    """Do nothing: all threads of a role are one greenlet here."""
