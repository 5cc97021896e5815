"""Tiles of the portable kernels, measured on an H200; they serve all of compute capability 9."""

from __future__ import annotations

from flashattn.plan.rows import Kernel, Rows, rows
from flashattn.plan.tile import Tile

MEASURED_TRITON = (3, 6)
# Measured: one H200, 700 W, driver 580.159.04, torch 2.11, triton 3.6, bf16, N = 4096, 2026-11-21;
# tiles with a register limit at N = 1024 to 16 384, 2026-11-22. "decode" from 64 columns on: one
# H100, S = 1024 to 131 072, 2026-11-28.
DESCRIPTORS = rows(
    {
        ("fwd", 2, 32): (64, 128, 4, 3, 128),
        ("fwd", 2, 64): (64, 128, 4, 2),
        ("fwd", 2, 128): ((64, 128, 4, 1), (64, 64, 4, 3)),
        ("fwd", 2, 256): (128, 64, 8, 2),
        ("decode", 2, 16): (16, 64, 4, 3),
        ("decode", 2, 32): (16, 64, 4, 2),
        ("decode", 2, 64): (16, 128, 4, 4),
        ("decode", 2, 128): (16, 128, 8, 3),
        ("decode", 2, 256): (16, 64, 8, 3),
        ("bwd_dkdv", 2, 32): ((64, 64, 4, 3, 128), (64, 64, 4, 3)),
        ("bwd_dkdv", 2, 64): ((64, 64, 4, 3), (128, 64, 4, 2)),
        ("bwd_dkdv", 2, 128): (64, 64, 4, 2),
        ("bwd_dkdv", 2, 256): (32, 64, 8, 3),
        ("bwd_dq", 2, 32): (64, 64, 4, 3),
        ("bwd_dq", 2, 64): (128, 64, 8, 3),
        ("bwd_dq", 2, 128): (64, 64, 4, 2),
        ("bwd_dq", 2, 256): (128, 32, 8, 3),
    },
    descriptors=True,
)
# Rows of 32 bytes, which pointers load faster than descriptors. Measured likewise, 2026-11-22.
NARROW = rows(
    {
        ("fwd", 2, 16): (64, 128, 4, 3, 128),
        ("bwd_dkdv", 2, 16): (64, 64, 4, 3),
        ("bwd_dq", 2, 16): ((64, 64, 4, 3), (64, 64, 4, 3, 128)),
    },
    aligned=True,
)
# Measured likewise, one to 64 heads of 64 to 16 384, aligned inputs, 2026-11-22. Misaligned inputs
# that are split use the tiles of a full GPU.
SMALL_GRID = (
    rows(
        {
            ("fwd_small_grid", 2, (16, 32, 64)): (64, 64, 4, 2),
            ("fwd_small_grid", 2, 128): (128, 64, 8, 2),
            ("fwd_small_grid", 2, 256): (64, 32, 4, 2),
            ("fwd_short_kv", 2, (16, 32, 64, 128)): (16, 128, 4, 3),
            ("fwd_short_kv", 2, 256): (16, 64, 4, 2),
        }
    )
    | rows({("fwd_small_grid", 2, (16, 32, 64)): (64, 128, 4, 3)}, aligned=True)
    | rows(
        {
            ("fwd_small_grid", 2, 128): (64, 64, 4, 3),
            ("fwd_small_grid", 2, 256): (128, 64, 8, 2),
            ("fwd_short_kv", 2, 128): (16, 128, 4, 3),
            ("fwd_short_kv", 2, 256): (16, 128, 8, 2),
        },
        descriptors=True,
    )
)
# Inputs that no descriptor can address (expanded, misaligned) or that are not worth one. Measured
# likewise, with misaligned inputs, except "decode", which was chosen by compiling without a GPU.
# Nothing spills with Triton 3.6 and 3.9.
POINTERS = rows(
    {
        ("fwd", 2, (16, 32, 64)): (64, 64, 4, 2),
        ("fwd", 2, 128): (128, 64, 8, 2),
        ("fwd", 2, 256): (64, 32, 4, 2),
        ("decode", 2, (16, 32, 64, 128)): (16, 64, 4, 3),
        ("decode", 2, 256): (16, 32, 4, 3),
        ("bwd_dkdv", 2, (16, 32)): (64, 64, 4, 2),
        ("bwd_dkdv", 2, 64): ((64, 64, 4, 1), (32, 64, 4, 2)),
        ("bwd_dkdv", 2, 128): ((32, 128, 8, 1), (16, 128, 8, 1)),
        ("bwd_dkdv", 2, 256): ((64, 32, 8, 1), (32, 32, 8, 2)),
        ("bwd_dq", 2, (16, 32, 64)): (64, 64, 4, 2),
        ("bwd_dq", 2, 128): (128, 128, 8, 2),
        ("bwd_dq", 2, 256): (128, 32, 8, 2),
    }
)
# fp32 as six bf16 products, measured as above. Loaded by pointers, fp32 is decomposed in the
# kernel. Triton 3.6 miscompiles some such tiles, such as 64 x 16 with 8 warps: the search met
# illegal accesses, and left them out.
FP32 = rows(
    {
        ("fwd", 4, 16): (128, 32, 4, 1),
        ("fwd", 4, 32): ((128, 32, 4, 1), (64, 64, 4, 1)),
        ("fwd", 4, (64, 128)): ((128, 32, 8, 1), (64, 32, 4, 1)),
        ("fwd", 4, 256): (128, 16, 8, 1),
        ("decode", 4, 16): (16, 32, 4, 2),
        ("decode", 4, 32): (16, 64, 4, 2),
        ("decode", 4, (64, 128)): (16, 32, 4, 2),
        ("decode", 4, 256): (16, 16, 8, 2),
        ("bwd_dkdv", 4, 16): (32, 64, 4, 1),
        ("bwd_dkdv", 4, 32): ((32, 128, 4, 1), (64, 128, 8, 1)),
        ("bwd_dkdv", 4, 64): ((32, 64, 4, 1), (32, 128, 8, 1)),
        ("bwd_dkdv", 4, 128): (16, 64, 4, 1),
        ("bwd_dkdv", 4, 256): (16, 16, 4, 1),
        ("bwd_dq", 4, 16): (64, 32, 4, 1),
        ("bwd_dq", 4, 32): (128, 32, 8, 1),
        ("bwd_dq", 4, 64): (128, 64, 8, 1),
        ("bwd_dq", 4, 128): (128, 32, 8, 1),
        ("bwd_dq", 4, 256): (16, 16, 4, 1),
    }
)
# The same, decomposed beforehand. N = 4096, 2026-11-22.
DECOMPOSED = rows(
    {
        ("fwd", 4, (16, 32)): (64, 64, 4, 2),
        ("fwd", 4, 64): (128, 64, 8, 3),
        ("fwd", 4, 128): (64, 64, 4, 1),
        ("bwd_dkdv", 4, 16): ((64, 64, 4, 2), (32, 64, 4, 2)),
        ("bwd_dkdv", 4, 32): (64, 64, 4, 2),
        ("bwd_dkdv", 4, 64): (64, 128, 8, 2),
        ("bwd_dkdv", 4, 128): ((32, 64, 4, 2), (64, 64, 4, 1)),
        ("bwd_dq", 4, (16, 32)): (64, 64, 4, 2),
        ("bwd_dq", 4, 64): (128, 64, 8, 2),
        ("bwd_dq", 4, 128): (64, 32, 4, 2),
    },
    descriptors=True,
    decomposed=True,
)
# Later compilers than the measured one spill with some of those. These were not measured there;
# with 3.6 the first reaches 483 TFLOP/s instead of 569, the second 153 instead of 247.
LATER = rows(
    {
        ("fwd", 2, 32): ((64, 128, 4, 3), (64, 64, 4, 3)),
        ("bwd_dkdv", 2, 32): (64, 64, 4, 3),
        ("bwd_dkdv", 2, 128): ((64, 64, 4, 2), (32, 64, 4, 4)),
        ("bwd_dkdv", 2, 256): (16, 64, 8, 3),
        ("bwd_dkdv", 2, 64): ((64, 64, 4, 3), (64, 64, 4, 2)),
    },
    descriptors=True,
) | rows(
    {
        ("bwd_dkdv", 4, 32): (32, 64, 4, 2),
        ("bwd_dkdv", 4, 64): (16, 64, 4, 1),
        ("bwd_dq", 4, 64): (128, 32, 8, 1),
    }
)
LATER["bwd_dkdv", 2, 256, True, True] = Tile(16, 32, 8, 1)
# Fused passes: one head of 512 to 32 768 keys, and batches as small; "bwd_one_launch": one head of
# 64 to 256, and batches as small. Measured likewise, 2026-11-22, except "bwd_fused" at D = 128 by
# pointers, which was chosen by compiling; "bwd_one_launch" must not spill. Narrow heads are loaded
# by pointers, which is up to a fifth faster. fp32 that is not decomposed has no such tiles: those
# tried spill.
FUSED = (
    rows(
        {
            ("bwd_fused", 2, (16, 32)): (64, 64, 4, 3),
            ("bwd_fused", 2, (64, 128)): (32, 64, 4, 2),
            ("bwd_one_launch", 2, (16, 32, 64)): (64, 64, 4, 1),
            ("bwd_one_launch", 2, 128): (32, 32, 4, 1),
        }
    )
    | rows({("bwd_fused", 2, (64, 128)): (64, 64, 4, 2)}, descriptors=True)
    | rows({("bwd_fused", 4, (16, 32, 64)): (64, 64, 4, 2)}, descriptors=True, decomposed=True)
)
# One TF32 product, which needs no registers for terms, so larger tiles fit. N = 4096, 2026-11-22.
# Kernels without a row use the tile of six products.
TF32: dict[tuple[Kernel, int], Tile] = {
    ("fwd", 16): Tile(64, 64, 4, 3, descriptors=True),
    ("fwd", 32): Tile(128, 32, 4, 3, descriptors=True),
    ("bwd_dkdv", 128): Tile(32, 128, 8, 2, descriptors=True),
}
# Instead, three products of two bf16 terms, decomposed beforehand: as fast at D = 64, faster at
# 128, where the tiles tried for dK and dV spill (Hopper's own do not). Fused passes at D = 16 are
# up to a third slower for one head.
TF32_DECOMPOSED: dict[tuple[Kernel, int], Tile] = {
    ("fwd", 64): Tile(128, 64, 8, 2, descriptors=True, decomposed=True),
    ("fwd", 128): Tile(128, 64, 8, 2, descriptors=True, decomposed=True),
    ("bwd_dkdv", 64): Tile(64, 64, 4, 2, descriptors=True, decomposed=True),
    ("bwd_dq", 64): Tile(64, 64, 4, 2, descriptors=True, decomposed=True),
    ("bwd_dq", 128): Tile(128, 32, 8, 3, descriptors=True, decomposed=True),
    ("bwd_fused", 32): Tile(64, 64, 4, 2, descriptors=True, decomposed=True),
    ("bwd_fused", 64): Tile(64, 64, 4, 2, descriptors=True, decomposed=True),
}
# Short windows. A program has few steps, so other programs hide its latency: with fewer stages,
# more programs fit an SM. Measured: H200s, windows of 128 to 1024 keys, 2026-11-28.
WINDOW: dict[tuple[Kernel, int], Tile] = {
    ("fwd", 64): Tile(64, 64, 4, 1, descriptors=True),
    ("fwd", 128): Tile(64, 64, 4, 1, descriptors=True),
    ("bwd_dq", 64): Tile(64, 64, 4, 2, descriptors=True),
}
TILES = DESCRIPTORS | NARROW | POINTERS | SMALL_GRID | FP32 | DECOMPOSED | FUSED
ROWS = Rows(TILES, (TF32, TF32_DECOMPOSED), WINDOW)
ROWS_LATER = Rows(TILES | LATER, ROWS.tf32, WINDOW)
