"""Compile-time constants of the portable kernels, and the strides of their tensors."""

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

    Each field is a constexpr, as Triton 3.6 treats an int that it reads from an argument as a
    Python number. Equal constants are one object, see ``of``: Triton hashes it at every look-up,
    and hashing each constant would take longer than all other arguments.
    """

    BLOCK_Q: tl.constexpr  # queries of a tile
    BLOCK_KV: tl.constexpr  # keys of a tile
    BLOCK_D: tl.constexpr  # columns, a power of two
    PADDED: tl.constexpr  # see ``memory.tile_mask``
    DESCRIPTORS: tl.constexpr  # whether tiles are loaded by tensor descriptors
    PRECISION: tl.constexpr  # of fp32 products, as ``precision.input_precision`` returns it
    TERMS: tl.constexpr  # bf16 terms into which operands were decomposed; 0 for none
    VECTOR: tl.constexpr  # keys of a bias that are loaded at once, see ``plan.bias.vector``

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
            terms: bf16 terms into which operands were decomposed; 0 for none.
            vector: keys of a bias that are loaded at once.
        """
        sizes = tile.block_q, tile.block_kv, block_d(head_dim), padding(head_dim, strides)
        return _config(*sizes, tile.descriptors, precision, terms, vector)


@cache
def _config(*values: Any) -> Config:
    """Return the one object with these constants."""
    return Config(*map(tl.constexpr, values))


class ForwardLayout(NamedTuple):
    """The strides of each tensor, and the number of columns of all.

    ``bounds`` are the batch strides of the bounds of the keys and of the queries, or None.
    """

    q: Any
    k: Any
    v: Any
    o: Any
    head_dim: Any
    bounds: Any


class BackwardLayout(NamedTuple):
    """The strides of each tensor, None if a kernel does not take it; and the columns of all.

    ``stats`` is the head stride of lse_log2 and delta; ``bounds`` is as in ``ForwardLayout``.
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
