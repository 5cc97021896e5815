"""Rows: the types that make up a table of tiles and thresholds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Literal

from flashattn.plan.tile import Tile

# fwd_small_grid: for few programs; fwd_short_kv: for fewer still, and too few keys to split;
# decode: for few queries. bwd_fused: both passes side by side in one launch, for small grids;
# bwd_one_launch: the preprocess, too, in that launch.
Kernel = Literal[
    "fwd",
    "fwd_small_grid",
    "fwd_short_kv",
    "decode",
    "bwd_fused",
    "bwd_one_launch",
    "bwd_dkdv",
    "bwd_dq",
]
FUSED: frozenset[Kernel] = frozenset({"bwd_fused", "bwd_one_launch"})
OPTIONAL: frozenset[Kernel] = FUSED | {"fwd_small_grid", "fwd_short_kv"}  # a table may lack them
FP32 = 4  # bytes
HEAD_DIMS = (16, 32, 64, 128, 256)  # values of BLOCK_D

# What selects a tile: kernel, bytes per element, BLOCK_D, causal, and whether inputs are
# TMA-compatible, or fp32 and worth decomposing beforehand.
Key = tuple[Kernel, int, int, bool, bool]
Table = dict[Key, Tile]
# block_q, block_kv, warps, stages; and registers, where they are limited.
TileNumbers = tuple[int, int, int, int] | tuple[int, int, int, int, int]
# Pairs (most programs per SM after splitting, fewest tiles or keys of a split); the pair with the
# most splits counts.
SplitTargets = tuple[tuple[int, int], ...]


def rows(
    tiles: Mapping[
        tuple[Kernel, int, int | tuple[int, ...]], TileNumbers | tuple[TileNumbers, TileNumbers]
    ],
    *,
    descriptors: bool = False,
    decomposed: bool = False,
    aligned: bool = False,
) -> Table:
    """Expand rows (kernel, bytes, BLOCK_D) of one tile, or of one unmasked and one causal tile.

    Several values of BLOCK_D may share a row.

    Args:
        tiles: the rows.
        descriptors: whether they load by descriptors.
        decomposed: whether they are for fp32 that arrives as bf16 terms.
        aligned: whether they are for TMA-compatible inputs, however they load.
    """
    table: Table = {}
    for (kernel, size, block_d), numbers in tiles.items():
        full, causal = numbers if isinstance(numbers[0], tuple) else (numbers, numbers)
        dims = block_d if isinstance(block_d, tuple) else (block_d,)
        for d, (mask, tile) in product(dims, ((False, full), (True, causal))):
            limit = tile[4] if len(tile) == 5 else 0  # noqa: PLR2004
            key = kernel, size, d, mask, descriptors or decomposed or aligned
            table[key] = Tile(*tile[:4], descriptors, limit, decomposed)
    return table


@dataclass(frozen=True)
class Limits:
    """Thresholds between ways to launch the portable kernels, as measured on an H200.

    ``decode_shared`` was measured on an H100: about half of its shared memory.

    Args:
        least_q: queries that a head has at least when scores are counted.
        pointers: scores up to which tiles are loaded by pointers: the host takes 3 us to make a
            descriptor, longer than such problems keep the GPU busy.
        decompose_forward: scores above which the forward decomposes fp32 beforehand; fewer do not
            pay for one more launch.
        decompose_backward: likewise in the backward, where both passes then share a launch.
        one_launch: scores up to which the backward is one launch.
        decode_q: queries up to which the decode tiles are used.
        decode_shared: bytes of tiles in flight up to which two decode programs fit an SM. Keys are
            then split for two programs per SM, with at least two tiles in a split.
        short_kv: keys up to which they are not split, if all programs run at once.
        window: keys up to which a window is short, and its keys are not split.
        small_grid: forward programs per SM up to which a grid is small.
        small_grid_causal: likewise under a mask, for up to ``small_grid_head_dim`` columns.
        small_grid_head_dim: see ``small_grid_causal``.
        small_grid_split: how a small grid splits keys, in keys.
        small_grid_split_causal: likewise under a mask, if several programs fit an SM.
        one_per_sm: columns from which on only one program fits an SM.
        fused: programs of both backward passes per SM up to which they share a launch.
        fused_decomposed: likewise for decomposed fp32, from ``decomposed_head_dim`` columns on.
        decomposed_head_dim: see ``fused_decomposed``.
        split: how other kernels split the rows that they walk over, in tiles.
    """

    least_q: int = 64
    pointers: int = 1 << 16
    decompose_forward: int = 1 << 20
    decompose_backward: int = 1 << 15
    one_launch: int = 1 << 16
    decode_q: int = 16
    decode_shared: int = 112 << 10
    short_kv: int = 768
    window: int = 1024
    small_grid: int = 2
    small_grid_causal: int = 4
    small_grid_head_dim: int = 32
    small_grid_split: SplitTargets = ((1, 256), (2, 1024))
    small_grid_split_causal: SplitTargets = ((1, 256), (2, 1024), (4, 2048))
    one_per_sm: int = 256
    fused: int = 8
    fused_decomposed: int = 2
    decomposed_head_dim: int = 64
    split: Mapping[str, SplitTargets] = field(
        default_factory=lambda: {
            "fwd": ((4, 4),),
            "bwd_fused": ((2, 2), (4, 16)),
            "bwd_dkdv": ((4, 2),),
            "bwd_dq": ((4, 2),),
        }
    )


@dataclass(frozen=True)
class Rows:
    """The table of a GPU.

    Args:
        tiles: of the portable kernels.
        tf32: tiles where TF32 is allowed, by (kernel, BLOCK_D): for one TF32 product, and for three
            products of two bf16 terms.
        window: tiles for short windows, by (kernel, BLOCK_D); they replace tiles that load half
            precision by descriptors.
        limits: thresholds.
    """

    tiles: Table
    tf32: tuple[Mapping[tuple[Kernel, int], Tile], Mapping[tuple[Kernel, int], Tile]] = ({}, {})
    window: Mapping[tuple[Kernel, int], Tile] = field(default_factory=dict)
    limits: Limits = Limits()
