"""The processes of a process group, which do one measuring job at a time.

If a process dies, the others are ended, and the next job needs new ones.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from flashattn.testing import parallel_case


class Ranks:
    """The ``world`` processes of a process group, on "cuda" one for each GPU."""

    def __init__(self, world: int, device: str) -> None:
        """Start the processes; they connect while the first job waits."""
        self.world, self._folder = world, TemporaryDirectory()
        folder, spawn = Path(self._folder.name), get_context("spawn")
        self._links, self._processes = [], []
        for rank in range(world):
            ours, theirs = spawn.Pipe()
            given = rank, world, device, folder, theirs
            (folder / parallel_case.SAID.format(rank)).touch()  # it may die before it writes
            process = spawn.Process(target=parallel_case.main, args=given, daemon=True)
            process.start()
            theirs.close()  # else the end of the process would not be seen
            self._links.append(ours)
            self._processes.append(process)

    @property
    def alive(self) -> bool:
        """Return whether all processes are running."""
        return all(process.is_alive() for process in self._processes)

    def ask(self, seconds: float, **job: Any) -> Any:
        """Let all processes do a job of ``parallel_case``, and return the answer of the first.

        The job may take ``seconds``, including the start of the processes.

        Raises:
            RuntimeError: a process died, or time is up; the message has the end of its output.
            torch.OutOfMemoryError: a process ran out of memory.
        """
        for link in self._links:
            with suppress(OSError):  # a process that died is reported below
                link.send(job)
        told = wait([self._links[0], *(process.sentinel for process in self._processes)], seconds)
        if told == self._links[:1]:
            with suppress(EOFError):
                return self._links[0].recv()
        why = "died" if told else "took too long"
        ended = [i for i, process in enumerate(self._processes) if process.sentinel in told]
        path = Path(self._folder.name, parallel_case.SAID.format(ended[0] if ended else 0))
        said = path.read_text()[-2000:]
        self.close()
        error = torch.OutOfMemoryError if "OutOfMemoryError" in said else RuntimeError
        raise error(f"a process of {self.world} {why}: {said}")

    def close(self) -> None:
        """Kill the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        for link in self._links:
            link.close()
        self._folder.cleanup()


def fork(world: int, work: Callable[[int], None], seconds: int) -> list[int]:
    """Call ``work(rank)`` in forked processes, which share all imports; return their exit statuses.

    A signal ends a process after ``seconds``.
    """
    gc.freeze()  # else each process would traverse all imported objects, and so copy them
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            signal.alarm(seconds)
            work(rank)
            os._exit(0)  # gloo's threads sometimes abort a process that runs its destructors
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
