"""Time two revisions alternately in warm processes, so machine noise affects both alike.

They cannot share a process: both register the same ``torch.library`` operators, and the later
registration would replace the earlier.
"""

from __future__ import annotations

import json
import math
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from flashattn.gate.cases import Case
from flashattn.report.gate import ARMS, ROUNDS, Collection, Outcome, settle

WORKER = Path(__file__).with_name("worker.py")
# Keeps the folder of worker.py out of sys.path[0].
START = "import runpy, sys; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
PATIENCE = defaultdict(lambda: 120.0, prepare=600.0)  # seconds to wait for a reply, by request
SAMPLE = 10e-3  # seconds of one arm in one round
MOST_CALLS = 500
# A fixed memory layout: without it, the same code differs by up to 60% between processes; with it,
# by 0.5%. Huge pages, no memory returned to the system, fixed addresses (``_fixed``) and hashes.
FIXED_LAYOUT = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),  # the maximum
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(64 << 20),
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
STDERR_TAIL = 2000  # characters of a dead worker's stderr in a message


class WorkerError(RuntimeError):
    """A worker has died or does not answer."""

    def __init__(self, arm: str, said: str) -> None:
        """Keep the arm: only a failure of the new revision fails the gate."""
        super().__init__(f"{arm}: {said}")
        self.arm = arm


class Worker:
    """The process of one revision, whose ``flashattn`` is in the folder ``tree``."""

    def __init__(self, name: str, tree: Path, link: socket.socket, group: int) -> None:
        """Store the socket and the process group; ``greet`` waits until the process is ready."""
        self.name, self.tree, self._link, self._group = name, tree, link, group
        self._stream = link.makefile("rw")

    def greet(self) -> None:
        """Wait until the worker has imported ``flashattn``, and check that it is from its tree."""
        found = Path(self.answer("hello")["flashattn"])
        if not found.is_relative_to(self.tree):
            raise WorkerError(self.name, f"wanted flashattn of its own revision, got {found}")

    def tell(self, do: str, **request: Any) -> None:
        """Send a request."""
        with suppress(BrokenPipeError):  # a dead worker is reported by ``answer``
            self._stream.write(json.dumps({"do": do, **request}) + "\n")
            self._stream.flush()

    def answer(self, to: str) -> dict[str, Any]:
        """Wait for the reply to the last request.

        Raises:
            WorkerError: the worker has died or does not answer.
        """
        patience, said = PATIENCE[to], f"died at {to!r}; stderr: "
        if not select.select([self._link], [], [], patience)[0]:
            os.killpg(self._group, signal.SIGABRT)  # faulthandler prints the stacks
            select.select([self._link], [], [], 10)
            said = f"no answer to {to!r} in {patience:.0f} s; "
        line = ""
        with suppress(ConnectionError):
            line = self._stream.readline()
        if not line.endswith("\n"):
            raise WorkerError(self.name, said + self._stderr_tail())
        return json.loads(line)

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        """Send a request and wait for the reply."""
        self.tell(do, **request)
        return self.answer(do)

    def close(self) -> None:
        """Close the socket, so that the process ends."""
        with suppress(ConnectionError):
            self._stream.close()
        self._link.close()

    def _stderr_tail(self) -> str:
        path = self.tree.with_suffix(".stderr")
        said = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        return said[-STDERR_TAIL:].strip()


