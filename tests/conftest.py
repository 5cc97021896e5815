"""Fixtures, and the setup of torch, Triton and inner runs of pytest."""

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
from flashattn.testing.seed import Seed
from flashattn.testing.upstream import products_mix_rows

# Tests multiply small matrices: on shared cores, threads that wait for each other made them six
# times slower.
torch.set_num_threads(1)
# Subprocesses of tests use one thread as well, and find the tested package even if it is not
# installed.
os.environ["OMP_NUM_THREADS"] = "1"
# Without vector instructions, Inductor's loops compile in three quarters of the time.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")
os.environ.setdefault("SYMPY_CACHE_SIZE", "200000")  # else SymPy derives evicted results again
SEARCHED = [str(Path(flashattn.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, SEARCHED))
# Inductor would move Triton's cache in each worker, which would then compile everything again.
os.environ.setdefault("TRITON_CACHE_DIR", knobs.cache.dir)
if os.environ.get("TRITON_INTERPRET") == "1":
    patch_interpreter()
WITHOUT_ONEDNN = products_mix_rows()
if WITHOUT_ONEDNN:  # else correct implementations fail laws about NaN
    torch.backends.mkldnn.enabled = False


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Disable garbage collection while collecting, then freeze the million objects found."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()
        if not torch.cuda.is_available():  # on a GPU, cycles may hold much of its memory
            gc.set_threshold(10_000, 10, 50)  # the default costs a twelfth of the time


def pytest_unconfigure():
    """Unfreeze the objects, or Triton's bindings report all of them as leaks at exit."""
    gc.unfreeze()


def pytest_report_header():
    """Report that tests run without oneDNN, unlike a user's code."""
    said = "bf16 products of this CPU's oneDNN mix rows (its issue 5717): tests run without it"
    return [said] * WITHOUT_ONEDNN


@pytest.fixture
def pytester(pytester, monkeypatch):
    """Keep the modules that an inner run imports: torch and Triton cannot be imported twice."""
    for name in [name for name in os.environ if name.startswith("PYTEST_XDIST_")]:
        monkeypatch.delenv(name)  # an inner run is not an xdist worker
    own = ("test_", "bench_", "conftest", "benchmarks")

    def snapshot():
        return SysModulesSnapshot(lambda name: not name.rpartition(".")[2].startswith(own))

    pytester._sys_modules_snapshot = snapshot()
    pytester._Pytester__take_sys_modules_snapshot = snapshot
    profile = hypothesis.settings.get_current_profile_name()
    monkeypatch.setattr(Seed, "value", Seed.value)  # put back later
    yield pytester
    hypothesis.settings.load_profile(profile)  # an inner run's conftest replaces it


@pytest.fixture
def matmul():
    """Yield PyTorch's settings of CUDA products; restore ``fp32_precision`` after the test."""
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    yield settings
    settings.fp32_precision = before


@pytest.fixture
def laid_out(pytester, monkeypatch):
    """Shorten timing; return a function that copies benchmarks to a folder of their own."""
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
