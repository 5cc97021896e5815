"""Two revisions in two warm processes, asked in turns: what a machine does to one, it does to both.

They cannot share a process: two revisions that register one ``torch.library`` operator would both
run the one that came last.
"""

from __future__ import annotations

import json
import math
import os
import random
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from flashattn.gate.cases import Case, message
from flashattn.report.gate import ARMS, ROUNDS, Collection, Outcome, settle

WORKER = Path(__file__).with_name("worker.py")
START = (  # the first entry of sys.path would be the worker's own folder
    "import runpy, sys; sys.path[0] = sys.argv.pop(1);"
    " runpy.run_path(sys.argv.pop(1), run_name='__main__')"
)
PATIENCE = {"hello": 120.0, "prepare": 600.0}  # seconds to wait for an answer; else:
PATIENCE_ELSE = 120.0
SAMPLE = 10e-3  # seconds that one arm is timed in one round
MOST_CALLS = 500
# Where things lie in memory is part of a process's speed, and is left to chance: the same code in
# two processes differs by up to 60%. Three settings bring that down to 0.5%. Left to itself glibc
# gives large blocks back and takes them again, call by call, or does not, as it has learnt; pages
# of 4 KiB lie anywhere in a cache; and addresses and hashes are random (see also ``_fixed``).
SETTLED = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),  # the most it takes
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(64 << 20),
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
TOLD = 2000  # characters of a dead worker's last words


class WorkerError(RuntimeError):
    """A worker has died or does not answer; the message has the end of what it wrote.

    Args:
        arm: whose.
        said: what happened.
    """

    def __init__(self, arm: str, said: str) -> None:
        """Note the arm: the old revision's death is not the new one's fault."""
        super().__init__(f"{arm}: {said}")
        self.arm = arm


