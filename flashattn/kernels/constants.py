"""Constants that all kernels share."""

from __future__ import annotations

import triton
import triton.language as tl

# Sizes that change from call to call. Triton does not specialize on them: one kernel serves all.
SIZES = ["heads", "kv_heads", "group", "seq_q", "seq_kv", "left", "right", "batches", "rows"]
SIZES += ["split_len", "split_len_kv", "num_splits", "num_splits_kv", "dkdv_programs"]
SIZES += ["num_counters"]
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
HIGH_BITS = tl.constexpr(-65536)  # mask of the bits of an fp32 that a bf16 has
HALF_BIT = tl.constexpr(1 << 15)  # added before masking, it rounds to nearest; NaN may wrap to -0
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
SECTION_HEADS = tl.constexpr(32)  # heads
