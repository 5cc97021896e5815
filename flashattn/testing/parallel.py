"""pytest plugin: ``pytest tests`` uses every core; tests marked ``alone`` run by themselves.

Folders and several files of tests run in pytest-xdist's workers. One file, or single tests, run in
one process, and so does everything under ``--pdb``, ``--lf``, ``--stepwise`` or ``-n 0``.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch

MOST_WORKERS = 16
GPU_BYTES = 8 * 2**30  # of GPU memory for each worker: its context, kernels and ordinary tests
ON_GPU = torch.cuda.is_available()
CHUNK = 1 if ON_GPU else 4  # most tests that a worker gets at once: neighbours share a reference
CACHED_BYTES = 2**30  # of GPU memory that a worker may keep between tests
CU_CTX_SCHED_BLOCKING_SYNC = 4  # cuda.h
ONE_PROCESS = ("usepdb", "collectonly", "lf", "stepwise")
LOCKS = pytest.StashKey[tempfile.TemporaryDirectory[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """Declare the markers; let a worker sleep while it waits for its GPU."""
    config.addinivalue_line("markers", "alone: looks at a clock, so other workers wait")
    config.addinivalue_line("markers", "gpu_memory: wants much of a GPU's memory, so one at a time")
    if hasattr(config, "workerinput") and ON_GPU and torch.version.cuda:
        cuda = ctypes.CDLL("libcuda.so.1")  # by default CUDA spins while it waits
        cuda.cuInit(0)
        cuda.cuDevicePrimaryCtxSetFlags_v2(0, CU_CTX_SCHED_BLOCKING_SYNC)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Start workers if folders or several files of tests are run and no option says otherwise."""
    option = config.option
    if not config.pluginmanager.has_plugin("xdist") or hasattr(config, "workerinput"):
        return
    if option.numprocesses is None and option.dist == "no" and _many(config):
        option.numprocesses = "auto"
    if option.numprocesses:
        # Tests multiply small matrices, for which threads of numpy's BLAS wait for one another.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        # Freed memory of tensors stays with the process: new memory would have to be cleared.
        os.environ.setdefault("MALLOC_MMAP_MAX_", "0")
        os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(1 << 32))
        option.dist = "load" if option.dist == "no" else option.dist
        option.maxschedchunk = option.maxschedchunk or CHUNK
        option.benchmark_disable = True  # else pytest-benchmark warns that workers disable it


def _many(config: pytest.Config) -> bool:
    """Return whether the arguments are folders or several files in the folder ``tests``."""
    if any(config.getoption(name, None) for name in ONE_PROCESS):
        return False
    tests, here = config.rootpath / "tests", config.invocation_params.dir
    paths = [here / argument for argument in config.args]
    if not all(path.exists() and path.resolve().is_relative_to(tests) for path in paths):
        return False
    return len(paths) > 1 or any(path.is_dir() for path in paths)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return the number of workers: one for each core, as far as the GPUs' memory suffices."""
    workers = min(len(os.sched_getaffinity(0)), MOST_WORKERS)
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    memory = sum(gpu.total_memory // GPU_BYTES for gpu in gpus)
    return max(1, min(workers, memory)) if gpus else workers


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Distribute the workers over the GPUs."""
    config.stash[LOCKS] = tempfile.TemporaryDirectory()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    if gpus:
        for i, spec in enumerate(specs):
            spec.env["CUDA_VISIBLE_DEVICES"] = gpus[i % len(gpus)]


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker where the locks are."""
    node.workerinput["locks"] = node.config.stash[LOCKS].name


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the locks."""
    if LOCKS in config.stash:
        config.stash[LOCKS].cleanup()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put slow property-based tests first, and tests that run alone last: then few wait for them.

    Neighbours need the same kernels, for which workers on a GPU would wait, so there tests are
    shuffled. Elsewhere implementations of one problem are neighbours, as they share exact results.
    Workers begin with the last file, so tests that run alone wait for short tests of the first.
    """
    worker, places = hasattr(config, "workerinput"), dict[str, int]()

    def place(item: pytest.Item) -> int:
        if worker and ON_GPU:
            return crc32(item.nodeid.encode())
        test, _, asked = item.nodeid.partition("[")
        called = getattr(item, "callspec", None)
        impl = str(called.params.get("impl", "")) if called else ""
        found = places.setdefault(test + asked.replace(impl, "", 1), len(places))
        return -found if worker else found

    items.sort(key=lambda x: (_alone(x), not _property_based(x), place(x)))


def _property_based(item: pytest.Item) -> bool:
    """Return whether Hypothesis draws the inputs of a test."""
    function = getattr(item, "obj", None)
    return hasattr(function, "hypothesis") or hasattr(function, "is_law")


def _alone(item: pytest.Item) -> bool:
    return item.get_closest_marker("alone") is not None


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outside pytest-timeout's clock
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Run a test beside those of other workers or, if it is marked ``alone``, by itself."""
    folder = getattr(item.config, "workerinput", {}).get("locks")
    if folder is None:
        return (yield)
    memory, door, room = (Path(folder) / name for name in ("memory", "door", "room"))
    with memory.open("w") as large, room.open("w") as shared:
        if item.get_closest_marker("gpu_memory"):
            fcntl.flock(large, fcntl.LOCK_EX)
        # A test that waits for the lock "room" keeps "door", so that later tests cannot starve it.
        with door.open("w") as single:
            fcntl.flock(single, fcntl.LOCK_EX)
            fcntl.flock(shared, fcntl.LOCK_EX if _alone(item) else fcntl.LOCK_SH)
        try:
            return (yield)
        finally:
            _release_memory(item)


def _release_memory(item: pytest.Item) -> None:
    """Release cached GPU memory; end a worker whose CUDA context is broken.

    After an illegal memory access every call to CUDA fails. If a worker ends, pytest-xdist names
    its test and starts another worker, which has a new context.
    """
    if not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
        if torch.cuda.memory_reserved() > CACHED_BYTES:
            torch.cuda.empty_cache()
    except RuntimeError as error:
        print(f"{item.nodeid}: {error}", file=sys.stderr, flush=True)  # noqa: T201
        os._exit(1)
