"""How tensor cores multiply fp32."""

from __future__ import annotations

import torch

PRECISIONS = ("auto", "bf16x6", "tf32x3", "tf32", "ieee")
# bf16 terms of a number that is decomposed before the kernel. Three hold all of fp32. Two hold 16
# bits, and their three products replace one TF32 product, which has 11.
TERMS = {"bf16x6": 3, "tf32": 2}


def input_precision(asked: str, dtype: torch.dtype) -> str:
    """Return how a kernel multiplies its inputs.

    ``bf16x6`` decomposes each number into three bf16 terms, which hold all 24 bits, and adds the
    six products that matter. ``tf32x3`` uses two TF32 terms; its sums lose more bits, see
    docs/kernels.md. ``tf32`` keeps 11 bits, or 16 where three products of two bf16 terms are
    faster. ``ieee`` does not use tensor cores. ``auto`` is ``tf32`` if
    ``torch.backends.cuda.matmul`` allows it, else ``bf16x6``. Half precision ignores all of them.

    Raises:
        ValueError: ``asked`` is none of these.
    """
    if asked not in PRECISIONS:
        raise ValueError(f"precision: wanted one of {', '.join(PRECISIONS)}, got {asked!r}")
    if dtype != torch.float32:
        return "ieee"
    if asked != "auto":
        return asked
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "bf16x6"
