"""Tiles of the portable kernels for compute capability 10."""

from __future__ import annotations

from flashattn.plan.rows import Rows, rows
from flashattn.plan.tables.sm80 import TILES as SM_80

# Not measured. They do without the tensor memory of this architecture's own matrix instructions.
TILES = SM_80 | rows(
    {
        ("fwd", 2, 64): (64, 64, 4, 2),
        ("fwd", 2, 256): (64, 32, 4, 2),
        ("fwd", 4, (16, 32)): (64, 32, 8, 1),
        ("fwd", 4, 64): (32, 32, 8, 1),
        ("bwd_dkdv", 4, 32): (32, 64, 8, 1),
        ("bwd_dq", 4, (32, 64)): (64, 32, 8, 1),
        ("bwd_dkdv", 2, (32, 64)): (64, 64, 8, 2),
        ("bwd_dkdv", 2, 128): (32, 64, 8, 1),
        ("bwd_dq", 2, 32): (64, 64, 8, 2),
        ("bwd_dq", 2, 128): (64, 64, 4, 2),
    }
)
# With 64 x 32 in place of the second tile, Triton 3.6 compiles an empty kernel.
TILES |= rows(
    {
        ("bwd_dkdv", 4, 128): (32, 32, 8, 1),
        ("bwd_dq", 4, 128): (32, 32, 4, 1),
        ("bwd_dkdv", 4, 256): (16, 16, 8, 1),
    },
    decomposed=True,
)
ROWS = Rows(TILES)
