"""Errors of all implementations in ulps, and which clauses of the contract they keep.

The times in this study are those of the checks, not speeds of the implementations.
"""

import time
from functools import partial

import pytest
import torch

from flashattn.problem import Problem
from flashattn.registry import get, names
from flashattn.testing.contract import try_contract, usual
from flashattn.testing.errors import errors, results
from flashattn.testing.sweep import grid

IMPLS = [*names()]
ALL = ["bfloat16", "float16", "float32"]
FEW = ["tiled", "naive", "sdpa"]  # these run on a CPU
SMALL = {"heads": [2], "seq": [72]}
LARGE = {"heads": [4], "seq": [1024]}
COMPILED = 64  # largest head dimension of implementations that take seconds to compile a shape
SWEEPS = {
    "smoke": {
        "bench_errors": [
            *grid(dtype=["bfloat16", "float32"], head_dim=[32], **SMALL, impl=FEW),
            *grid(dtype=["bfloat16"], head_dim=[32], **SMALL, impl=["triton"]),  # interpreted
        ],
        "bench_contract": grid(impl=FEW),
    },
    # Without the contract: its clauses recompile every kernel.
    "default": {
        "bench_errors": [
            *grid(dtype=ALL, head_dim=[64], **LARGE, impl=IMPLS),
            *grid(dtype=["bfloat16"], head_dim=[128], **LARGE, impl=IMPLS),
        ],
        "bench_contract": [],
    },
    "full": {
        "bench_errors": grid(dtype=ALL, head_dim=[64, 128, 256], **LARGE, impl=IMPLS),
        "bench_contract": grid(impl=IMPLS),
    },
}


@pytest.fixture
def asked(case, left_out, facts, device):
    """Return a function that returns the implementation, or skips the case with a reason."""

    def ask(problem):
        impl = get(case.impl)
        left_out(impl.why_not(problem, device, grad=True))
        if impl.compiles:
            if facts["sweep"] != "full" or problem.head_dim > COMPILED:
                left_out(f"{impl.name} compiles every shape for seconds: in the full sweep, D = 64")
            torch.compiler.reset()  # beyond eight shapes, torch would stop compiling
        return impl

    return ask


def bench_errors(device_benchmark, case, facts, device, asked):
    """Compare o, lse, dq, dk and dv with fp64 on normal and adversarial values."""
    problem = Problem(
        heads=case.heads, seq_q=case.seq, head_dim=case.head_dim, causal=True, dtype=case.dtype
    )
    facts |= {"part": "errors", "problem": str(problem), "causal": problem.causal}
    impl = asked(problem)
    try:
        given = results(impl, problem, device)
    except RuntimeError as error:
        if impl.strict:
            raise
        pytest.xfail(f"{impl.name}: {str(error).splitlines()[0]}")
    facts["errors"] = device_benchmark.time(partial(errors, given, problem, device), rounds=1)


def bench_contract(device_benchmark, case, facts, device, asked):
    """Check every clause of the contract, even those that the implementation disclaims."""
    facts["part"] = "contract"
    impl = asked(usual(get(case.impl), device))
    start = time.perf_counter()
    facts["clauses"] = try_contract(impl, device)
    device_benchmark.replay([time.perf_counter() - start], tells="host time of all clauses")
