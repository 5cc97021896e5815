"""Run ordinary tests on mutated copies of the package, and list the verdicts."""

from __future__ import annotations

import multiprocessing
import re
import runpy
import shutil
import time
from compileall import compile_dir
from dataclasses import dataclass
from functools import cache
from multiprocessing import forkserver
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("suite.py")
PATIENCE = 240  # seconds, less than a test may take; a verdict takes a few
CHOSEN = {
    "triton": "triton or test_kernels or test_launch or kernel_of_documents or emulated"
    " or sink_behind or test_incremental or test_merge",
    "tiled": "tiled or test_mask or test_problem or test_parallel or test_flash or test_kvcache"
    " or transformers or sdpa_hook or test_limits",
}
# What a run imports besides the package. SymPy comes with the first tensor on the meta device.
PRELOADED = ["torch", "triton.runtime.interpreter", "triton.experimental.gluon.language"]
PRELOADED += ["torch.fx.experimental.symbolic_shapes", "torch.distributed.tensor"]
PRELOADED += ["hypothesis.strategies", "pytest", "_pytest.pytester", "pytest_benchmark.plugin"]
# Tests are named before they run. The first failure is enough: it is not shrunk, assertions are
# not rewritten, and nobody looks for lost exceptions at the end.
OPTIONS = ("-x", "-v", "-p", "no:cacheprovider", "-p", "no:verdicts", "--assert=plain")
OPTIONS += ("-p", "no:unraisableexception", "-p", "no:threadexception")
OPTIONS += ("--hypothesis-profile", "at once")  # of suite.py
OPTIONS += ("--hypothesis-seed", "0")  # a bug that was caught once is caught again
# Interpreted; lines are wide, so that no test's name is cut.
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "COLUMNS": "400"}


@cache
def forks():
    """Start a process that has made the slow imports, and return the context that forks it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        forkserver.ensure_running()
    compile_dir(ROOT / "tests", maxlevels=0, quiet=2)  # pytest keeps only what it has rewritten
    return context


@dataclass(frozen=True)
class Verdict:
    """The result of the tests on one copy.

    Args:
        code: pytest's exit status; None when it did not end in time, negative when it was killed.
        test: the test that failed, or that ran when the process died.
        said: how it failed.
        seconds: from start to end.
        output: all that was printed.
    """

    code: int | None
    test: str
    said: str
    seconds: float
    output: str


def link(folder, source, changed=None):
    """Link to the entries of a folder, except for one file, which gets a text of its own.

    ``changed`` is the file's path in ``source``, and its text.
    """
    folder.mkdir(exist_ok=True)
    path, text = changed or (Path(), "")
    for entry in source.iterdir():
        if entry.name != next(iter(path.parts), None):
            (folder / entry.name).symlink_to(entry)
        elif entry.is_dir():
            link(folder / entry.name, entry, (path.relative_to(entry.name), text))
        else:
            (folder / entry.name).write_text(text)


def examine(folder, tests, chosen, mutant=None):
    """Return the verdict of tests on a copy of the package in ``folder``, mutated unless None."""
    for name in ("tests", "conftest.py", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)
    package = ROOT / "flashattn"
    text = mutant and mutant.applied((package / mutant.path).read_text())
    link(folder / "flashattn", package, mutant and (Path(mutant.path), text))
    given = {
        "FOLDER": str(folder),
        "ARGUMENTS": [*tests, "-k", CHOSEN[chosen], *OPTIONS],
        "ENVIRONMENT": ENVIRONMENT | {"PYTHONPATH": str(folder)},
    }
    start = time.perf_counter()
    process = forks().Process(target=runpy.run_path, args=(str(SCRIPT), given))
    try:
        process.start()
        process.join(PATIENCE)
        code = process.exitcode
        process.kill()
        output = (folder / "output.txt").read_text()
    finally:
        shutil.rmtree(folder)
    return Verdict(code, *who_failed(output, code), time.perf_counter() - start, output)


def who_failed(output, code):
    """Return the failed test and its message, or the test in which the process died."""
    failed = re.search(r"^FAILED (.+?)(?: - (.*))?$", output, re.MULTILINE)
    if failed:
        return failed[1], failed[2] or ""
    started = re.findall(r"^(tests/\S+::\S+)", output, re.MULTILINE)
    if code is not None and code < 0 and started:
        return started[-1], f"killed by signal {-code}"
    return "", ""


@pytest.fixture
def verdict(tmp_path, record_property):
    """Return a function that examines a copy, mutated or not, and records its verdict."""

    def examined(tests, chosen, mutant=None):
        found = examine(tmp_path, tests, chosen, mutant)
        words = found.test or ("nobody" if found.code == 0 else "no test; see above")
        record_property("verdict", f"{found.seconds:5.1f} s  {mutant or chosen}: {words}")
        return found

    return examined


def pytest_collection_modifyitems(config, items):
    """Leave mutants out unless ``-m`` names them: they take minutes."""
    if "mutants" in config.option.markexpr:
        return
    config.hook.pytest_deselected(items=[item for item in items if _is_mutant(item)])
    items[:] = [item for item in items if not _is_mutant(item)]


def _is_mutant(item):
    return item.get_closest_marker("mutants") is not None
