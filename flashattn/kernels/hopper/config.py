"""Constants that the Hopper kernels are compiled with, for each kernel from its tile.

Each constant is a constexpr of its own, as in ``portable.config``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from triton.experimental.gluon import language as gl

from flashattn.kernels import constants
from flashattn.plan.tile import (
    WARPGROUP_Q,
    HopperBackwardTile,
    HopperD256Tile,
    HopperTile,
    block_d,
    head_dim_split,
    value_split,
)

# Sizes that change from call to call: one compiled kernel serves them all.
SIZES = [*constants.SIZES, "tiles", "blocks", "split_heads", "section_heads", "gqa_splits"]
SIZES += ["wave_size", "stagger", "ordered", "num_accums"]
SIZES += ["slopes_stride", "query_offset", "sink_stride"]
Config = TypeVar("Config")


@dataclass(frozen=True, eq=False)
class ForwardConfig:
    """The constants of flashattn_hopper_fwd.

    Args:
        block_q: queries of a CTA, 64 for each of its consumer warpgroups.
        block_kv: keys of a tile.
        d_lo: columns of queries and keys that are multiplied first, see ``mma``.
        d_hi: columns of queries and keys that are multiplied next.
        v_lo: columns of values that are multiplied first.
        v_hi: columns of values that are multiplied next.
        groups: number of consumer warpgroups.
        stages: tiles of keys, and of values, in flight.
        registers: registers of a consumer thread.
        own_so: whether o is stored through shared memory of its own; otherwise through that of q.
        before: whether no query sees a key behind its own position, see ``score``.
        vector: keys of a bias that are loaded together, see ``plan.bias.vector``.
    """

    block_q: gl.constexpr
    block_kv: gl.constexpr
    d_lo: gl.constexpr
    d_hi: gl.constexpr
    v_lo: gl.constexpr
    v_hi: gl.constexpr
    groups: gl.constexpr
    stages: gl.constexpr
    registers: gl.constexpr
    own_so: gl.constexpr
    before: gl.constexpr
    vector: gl.constexpr


@dataclass(frozen=True, eq=False)
class BackwardConfig:
    """The constants of flashattn_hopper_bwd.

    Args:
        block_q: queries of a tile.
        d_lo: columns that are multiplied first, see ``mma``.
        d_hi: columns that are multiplied next.
        stages: tiles of queries, and of dO, in flight.
        lines: lines of a dq tile in the accumulator.
        vector: see ``ForwardConfig``.
    """

    block_q: gl.constexpr
    d_lo: gl.constexpr
    d_hi: gl.constexpr
    stages: gl.constexpr
    lines: gl.constexpr
    vector: gl.constexpr


@dataclass(frozen=True, eq=False)
class D256Config:
    """The constants of both kernels for D from 129 to 256; see ``ForwardConfig``."""

    d_lo: gl.constexpr
    d_hi: gl.constexpr
    v_lo: gl.constexpr
    v_hi: gl.constexpr
    stages: gl.constexpr


@cache
def config_of(kind: type[Config], **values: Any) -> Config:
    """Return the only config with these constants, because Triton hashes it at every look-up."""
    return kind(**{name: gl.constexpr(value) for name, value in values.items()})


def columns(dims: tuple[int, int]) -> dict[str, int]:
    """Return the columns that are multiplied, by their names in a config; dims are (D, Dv)."""
    (d_lo, d_hi), (v_lo, v_hi) = head_dim_split(dims[0]), value_split(*dims)
    return {"d_lo": d_lo, "d_hi": d_hi, "v_lo": v_lo, "v_hi": v_hi}


@cache
def forward_config(
    tile: HopperTile, dims: tuple[int, int], *, before: bool = False, vector: int = 1
) -> ForwardConfig:
    """Return the constants of flashattn_hopper_fwd; ``before`` is ``Score``'s."""
    return config_of(
        ForwardConfig,
        block_q=tile.block_q,
        block_kv=tile.block_kv,
        **columns(dims),
        groups=tile.consumers,
        stages=tile.stages,
        registers=tile.registers,
        own_so=tile.own_o,
        before=before,
        vector=vector,
    )


@cache
def backward_config(tile: HopperBackwardTile, head_dim: int, vector: int = 1) -> BackwardConfig:
    """Return the constants of flashattn_hopper_bwd."""
    (d_lo, d_hi), block_q = head_dim_split(head_dim), tile.block_q(head_dim)
    return config_of(
        BackwardConfig,
        block_q=block_q,
        d_lo=d_lo,
        d_hi=d_hi,
        stages=tile.stages,
        lines=block_q * (d_lo + d_hi) // WARPGROUP_Q,
        vector=vector,
    )


def postprocess_constants(head_dim: int) -> dict[str, Any]:
    """Return the constexpr arguments of flashattn_hopper_bwd_postprocess."""
    return {
        "head_dim": head_dim,
        "BLOCK_Q": HopperBackwardTile.block_q(head_dim),
        "COLUMNS": sum(head_dim_split(head_dim)),
    }


def d256_config(tile: HopperD256Tile, dims: tuple[int, int]) -> D256Config:
    """Return the constants of both kernels for D from 129 to 256."""
    return config_of(D256Config, **columns(dims), stages=tile.stages)


def forward_fp32_constants(head_dim: int, *, terms: int) -> dict[str, Any]:
    """Return the constexpr arguments of flashattn_hopper_fwd_fp32."""
    return {"BLOCK_D": block_d(head_dim), "TERMS": terms}
