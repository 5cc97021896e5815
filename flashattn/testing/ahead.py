"""Compiles ahead: other processes ask what a test is about to ask, and leave the binaries on disk.

Of a test on a GPU nearly all time goes to compiling kernels, which one process does one by one.
Triton finds a kernel on disk that any process has compiled, so several of them share the work. What
they compute is thrown away, and so are their errors: the test meets its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import flashattn.impls  # noqa: F401 - registers everyone
from flashattn.registry import get
from flashattn.testing.accuracy import Question, run

MOST_WORKERS = 8  # each holds a context on the GPU: half a GiB
FEWEST_EACH = 4  # questions; below, a process costs more than it saves


def workers_for(questions: int) -> int:
    """Return how many processes are worth it; 0 where this one alone is as fast."""
    workers = min(MOST_WORKERS, (os.cpu_count() or 1) // 2, questions // FEWEST_EACH)
    return workers if workers > 1 else 0


def _ask(name: str, question: Question) -> None:
    """Ask an implementation a question, for the sake of what it compiles."""
    case = question.draw()
    run(partial(get(name), causal=question.problem.causal, scale=case.scale), case)


class Ahead:
    """Processes that ask questions, in the order in which they are given.

    Args:
        name: of the implementation that is asked.
        questions: that will be asked here.
        workers: how many processes; with 0 nothing is done ahead.
    """

    def __init__(self, name: str, questions: Iterable[Question], workers: int) -> None:
        """Start; nothing is waited for."""
        self._futures: dict[Question, Future[None]] = {}
        self._pool = None
        if workers:
            # Not forked: a fork has a copy of this process's CUDA context that it cannot use.
            self._pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
            for question in questions:
                self._futures[question] = self._pool.submit(_ask, name, question)

    def wait(self, question: Question) -> BaseException | None:
        """Wait until a question was asked; return the error that it met, or None.

        Args:
            question: any; of one that was not given nothing is known.
        """
        future = self._futures.get(question)
        return None if future is None else future.exception()

    def close(self) -> None:
        """End the processes; what they have not begun is not done."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