class Arms:
    """A process that imports torch once and forks a worker per tree, so all start alike."""

    def __init__(self, trees: Mapping[str, Path], device: torch.device, seed: int) -> None:
        """Start the processes; ``seed`` fixes their memory layout."""
        python, settings = laid_out(device, seed)
        ends = {name: socket.socketpair() for name in trees}
        numbers = {name: theirs.fileno() for name, (_, theirs) in ends.items()}
        words = [word for name, tree in trees.items() for word in (str(tree), str(numbers[name]))]
        self._process = subprocess.Popen(  # noqa: S603 - ours
            [*python, "-c", START, str(WORKER), str(device), *words],
            stdin=subprocess.DEVNULL,
            pass_fds=tuple(numbers.values()),
            start_new_session=True,  # Ctrl-C reaches only this process, which ends the workers
            env=os.environ | settings | {"PYTHONFAULTHANDLER": "1"},
        )
        self.workers = {}
        for name, (ours, theirs) in ends.items():
            theirs.close()
            self.workers[name] = Worker(name, trees[name], ours, self._process.pid)

    def close(self) -> None:
        """Kill the processes and their children."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for worker in self.workers.values():
            worker.close()


class Pair:
    """The working tree and a revision, each arm in its own folder and process."""

    def __init__(self, root: Path, revision: str | None, device: torch.device) -> None:
        """Write the trees; processes start on demand.

        Without a revision, every tree is a copy of the working tree.

        Raises:
            ValueError: there is no such revision, or it has no ``flashattn``.
        """
        self.device, self._random, self._started = device, random.Random(0), 0  # noqa: S311
        self._arms: Arms | None = None
        self._started_once, self._start_error = False, ""  # why the old revision does not start
        self._folder = TemporaryDirectory(prefix="flashattn-gate-")
        # Paths of equal length: the length of a string shifts everything after it in memory.
        self.trees = {arm: Path(self._folder.name, str(i)) for i, arm in enumerate(ARMS)}
        try:
            for arm, tree in self.trees.items():
                if arm == "new" or revision is None:
                    working_tree(root, tree)
                else:
                    export(root, revision, tree)
        except BaseException:
            self._folder.cleanup()
            raise
        self._cores = sorted(os.sched_getaffinity(0)) if device.type == "cpu" else [None]
        # Other programs share the CPU and only ever slow a call down; the GPU is exclusive.
        self._reduce = min if device.type == "cpu" else median

    @property
    def _workers(self) -> dict[str, Worker]:
        return self._arms.workers if self._arms else {}

    def close(self) -> None:
        """End the processes and remove the trees."""
        self.renew()
        self._folder.cleanup()

    def renew(self) -> None:
        """End the processes; the next case gets new ones with another memory layout."""
        if self._arms is not None:
            self._arms.close()
        self._arms = None

    def judge(self, case: Case, *, rounds: int = ROUNDS, injected: float = 0.0) -> Outcome:
        """Time a case until its verdict is settled, each collection in new processes.

        The first collection has ``rounds`` rounds. ``injected`` is the slowdown of the new
        revision, as a share of its time.

        Raises:
            WorkerError: the new revision cannot run the case, or its process has died.
        """
        if self._start_error:
            return Outcome(case=str(case), reason=self._start_error, dead=True)
        try:
            reason = self._prepare(case, slowdown=injected)
            if reason is not None:
                return Outcome(case=str(case), reason=reason)

            def collect(count: int) -> Collection:
                if count > rounds:
                    self.renew()
                    self._prepare(case, slowdown=injected)
                return self._collect(count)

            readings = settle(collect, rounds)
        except BaseException as error:
            self.renew()  # a worker may still reply to an abandoned request
            if not isinstance(error, WorkerError) or error.arm == "new":
                raise
            if not self._started_once:
                self._start_error = _one_line(error)
            return Outcome(case=str(case), reason=_one_line(error), dead=True)
        return Outcome(case=str(case), readings=readings, injected=injected)

    def _start(self) -> None:
        """Start the processes with one memory layout; each start uses a different layout."""
        self._started += 1
        self._arms = Arms(self.trees, self.device, self._started)
        for worker in self._workers.values():
            worker.greet()
        self._started_once = True

    def _prepare(self, case: Case, *, slowdown: float) -> str | None:
        """Prepare the case in each process; return the old revision's error, or None."""
        if not self._workers:
            self._start()
        for worker in self._workers.values():
            worker.tell("prepare", case=case.message())
        cannot = {arm: w.answer("prepare").get("cannot") for arm, w in self._workers.items()}
        if cannot["new"]:
            raise WorkerError("new", f"cannot run {case}: {cannot['new']}")
        if slowdown:
            self._workers["new"].ask("slow", share=slowdown)
        return cannot["ref"] or cannot["again"]

    def _collect(self, rounds: int) -> Collection:
        """Time every arm once per round, in random order.

        All arms of a round run on the same core, and rounds cycle through the cores, so a busy core
        favours no arm.
        """
        pace = self._workers["ref"].ask("pace")["seconds"]
        calls = min(max(math.ceil(SAMPLE / pace), 1), MOST_CALLS)
        seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
        for number in range(rounds):
            core = self._cores[number % len(self._cores)]
            for arm in self._random.sample(ARMS, len(ARMS)):
                told = self._workers[arm].ask("sample", calls=calls, core=core)["seconds"]
                seconds[arm].append(self._reduce(told))
        return Collection(**seconds)


def _one_line(error: WorkerError) -> str:
    """Return the first line of the message and the last line of the worker's stderr."""
    lines = str(error).splitlines()
    return "; ".join([lines[0].partition("; ")[0], *lines[1:][-1:]])


def laid_out(device: torch.device, seed: int) -> tuple[list[str], dict[str, str]]:
    """Return a command that starts Python, and its environment; ``seed`` fixes the memory layout.

    On a GPU the driver decides the layout, so the seed fixes only the hashes.
    """
    settings = {"PYTHONHASHSEED": str(seed)}
    if device.type == "cuda":
        return [sys.executable], settings
    return [*_fixed(), sys.executable], FIXED_LAYOUT | settings


@cache
def _fixed() -> tuple[str, ...]:
    """Return the prefix of a command that disables address randomization, if available."""
    setarch = shutil.which("setarch")
    if setarch is None:
        return ()
    command = (setarch, "--addr-no-randomize")
    done = subprocess.run([*command, "true"], capture_output=True, check=False)  # noqa: S603
    return command if done.returncode == 0 else ()


def working_tree(root: Path, folder: Path) -> None:
    """Copy the package, so that later edits do not reach the workers."""
    shutil.copytree(
        root / "flashattn", folder / "flashattn", ignore=shutil.ignore_patterns("__pycache__")
    )


def export(root: Path, revision: str, folder: Path) -> None:
    """Write a revision's package into a folder, without touching the repository.

    Raises:
        ValueError: there is no such revision, or it has no ``flashattn``.
    """
    archive = ("git", "-C", str(root), "archive", "--format=tar", resolve(root, revision))
    done = subprocess.run([*archive, "flashattn"], capture_output=True, check=True)  # noqa: S603
    folder.mkdir()
    subprocess.run(["tar", "-x", "-C", str(folder)], input=done.stdout, check=True)  # noqa: S603, S607


def resolve(root: Path, revision: str) -> str:
    """Return the commit hash of a revision.

    Raises:
        ValueError: there is no such revision, it has no ``flashattn``, or there is no git.
    """
    found = []
    for name, wanted in (
        (f"{revision}^{{commit}}", "of this repository"),
        (f"{revision}:flashattn", "that has flashattn"),
    ):
        ask = ("git", "-C", str(root), "rev-parse", "--verify", "--quiet", name)
        try:
            done = subprocess.run(ask, capture_output=True, text=True, check=False)  # noqa: S603
        except OSError as error:
            raise ValueError(f"git cannot be run: {error}") from None
        if done.returncode:
            raise ValueError(f"wanted a revision {wanted}, got {revision!r}")
        found.append(done.stdout.strip())
    return found[0]


@contextmanager
def terminable() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C, so that the workers are ended too."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
