"""Windows, documents and prefixes: does time follow the number of unmasked query-key pairs?

Bounds, block masks and bool masks are created once, before timing starts.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from flashattn.problem import Problem
from flashattn.testing.sweep import UNEQUAL


def masks(
    total: int,
    *,
    windows: list[int],
    documents: list[tuple[int, ...]],
    prefixes: Sequence[int] = (),
    **sizes,
):
    """Return problems of ``total`` rows: causal, and with each window, documents and prefix."""
    plain = Problem(seq_q=total, causal=True, **sizes)
    return [
        plain,
        *(replace(plain, window=(keys - 1, None)) for keys in windows),
        *(replace(plain, documents=tuple((n, n) for n in lengths)) for lengths in documents),
        *(replace(plain, causal=False, prefix=keys) for keys in prefixes),
    ]


def equal(total: int, *sizes: int) -> list[tuple[int, ...]]:
    """Return, for each size, documents that all have that length."""
    return [(n,) * (total // n) for n in sizes]


LLM = {"dtype": "bfloat16", "heads": 16, "head_dim": 128}
SMOKE = masks(256, windows=[32], documents=[(56, 200)], prefixes=[70], heads=2, head_dim=16)
DOCUMENTS = [UNEQUAL, *equal(16384, 64, 1024)]
DEFAULT = masks(16384, windows=[1024], documents=DOCUMENTS, prefixes=[4096], **LLM)
FULL = [
    *masks(
        16384,
        windows=[128, 512, 1024, 4096],
        documents=[UNEQUAL, *equal(16384, 64, 256, 1024, 4096)],
        prefixes=[1024, 4096],
        **LLM,
    ),
    *masks(16384, windows=[128], documents=[], dtype="bfloat16", heads=64, kv_heads=8, head_dim=64),
]
SWEEPS = {"smoke": SMOKE, "default": DEFAULT, "full": FULL}


@pytest.fixture(autouse=True)
def pairs(problem, facts):
    """Record the number of unmasked pairs."""
    facts["pairs"] = problem.pairs


def bench_forward(time_pass):
    """Time the forward pass without gradients."""
    time_pass("forward")


def bench_backward(time_pass):
    """Time the backward pass alone."""
    time_pass("backward")
