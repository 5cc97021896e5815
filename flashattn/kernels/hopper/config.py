"""What the Hopper kernels are compiled for: one object of constants for each kernel.

Each constant is a constexpr by itself, as in ``portable.config``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from triton.experimental.gluon import language as gl

from flashattn.kernels import constants

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
        d_hi: columns that are multiplied next.
        v_lo: those of values, as the next.
        v_hi: likewise.
        groups: consumer warpgroups.
        stages: tiles of keys, and of values, in flight.
        registers: of a consumer's thread.
        own_so: whether o leaves through shared memory of its own; else through that of q.
        before: whether no query sees a key behind the one that it stands at, see ``score``.
        vector: keys of a bias that come together, see ``plan.bias.vector``.
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
        lines: of a tile of dq in the accumulator.
    """

    block_q: gl.constexpr
    d_lo: gl.constexpr
    d_hi: gl.constexpr
    stages: gl.constexpr
    lines: gl.constexpr


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
    """Return the only config with these constants: Triton hashes it at every look-up."""
    return kind(**{name: gl.constexpr(value) for name, value in values.items()})
