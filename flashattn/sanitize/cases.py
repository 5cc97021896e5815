"""The cases that run under a sanitizer: small ragged problems, forward and backward.

    python -m flashattn.sanitize.cases [TEXT [IMPL]]

The name of each case is printed before its start and after the device has finished it, so findings
in between belong to that case.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Any

import torch

import flashattn.impls  # noqa: F401 - registers everyone
from flashattn.problem import Problem
from flashattn.registry import get
from flashattn.testing.sample import Sample, run

HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
POINTERS = "misaligned"  # not TMA-compatible, so the kernels load by pointers
HALF: dict[str, Any] = {"dtype": "float16"}
BF16: dict[str, Any] = {"dtype": "bfloat16"}
PACKED = ((90, 90), (0, 0), (160, 160))
PROBLEMS = {
    # Several tiles in each dimension, the last one partial; pipeline stages overlap.
    Problem(heads=2, kv_heads=1, seq_q=300, seq_kv=401, head_dim=64, **BF16): "contiguous",
    Problem(seq_q=300, seq_kv=401, head_dim=64, causal="bottom_right", **HALF): POINTERS,
    Problem(seq_q=401, seq_kv=300, head_dim=128, causal=True, **BF16): "contiguous",
    Problem(heads=8, seq_q=129, seq_kv=65, head_dim=256, causal=True, **HALF): "contiguous",
    Problem(heads=3, seq_q=150, seq_kv=100, head_dim=256, causal=True, **BF16): POINTERS,
    # Split-KV.
    Problem(seq_q=300, seq_kv=901, head_dim=64, causal="bottom_right", **BF16): "contiguous",
    Problem(heads=2, seq_q=130, seq_kv=900, head_dim=128, **HALF): "contiguous",
    # Backward in one launch, several tiles.
    Problem(heads=2, kv_heads=1, seq_q=100, seq_kv=130, head_dim=64, causal=True, **BF16): "packed",
    Problem(seq_q=70, seq_kv=100, head_dim=128, causal="bottom_right", **HALF): POINTERS,
    # dK/dV split over query heads (GQA).
    Problem(batch=2, heads=6, kv_heads=2, seq_q=150, head_dim=88, causal=True, **HALF): "packed",
    Problem(heads=4, kv_heads=1, seq_q=150, seq_kv=100, head_dim=200, **BF16): "contiguous",
    # Pre-split fp32 with split-KV; the first two also run on the Hopper kernels.
    Problem(seq_q=300, seq_kv=501, head_dim=100, causal="bottom_right"): "contiguous",
    Problem(heads=8, kv_heads=4, seq_q=300, seq_kv=501, head_dim=60, causal=True): "contiguous",
    Problem(seq_q=501, seq_kv=300, head_dim=40): POINTERS,
    # Windows: skipped leading tiles, keys that no query sees, fully masked last rows.
    Problem(heads=2, seq_q=300, head_dim=64, causal=True, window=(70, None), **BF16): "contiguous",
    Problem(seq_q=70, seq_kv=400, head_dim=64, causal="bottom_right", window=(20, None)): POINTERS,
    Problem(heads=2, kv_heads=1, seq_q=300, seq_kv=200, window=(20, 33), **HALF): "packed",
    # Packed documents, and rows behind the last document.
    Problem(heads=2, seq_q=300, head_dim=64, causal=True, documents=PACKED, **BF16): "contiguous",
    Problem(heads=4, kv_heads=2, seq_q=300, head_dim=200, documents=PACKED, **HALF): "packed",
    # A bias and its gradient, stored with dS or by a launch of its own.
    Problem(heads=2, seq_q=300, seq_kv=200, head_dim=128, bias="1hts", **BF16): "contiguous",
    Problem(heads=2, seq_q=150, seq_kv=301, head_dim=64, bias="1hr", **HALF): "contiguous",
    # Fully masked rows.
    Problem(heads=2, seq_q=129, seq_kv=65, head_dim=64, causal="bottom_right"): "contiguous",
    Problem(batch=3, heads=8, seq_q=70, seq_kv=45, head_dim=40, **BF16): "packed",  # padded to 64
    Problem(seq_q=33, seq_kv=17, head_dim=7, causal=True): POINTERS,  # rows of odd length
    Problem(seq_q=1, seq_kv=200, head_dim=16, **HALF): "expanded",  # decoding
    # More tiles than SMs: persistent CTAs take several.
    Problem(batch=9, heads=8, kv_heads=4, seq_q=270, head_dim=128, causal=True, **BF16): "packed",
    Problem(batch=2, seq_q=17, seq_kv=1, head_dim=32, **BF16): "contiguous",  # one key
}


def cases(text: str = "", impl: str = "triton") -> dict[str, tuple[Problem, str]]:
    """Return problem and layout, by name, of the cases that an implementation supports here."""
    named = {f"{problem}-{layout}": (problem, layout) for problem, layout in PROBLEMS.items()}
    asked = {name: case for name, case in named.items() if text in name}
    able = get(impl).why_not
    return {name: c for name, c in asked.items() if able(c[0], HERE, grad=True) is None}


def main(text: str = "", impl: str = "triton") -> None:
    """Run the cases; see ``cases``."""
    if os.environ.get("TRITON_INSTRUMENTATION_MODE"):
        import triton  # noqa: PLC0415 - needed only here

        # The allocator for instrumented kernels is set per thread, so use one thread.
        triton.set_allocator(lambda size, *_: torch.zeros(size, dtype=torch.int8, device=HERE))
        torch.autograd.set_multithreading_enabled(False)
    for name, (problem, layout) in cases(text, impl).items():
        print(f"case {name}", flush=True)  # noqa: T201 - parsed by ``sanitize``
        case = Sample(problem=problem, device=HERE, layout=layout).draw()
        run(partial(get(impl), **problem.keywords, scale=case.scale), case)
        if HERE.type == "cuda":
            torch.cuda.synchronize(HERE)
        print(f"done {name}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
