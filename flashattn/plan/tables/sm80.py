"""Tiles of the portable kernels for compute capabilities 8 and 12."""

from __future__ import annotations

from flashattn.plan.rows import Rows, rows

# Not measured. They fit the 99 KiB of consumer cards, so they serve all of 8.x and 12.x. Wide fp32
# arrives as bf16 terms, because it would spill up to 500 bytes; for dK and dV of 256 columns there
# is no room.
DECOMPOSED = rows(
    {
        ("fwd", 4, 128): (32, 32, 8, 2),
        ("fwd", 4, 256): (16, 32, 8, 1),
        ("bwd_dkdv", 4, 128): (16, 32, 8, 1),
        ("bwd_dq", 4, 128): (32, 32, 8, 1),
        ("bwd_dq", 4, 256): (16, 16, 8, 1),
    },
    decomposed=True,
)
TILES = DECOMPOSED | rows(
    {
        ("fwd", 2, (16, 32, 64)): (128, 64, 8, 2),
        ("fwd", 2, 128): (64, 64, 8, 2),
        ("fwd", 2, 256): (64, 32, 8, 2),
        ("decode", 2, (16, 32, 64)): (16, 64, 4, 3),
        ("decode", 2, 128): (16, 32, 4, 3),
        ("decode", 2, 256): (16, 16, 4, 3),
        ("bwd_dkdv", 2, (16, 32)): (64, 64, 4, 2),
        ("bwd_dkdv", 2, (64, 128)): (32, 64, 8, 2),
        ("bwd_dkdv", 2, 256): (16, 32, 8, 1),
        ("bwd_dq", 2, 16): (64, 64, 4, 2),
        ("bwd_dq", 2, 32): (64, 32, 4, 2),
        ("bwd_dq", 2, 64): (64, 64, 4, 2),
        ("bwd_dq", 2, 128): (64, 64, 8, 2),
        ("bwd_dq", 2, 256): (32, 32, 8, 1),
        ("fwd", 4, (16, 32)): (64, 32, 4, 1),
        ("fwd", 4, 64): (32, 32, 4, 1),
        ("fwd", 4, 128): (32, 32, 8, 1),
        ("fwd", 4, 256): (16, 16, 8, 1),
        ("decode", 4, 16): (16, 32, 4, 2),
        ("decode", 4, 32): (16, 64, 4, 2),
        ("decode", 4, 64): (16, 32, 4, 2),
        ("decode", 4, 128): (16, 16, 4, 2),
        ("decode", 4, 256): (16, 16, 8, 1),
        ("bwd_dkdv", 4, 16): (16, 64, 8, 1),
        ("bwd_dkdv", 4, 32): (32, 16, 8, 1),
        ("bwd_dkdv", 4, 64): (32, 32, 8, 1),
        ("bwd_dkdv", 4, (128, 256)): (16, 16, 8, 1),
        ("bwd_dq", 4, 16): (64, 32, 4, 1),
        ("bwd_dq", 4, 32): (32, 16, 4, 1),
        ("bwd_dq", 4, 64): (32, 32, 8, 1),
        ("bwd_dq", 4, (128, 256)): (16, 16, 8, 1),
    }
)
ROWS = Rows(TILES)