class Worker:
    """A revision's process.

    Args:
        name: of the arm, for messages.
        tree: the folder that holds the revision's ``flashattn``.
        device: where it runs.
        seed: of the hashes, by which things come to lie elsewhere in memory.
    """

    def __init__(self, name: str, tree: Path, device: torch.device, seed: int = 0) -> None:
        """Start it; ``greet`` waits until it is there."""
        self.name, self.tree = name, tree
        self._errors = tree.with_suffix(".stderr")
        python, settings = laid_out(device, seed)
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(  # noqa: S603 - ours
                [*python, "-c", START, str(tree), str(WORKER), str(device)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,  # so that Ctrl-C asks us, and we end it and its compilers
                env=os.environ | settings | {"PYTHONFAULTHANDLER": "1"},
            )

    def greet(self) -> None:
        """Wait until it has imported its revision, and make sure that it is the right one."""
        found = Path(self.answer("hello")["flashattn"])
        if not found.is_relative_to(self.tree):
            raise WorkerError(self.name, f"wanted flashattn of its own revision, got {found}")

    def tell(self, do: str, **request: Any) -> None:
        """Send a request."""
        if self._process.stdin is None:
            raise WorkerError(self.name, "has no stdin")
        with suppress(BrokenPipeError):  # it has died, which its answer will tell
            self._process.stdin.write(json.dumps({"do": do, **request}) + "\n")
            self._process.stdin.flush()

    def answer(self, to: str) -> dict[str, Any]:
        """Wait for the answer to the one request that was sent.

        Args:
            to: what was asked.

        Raises:
            WorkerError: the worker has died, or does not answer.
        """
        patience, answers = PATIENCE.get(to, PATIENCE_ELSE), self._process.stdout
        if answers is None or not select.select([answers], [], [], patience)[0]:
            self._process.send_signal(signal.SIGABRT)  # at which Python writes where it is
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(10)
            said = f"no answer to {to!r} in {patience:.0f} s; {self._last_words()}"
            raise WorkerError(self.name, said)
        line = answers.readline()
        if not line.endswith("\n"):
            raise WorkerError(self.name, f"died at {to!r}; its last words: {self._last_words()}")
        return json.loads(line)

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        """Send a request and wait for its answer."""
        self.tell(do, **request)
        return self.answer(do)

    def close(self) -> None:
        """End it, and all that it has started."""
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()

    def _last_words(self) -> str:
        return self._errors.read_text(encoding="utf-8", errors="replace")[-TOLD:].strip()


class Pair:
    """The working tree and a revision, each arm in a folder and a process of its own.

    ``trees`` has the arms' folders; processes read them when they start.

    Args:
        root: of the working tree.
        revision: what it is held against; None for the working tree itself.
        device: where all run.

    Raises:
        ValueError: there is no such revision, or it has no ``flashattn``.
    """

    def __init__(self, root: Path, revision: str | None, device: torch.device) -> None:
        """Write the trees; the processes start when they are needed."""
        self.device, self._shuffled, self._started = device, random.Random(0), 0  # noqa: S311
        self._workers: dict[str, Worker] = {}
        self._started_once, self._stillborn = False, ""  # why the old one cannot be imported
        self._left = ExitStack()
        folder = Path(self._left.enter_context(TemporaryDirectory(prefix="flashattn-gate-")))
        # Names of one length: a longer path is a longer string, and all behind it lies elsewhere.
        self.trees = {arm: folder / str(number) for number, arm in enumerate(ARMS)}
        try:
            for arm, tree in self.trees.items():
                if arm == "new" or revision is None:
                    working_tree(root, tree)
                else:
                    export(root, revision, tree)
        except BaseException:
            self._left.close()
            raise
        affinity = getattr(os, "sched_getaffinity", None)
        self._cores = sorted(affinity(0)) if affinity and device.type == "cpu" else [None]
        # Others use a core's caches, too, and only ever slow a call down; a GPU is ours alone.
        self._typical = min if device.type == "cpu" else median

    def close(self) -> None:
        """End the processes, then remove the trees."""
        self.renew()
        self._left.close()

    def renew(self) -> None:
        """End the processes; the next case gets others, laid out in another way."""
        for worker in self._workers.values():
            worker.close()
        self._workers = {}

    def judge(self, case: Case, *, rounds: int = ROUNDS, injected: float = 0.0) -> Outcome:
        """Time a case until its verdict is settled, each collection in fresh processes.

        Args:
            case: what is timed.
            rounds: of the first collection.
            injected: share of its own time by which the new revision is made slower.

        Raises:
            WorkerError: the new revision cannot run the case, or its process has died.
        """
        if self._stillborn:
            return Outcome(case=str(case), reason=self._stillborn, dead=True)
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
            self.renew()  # an answer may be on its way to a question that nobody remembers
            if not isinstance(error, WorkerError) or error.arm == "new":
                raise
            if not self._started_once:
                self._stillborn = _in_a_line(error)
            return Outcome(case=str(case), reason=_in_a_line(error), dead=True)
        return Outcome(case=str(case), readings=readings, injected=injected)

    def _start(self) -> None:
        """Start the processes: the arms' memory is laid out alike, each time in another way."""
        self._started += 1
        for arm, tree in self.trees.items():
            self._workers[arm] = Worker(arm, tree, self.device, self._started)
        for worker in self._workers.values():
            worker.greet()
        self._started_once = True

    def _prepare(self, case: Case, *, slowdown: float) -> str | None:
        """Make the case in each process and warm it up; return why the old revision cannot."""
        if not self._workers:
            self._start()
        for worker in self._workers.values():
            worker.tell("prepare", case=message(case))
        cannot = {arm: w.answer("prepare").get("cannot") for arm, w in self._workers.items()}
        if cannot["new"]:
            raise WorkerError("new", f"cannot run {case}: {cannot['new']}")
        if slowdown:
            self._workers["new"].ask("slow", share=slowdown)
        return cannot["ref"] or cannot["again"]

    def _collect(self, rounds: int) -> Collection:
        """Time what was prepared, in each round every arm once, in an order drawn for it.

        All arms of a round run on one core, and rounds take turns among the cores: a core that
        others use costs precision, and favours nobody.
        """
        pace = self._workers["ref"].ask("pace")["seconds"]
        calls = min(max(math.ceil(SAMPLE / pace), 1), MOST_CALLS)
        seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
        for number in range(rounds):
            core = self._cores[number % len(self._cores)]
            for arm in self._shuffled.sample(ARMS, len(ARMS)):
                told = self._workers[arm].ask("sample", calls=calls, core=core)["seconds"]
                seconds[arm].append(self._typical(told))
        return Collection(**seconds)


def _in_a_line(error: WorkerError) -> str:
    """Return what happened, and of its last words the last line."""
    lines = str(error).splitlines()
    return "; ".join([lines[0].partition("; ")[0], *lines[1:][-1:]])


def laid_out(device: torch.device, seed: int) -> tuple[list[str], dict[str, str]]:
    """Return a command that starts Python, and its settings: one seed, one layout of memory.

    Args:
        device: where it will work; a GPU's memory is laid out by its driver.
        seed: of the hashes.
    """
    settings = {"PYTHONHASHSEED": str(seed)}
    if device.type == "cuda":
        return [sys.executable], settings
    return [*_fixed(), sys.executable], SETTLED | settings


@cache
def _fixed() -> tuple[str, ...]:
    """Return the command that starts another with the same addresses every time, if there is it."""
    setarch = shutil.which("setarch")
    if setarch is None:
        return ()
    command = (setarch, "--addr-no-randomize")
    done = subprocess.run([*command, "true"], capture_output=True, check=False)  # noqa: S603
    return command if done.returncode == 0 else ()


def working_tree(root: Path, folder: Path) -> None:
    """Copy the package as it is now, so that an editor does not change it half way."""
    shutil.copytree(
        root / "flashattn", folder / "flashattn", ignore=shutil.ignore_patterns("__pycache__")
    )


def export(root: Path, revision: str, folder: Path) -> None:
    """Write a revision's package into a folder; git's own records are left as they are.

    Raises:
        ValueError: there is no such revision, or it has no ``flashattn``.
    """
    archive = ("git", "-C", str(root), "archive", "--format=tar", resolve(root, revision))
    done = subprocess.run([*archive, "flashattn"], capture_output=True, check=False)  # noqa: S603
    if done.returncode:
        raise ValueError(f"wanted a revision that has flashattn, got {revision!r}")
    folder.mkdir()
    subprocess.run(["tar", "-x", "-C", str(folder)], input=done.stdout, check=True)  # noqa: S603, S607


def resolve(root: Path, revision: str) -> str:
    """Return the commit that a revision names.

    Raises:
        ValueError: there is none, or no git.
    """
    name = f"{revision}^{{commit}}"
    ask = ("git", "-C", str(root), "rev-parse", "--verify", "--quiet", name)
    try:
        done = subprocess.run(ask, capture_output=True, text=True, check=False)  # noqa: S603
    except OSError as error:
        raise ValueError(f"git cannot be run: {error}") from None
    if done.returncode:
        raise ValueError(f"wanted a revision of this repository, got {revision!r}")
    return done.stdout.strip()


@contextmanager
def terminable() -> Iterator[None]:
    """Take SIGTERM as Ctrl-C, so that what was started is ended, too."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
