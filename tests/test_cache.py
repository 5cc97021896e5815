"""Workers compile a kernel once: who lacks it waits for the worker that compiles it."""

from __future__ import annotations

import fcntl
import multiprocessing
from types import SimpleNamespace

import pytest
import torch

from flashattn.testing import cache

KEY, NAME = "00" * 32, "kernel.json"


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cache, "COUNTS", cache.Counter())
    yield
    cache._release()


def _take(link):
    """Say when the lock is asked for; send the kernel that the cache then has, and the counts."""
    lock = fcntl.flock

    said = []

    def ask(*arguments):
        if not said:
            link.send("asks")
        said.append(arguments)
        lock(*arguments)

    fcntl.flock = ask
    link.send(cache.SharedCache(KEY).get_group(NAME))
    link.send(dict(cache.COUNTS))


@pytest.fixture
def worker():
    """Another process that wants the kernel; what it sends can be received."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_take, args=(there,))

    def start():
        process.start()
        there.close()  # so that what ends is no wait
        return here

    yield start
    process.join()
    assert process.exitcode == 0


def test_a_worker_waits_for_a_kernel_and_takes_it(worker):
    """It does not compile what another compiles; both are counted."""
    own = cache.SharedCache(KEY)
    assert own.get_group(NAME) is None
    other = worker()
    assert other.recv() == "asks"
    assert not other.poll(0.2), "it did not wait"
    group = {NAME: own.put("{}", NAME)}
    own.put_group(NAME, group)
    assert [other.recv(), other.recv()] == [group, {"taken": 1}]
    assert cache.COUNTS == {"compiled": 1}


def test_a_failed_compilation_keeps_no_lock(worker):
    """Who asks for the next kernel frees the last, so another worker compiles it."""
    assert cache.SharedCache(KEY).get_group(NAME) is None
    other = worker()
    assert other.recv() == "asks"
    assert cache.SharedCache("11" * 32).get_group(NAME) is None
    assert [other.recv(), other.recv()] == [None, {}]


def test_nobody_waits_for_ever(worker, monkeypatch):
    """After its patience a worker compiles what another seems to compile."""
    monkeypatch.setattr(cache, "PATIENCE", 0.1)  # of a process that is forked
    assert cache.SharedCache(KEY).get_group(NAME) is None
    other = worker()
    assert [other.recv() for _ in range(3)] == ["asks", None, {}]


def test_a_worker_that_ends_keeps_no_lock(worker):
    """The lock is freed with the process, although nothing was stored."""
    other = worker()
    assert [other.recv() for _ in range(3)] == ["asks", None, {}]
    assert cache.SharedCache(KEY).get_group(NAME) is None


def test_a_folder_that_cannot_be_written(tmp_path):
    """The kernel is compiled without a lock."""
    (tmp_path / KEY / "lock").mkdir(parents=True)
    assert cache.SharedCache(KEY).get_group(NAME) is None
    assert not cache.HELD


@pytest.mark.parametrize(
    ("gpus", "workers", "own", "wanted"),
    [(1, 2, None, True), (0, 2, None, False), (1, 1, None, False), (1, 2, "a:B", False)],
)
def test_where_it_is_switched_on(monkeypatch, gpus, workers, own, wanted):
    """Several workers of a GPU share it, unless the user chose another cache."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    if own is None:
        monkeypatch.delenv(cache.MANAGER, raising=False)
    else:
        monkeypatch.setenv(cache.MANAGER, own)
    specs = [SimpleNamespace(env={}) for _ in range(workers)]
    cache.pytest_xdist_setupnodes(specs)
    switched = {cache.MANAGER: "flashattn.testing.cache:SharedCache"} if wanted else {}
    assert [spec.env for spec in specs] == [switched] * workers


def test_the_counts_are_added_up():
    """The summary has one line where a kernel was compiled, none elsewhere."""
    said = []
    reporter = SimpleNamespace(write_line=said.append)
    cache.pytest_terminal_summary(reporter)
    assert not said
    for counts in ({"compiled": 2}, {"compiled": 1, "taken": 4}):
        cache.pytest_testnodedown(SimpleNamespace(workeroutput={"kernels": counts}))
    cache.pytest_testnodedown(SimpleNamespace())  # a worker that crashed
    cache.pytest_terminal_summary(reporter)
    assert said == ["kernels: 3 compiled, 4 taken from another worker"]
