"""Sound products; ``--every-tile``; inner runs of pytest that forget nothing."""

from __future__ import annotations

import gc
import os
import shutil
from pathlib import Path

import hypothesis
import pytest
import torch
from _pytest.pytester import SysModulesSnapshot
from triton import knobs

import flashattn
from flashattn.measure import roofline, timing
from flashattn.testing.patching import patch_interpreter
from flashattn.testing.upstream import products_mix_rows

# Tests multiply small matrices. Threads that wait for one another, on cores that others use as
# well, made them six times slower.
torch.set_num_threads(1)
# Processes that tests start have one thread, too, and find the package that is tested, which need
# not be installed.
os.environ["OMP_NUM_THREADS"] = "1"
# Inductor's loops without vector instructions are compiled in three quarters of the time.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")
os.environ.setdefault("SYMPY_CACHE_SIZE", "200000")  # else it derives again what it has forgotten
SEARCHED = [str(Path(flashattn.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, SEARCHED))
# Inductor would move Triton's cache in each worker that uses it, which then compiles all again.
os.environ.setdefault("TRITON_CACHE_DIR", knobs.cache.dir)
if os.environ.get("TRITON_INTERPRET") == "1":
    patch_interpreter()
WITHOUT_ONEDNN = products_mix_rows()
if WITHOUT_ONEDNN:  # or laws about NaN fail that whoever is tested has kept
    torch.backends.mkldnn.enabled = False


def pytest_addoption(parser):
    """Declare the tests that take minutes on a GPU."""
    parser.addoption(
        "--every-tile",
        action="store_true",
        help="on a GPU: every tile with every dtype, width, mask, alignment and kind of length",
    )


def pytest_configure(config):
    """Refuse to skip what was asked for."""
    if config.getoption("--every-tile") and not torch.cuda.is_available():
        raise pytest.UsageError(
            "--every-tile: wanted a CUDA GPU, got none; without one all tiles are compiled by "
            "python -m flashattn.counts compiled"
        )


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Let the collector rest, then pass over modules and items, a million objects."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()
        if not torch.cuda.is_available():  # of whose memory cycles may hold much
            gc.set_threshold(10_000, 10, 50)  # without it one second in twelve is the collector's


def pytest_unconfigure():
    """Let it look again, or Triton's bindings say at the end that all of it leaks."""
    gc.unfreeze()


def pytest_report_header():
    """Say what is not tested as a user would run it."""
    said = "bf16 products of this CPU's oneDNN mix rows (its issue 5717): tests run without it"
    return [said] * WITHOUT_ONEDNN


@pytest.fixture
def pytester(pytester, monkeypatch):
    """Keep what an inner run imports: torch's and Triton's modules cannot be imported twice."""
    for name in [name for name in os.environ if name.startswith("PYTEST_XDIST_")]:
        monkeypatch.delenv(name)  # an inner run is no worker
    own = ("test_", "bench_", "conftest", "benchmarks")

    def snapshot():
        return SysModulesSnapshot(lambda name: not name.rpartition(".")[2].startswith(own))

    pytester._sys_modules_snapshot = snapshot()
    pytester._Pytester__take_sys_modules_snapshot = snapshot
    profile = hypothesis.settings.get_current_profile_name()
    yield pytester
    hypothesis.settings.load_profile(profile)  # which an inner run's conftest replaces


@pytest.fixture
def matmul():
    """Return what has PyTorch's setting for fp32 products, which is put back after the test."""
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    yield settings
    settings.fp32_precision = before


@pytest.fixture
def laid_out(pytester, monkeypatch):
    """Return what copies benchmarks to a folder of their own, in which they hardly take time."""
    roofs = {"float32": 1e12, "bfloat16": 1e13, "copy": 1e11}
    monkeypatch.setattr(roofline, "measure_roofs", lambda _: roofs)
    monkeypatch.setattr(timing, "MOST_ROUNDS", timing.FEWEST_ROUNDS)
    monkeypatch.setattr(timing, "WARM_UP", 0.0)
    pytester.mkdir("benchmarks")

    def copy(*names):
        root = Path(flashattn.__file__).parents[1]
        for name in ("conftest.py", "pyproject.toml", "benchmarks/conftest.py", *names):
            shutil.copy(root / name, pytester.path / name)

    return copy


def pytest_terminal_summary(terminalreporter):
    """List every mutant, the test that caught it, and how long that took."""
    reports = [report for of in terminalreporter.stats.values() for report in of]
    calls = [report for report in reports if getattr(report, "when", "") == "call"]
    told = [dict(report.user_properties).get("verdict") for report in calls]
    if any(told):
        terminalreporter.section("mutants")
        terminalreporter.write_line("\n".join(filter(None, told)))
