"""pytest plugin: on a GPU, a worker waits for a kernel that another worker compiles."""

from __future__ import annotations

import atexit
import fcntl
import os
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from triton.runtime.cache import FileCacheManager

PATIENCE, PAUSE = 60.0, 0.02  # seconds
MANAGER = "TRITON_CACHE_MANAGER"
COUNTS = Counter[str]()
HELD: dict[str, IO[str]] = {}  # the lock of this process; methods of dict are atomic for threads


def _release() -> None:
    file = HELD.pop("lock", None)
    if file is not None:
        file.close()


os.register_at_fork(after_in_child=_release)  # the parent stays its holder
atexit.register(_release)


class SharedCache(FileCacheManager):  # type: ignore[misc]
    """Triton's cache, in which only one process compiles a kernel.

    A process holds at most one lock, and none while it waits. After a failed compilation it frees
    the lock when it asks for the next kernel, or ends; others wait for PATIENCE seconds at most.
    """

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Return a kernel's files; where there are none, lock the kernel and look again."""
        _release()
        group: dict[str, str] | None = super().get_group(filename)
        if group is None and self.lock_path is not None:
            with suppress(OSError, ValueError):  # a read-only folder; a thread took the lock's turn
                self._lock(Path(self.lock_path))
            group = super().get_group(filename)
            if group is not None:
                COUNTS["taken"] += 1
                _release()
        return group

    def put_group(self, filename: str, group: dict[str, str]) -> Any:
        """Store the kernel and let others read it."""
        path = super().put_group(filename, group)
        COUNTS["compiled"] += 1
        _release()
        return path

    @staticmethod
    def _lock(path: Path) -> None:
        file = path.open("w")
        while HELD.setdefault("lock", file) is not file:
            _release()
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            with suppress(BlockingIOError):
                return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            time.sleep(PAUSE)
        return None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: list[Any]) -> None:
    """Switch it on where several workers compile for a GPU and the user chose no other cache."""
    if torch.cuda.device_count() and len(specs) > 1 and MANAGER not in os.environ:
        for spec in specs:
            spec.env[MANAGER] = f"{__name__}:{SharedCache.__name__}"


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send a worker's counts."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["kernels"] = dict(COUNTS)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add up the counts of the workers that did not crash."""
    COUNTS.update(getattr(node, "workeroutput", {}).get("kernels", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many kernels were compiled, and how many another worker had compiled meanwhile."""
    if COUNTS:
        said = "kernels: {compiled} compiled, {taken} taken from another worker"
        terminalreporter.write_line(said.format_map(COUNTS))
