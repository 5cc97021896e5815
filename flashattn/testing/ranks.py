"""Processes that share a process group and measure what they are asked for, one job at a time.

A process that dies ends the others, and the next job starts new ones.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import Empty, Queue
from tempfile import TemporaryDirectory
from threading import Thread
from typing import IO, Any

import torch

WORKER = "flashattn.testing.parallel_case"
ANSWER = "ANSWER "  # begins the line of a result; libraries print, too


class Ranks:
    """The processes of one process group, ``world`` in all, on "cuda" one for each GPU."""

    def __init__(self, world: int, device: str) -> None:
        """Start them; they meet while the first job waits."""
        self.world, self._folder = world, TemporaryDirectory()
        folder, self._answers = Path(self._folder.name), Queue[str]()
        self._said = [folder / f"rank{rank}.txt" for rank in range(world)]
        self._processes = [
            self._start(rank, device, folder / "store", said)
            for rank, said in enumerate(self._said)
        ]
        self._listener = Thread(target=self._listen, args=(self._processes[0].stdout,), daemon=True)
        self._listener.start()

    def _start(self, rank: int, device: str, store: Path, said: Path) -> subprocess.Popen[str]:
        where = ["-m", WORKER, str(rank), str(self.world), device, str(store)]
        with said.open("w") as file:
            return subprocess.Popen(  # noqa: S603
                [sys.executable, *where],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL if rank else subprocess.PIPE,
                stderr=file,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )

    def _listen(self, stream: IO[str]) -> None:
        for line in stream:
            if line.startswith(ANSWER):
                self._answers.put(line.removeprefix(ANSWER))

    @property
    def alive(self) -> bool:
        """Whether all of them run."""
        return all(process.poll() is None for process in self._processes)

    def ask(self, seconds: float, **job: Any) -> dict[str, Any]:
        """Let all of them do a job of ``parallel_case``, and return what the first one answers.

        ``seconds`` limit its time, that of their start included.

        Raises:
            RuntimeError: a process died, or time is up; the message has the end of what it said.
            torch.OutOfMemoryError: it died of that.
        """
        for process in self._processes:
            with suppress(BrokenPipeError):  # of a process that died, which is told below
                print(json.dumps(job), file=process.stdin, flush=True)
        end = time.monotonic() + seconds
        while self.alive and time.monotonic() < end:
            try:
                answer: dict[str, Any] = json.loads(self._answers.get(timeout=0.1))
            except Empty:
                continue
            return answer
        why = "took too long" if self.alive else "died"
        ended = [i for i, process in enumerate(self._processes) if process.poll() is not None]
        said = self._said[ended[0] if ended else 0].read_text()[-2000:]
        self.close()
        error = torch.OutOfMemoryError if "OutOfMemoryError" in said else RuntimeError
        raise error(f"a process of {self.world} {why}: {said}")

    def close(self) -> None:
        """End them."""
        for process in self._processes:
            process.kill()
        self._listener.join()  # what it reads has ended
        for process in self._processes:
            process.communicate()  # closes the pipes
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
