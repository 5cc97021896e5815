"""One tile for all interpreted kernels, and thresholds that small problems reach."""

from __future__ import annotations

import itertools
from typing import get_args

from flashattn.plan.rows import FP32, HEAD_DIMS, Kernel, Limits, Rows, Table
from flashattn.plan.tile import Tile

# Small, so that small problems have several tiles; oblong, so that swapped indices show.
INTERPRETER: Table = {
    (kernel, size, d, causal, large): Tile(
        32, 64, 4, 1, large, decomposed=large and size == FP32 and kernel != "bwd_one_launch"
    )
    for kernel, size, d, causal, large in itertools.product(
        get_args(Kernel), (2, 4), HEAD_DIMS, (False, True), (False, True)
    )
}
LIMITS = Limits(
    pointers=0,
    decompose_forward=1 << 13,
    decompose_backward=1 << 13,
    one_launch=1 << 13,
    short_kv=100,
    small_grid_split=((4, 128),),
    small_grid_split_causal=((4, 128),),
    split={
        "fwd": ((4, 2),),
        "decode": ((2, 2),),
        "bwd_fused": ((16, 2),),  # both passes together have twice the programs
        "bwd_dkdv": ((4, 2),),
        "bwd_dq": ((4, 2),),
    },
)
ROWS = Rows(
    INTERPRETER,
    (
        {},
        {
            (kernel, d): tile
            for (kernel, _, d, _, _), tile in INTERPRETER.items()
            if tile.decomposed
        },
    ),
    limits=LIMITS,
)
