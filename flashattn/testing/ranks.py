"""Processes that share a process group and measure what they are asked for, one job at a time.

A process that dies ends the others, and the next job starts new ones.
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
    """The processes of one process group, ``world`` in all, on "cuda" one for each GPU."""

    def __init__(self, world: int, device: str) -> None:
        """Start them; they meet while the first job waits."""
        self.world, self._folder = world, TemporaryDirectory()
        folder, spawn = Path(self._folder.name), get_context("spawn")
        self._links, self._processes = [], []
        for rank in range(world):
            ours, theirs = spawn.Pipe()
            given = rank, world, device, folder, theirs
            (folder / parallel_case.SAID.format(rank)).touch()  # it may die before it says anything
            process = spawn.Process(target=parallel_case.main, args=given, daemon=True)
            process.start()
            theirs.close()  # or the end of the process would not show
            self._links.append(ours)
            self._processes.append(process)

    @property
    def alive(self) -> bool:
        """Whether all of them run."""
        return all(process.is_alive() for process in self._processes)

    def ask(self, seconds: float, **job: Any) -> Any:
        """Let all of them do a job of ``parallel_case``, and return what the first one answers.

        ``seconds`` limit its time, that of their start included.

        Raises:
            RuntimeError: a process died, or time is up; the message has the end of what it said.
            torch.OutOfMemoryError: it died of that.
        """
        for link in self._links:
            with suppress(OSError):  # of a process that died, which is told below
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
        """End them."""
        for process in self._processes:
            process.kill()
            process.join()
        for link in self._links:
            link.close()
        self._folder.cleanup()


def fork(world: int, work: Callable[[int], None], seconds: int) -> list[int]:
    """Call ``work(rank)`` in processes that share what was imported; return their exit statuses.

    A process is ended by a signal after ``seconds``.
    """
    gc.freeze()  # or each process would look through all that was imported, and copy it so
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            signal.alarm(seconds)
            work(rank)
            os._exit(0)  # gloo's threads sometimes abort a process that ends with its destructors
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
