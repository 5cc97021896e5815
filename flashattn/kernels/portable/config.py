"""What portable kernels are compiled for, and how their tensors lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import triton.language as tl

from flashattn.plan.tile import Tile, block_d, padding


@dataclass(frozen=True, eq=False)
class Config:
    """The constants of one compiled kernel.

    Each is a constexpr by itself: Triton 3.6 takes an int that it reads from an argument for a
    number of Python. There is one object of the same constants, see ``of``: Triton hashes it at
    every look-up, and hashing each constant takes longer than all other arguments.
    """

    BLOCK_Q: tl.constexpr  # queries of a tile
    BLOCK_KV: tl.constexpr  # keys of a tile
    BLOCK_D: tl.constexpr  # columns, a power of two
    PADDED: tl.constexpr  # see ``memory.tile_mask``
    DESCRIPTORS: tl.constexpr  # whether tiles are loaded by tensor descriptors
    PRECISION: tl.constexpr  # of fp32 products, as ``precision.input_precision`` returns it
    TERMS: tl.constexpr  # bf16 terms that the operands were decomposed into; 0: they were not
    VECTOR: tl.constexpr  # keys of a bias that come together, see ``plan.bias.vector``

    @classmethod
    def of(
        cls,
        tile: Tile,
        head_dim: int,
        strides: Sequence[Sequence[int]],
        precision: str,
        terms: int,
        vector: int = 1,
    ) -> Config:
        """Return the constants of a tile.

        Args:
            tile: of the launch.
            head_dim: D.
            strides: of batches, heads and rows of all tensors; columns are dense.
            precision: as ``precision.input_precision`` returns it.
            terms: bf16 terms that the operands were decomposed into; 0: they were not.
            vector: keys of a bias that come together.
        """
        sizes = tile.block_q, tile.block_kv, block_d(head_dim), padding(head_dim, strides)
        return _config(*sizes, tile.descriptors, precision, terms, vector)


@cache
def _config(*values: Any) -> Config:
    """Return the only constants with these values."""
    return Config(*map(tl.constexpr, values))


class ForwardLayout(NamedTuple):
    """The strides of each tensor, and the columns of all.

    ``bounds`` are the distances of two batches in those of the keys and of the queries, if any.
    """

    q: Any
    k: Any
    v: Any
    o: Any
    head_dim: Any
    bounds: Any


class BackwardLayout(NamedTuple):
    """The strides of each tensor, None of those that a kernel does not take; columns of all.

    ``stats`` is the distance of two heads in lse_log2 and delta; ``bounds`` as forward.
    """

    q: Any
    k: Any
    v: Any
    grad_o: Any
    dk: Any
    dv: Any
    dq: Any
    o: Any
    head_dim: Any
    stats: Any
    bounds: Any
