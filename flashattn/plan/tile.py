"""Tiles: block sizes and launch options of a kernel, checked."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

SMALLEST_BLOCK_D = 16  # columns that a tensor-core product needs
VECTOR = 8  # columns: a thread loads 16 bytes of half precision at once
WARPGROUP_Q = 64  # queries of a Hopper warpgroup
HALF = 2  # bytes of a half-precision element
NARROW_VALUES = 128  # columns computed for values that are narrower than keys


@cache
def block_d(head_dim: int) -> int:
    """Return the columns that a kernel computes: 1, or the next power of two from 16 on."""
    return 1 if head_dim == 1 else max(SMALLEST_BLOCK_D, 1 << (head_dim - 1).bit_length())


def padding(head_dim: int, strides: Iterable[Iterable[int]]) -> int:
    """Return how many columns a thread can load at once, or 0 if a kernel pads no columns.

    It is the largest power of two, up to 8, that divides head_dim and all strides. Triton checks
    only whether an argument is a multiple of 16, so it would load 40 columns one by one.

    Args:
        head_dim: D.
        strides: of all tensors that are loaded or stored by pointers, except the last dimension's.
    """
    if head_dim == block_d(head_dim):
        return 0
    return math.gcd(VECTOR, head_dim, *itertools.chain(*strides))


@cache
def head_dim_split(head_dim: int) -> tuple[int, int]:
    """Return the columns that Hopper's kernels multiply: two powers of two, or one and 0.

    So 65 to 96 columns take 64 + 32 instead of 128, and 129 to 192 take 128 + 64 instead of 256.
    """
    d = block_d(head_dim)
    return (d // 2, d // 4) if d > WARPGROUP_Q and head_dim <= d // 4 * 3 else (d, 0)


def tile_pieces(head_dim: int) -> tuple[int, int]:
    """Return the columns of the two pieces in which Hopper's kernels hold a tile, or all and 0.

    For D from 65 to 96, one piece of 128 columns is faster (docs/tuning-log.md).
    """
    return head_dim_split(head_dim) if head_dim > 2 * WARPGROUP_Q else (block_d(head_dim), 0)


def value_split(head_dim: int, value_dim: int) -> tuple[int, int]:
    """Return the columns of values that Hopper's kernels multiply: 128 if they are narrower."""
    return head_dim_split(head_dim) if value_dim == head_dim else (NARROW_VALUES, 0)


def value_pieces(head_dim: int, value_dim: int) -> tuple[int, int]:
    """Return the columns of the pieces in which Hopper's kernels hold a tile of values."""
    return tile_pieces(head_dim) if value_dim == head_dim else (NARROW_VALUES, 0)


@dataclass(frozen=True)
class Tile:
    """Block sizes and launch options of a portable kernel.

    Args:
        block_q: queries per tile, a power of two from 16 to 256.
        block_kv: keys per tile, likewise.
        warps: per program: 1, 2, 4, 8 or 16.
        stages: of the software pipeline.
        descriptors: whether tiles are loaded by tensor descriptors (TMA) or by pointers.
        registers: limit per thread, so that more programs fit an SM; 0 leaves it to the compiler.
        decomposed: whether fp32 arrives as bf16 terms.

    Raises:
        ValueError: a number is out of range.
    """

    block_q: int
    block_kv: int
    warps: int
    stages: int
    descriptors: bool = False
    registers: int = 0
    decomposed: bool = False

    def __post_init__(self) -> None:
        """Check."""
        for name, least, most in (("block_q", 16, 256), ("block_kv", 16, 256), ("warps", 1, 16)):
            value = getattr(self, name)
            if not least <= value <= most or value & (value - 1):
                msg = f"{name}: wanted a power of two from {least} to {most}, got {value}"
                raise ValueError(msg)
        if not 1 <= self.stages <= 8:  # noqa: PLR2004 - more would not fit any shared memory
            raise ValueError(f"stages: wanted 1 to 8, got {self.stages}")
        if self.registers and not 24 <= self.registers <= 255:  # noqa: PLR2004 - the hardware's
            raise ValueError(f"registers: wanted 0, or 24 to 255, got {self.registers}")

    def __str__(self) -> str:
        """Return block_q x block_kv, warps, stages, and the limit on registers, if any."""
        limit = f" r{self.registers}" * bool(self.registers)
        return f"{self.block_q}x{self.block_kv} w{self.warps} s{self.stages}{limit}"

    def compiler_options(self) -> dict[str, int]:
        """Return the compiler's keyword arguments."""
        options = {"num_warps": self.warps, "num_stages": self.stages}
        return options | {"maxnreg": self.registers} if self.registers else options


def _at_least(tile: object, least: int, *names: str) -> None:
    for name in names:
        if getattr(tile, name) < least:
            raise ValueError(f"{name}: wanted {least} at least, got {getattr(tile, name)}")


@dataclass(frozen=True)
class HopperTile:
    """Tile sizes of Hopper's forward.

    Args:
        block_kv: keys per tile, a power of two from 64 on.
        stages: tiles of keys, and as many of values, in flight.
        consumers: warpgroups of 64 queries each: 2 or 3.
        registers: registers of a consumer thread.
        own_o: whether o has its own shared memory, so that the next queries load early; otherwise
            it reuses that of q.

    Raises:
        ValueError: a number is out of range.
    """

    block_kv: int = 128
    stages: int = 2
    consumers: int = 2
    registers: int = 240
    own_o: bool = True

    def __post_init__(self) -> None:
        """Check."""
        if self.block_kv < WARPGROUP_Q or self.block_kv & (self.block_kv - 1):
            msg = f"block_kv: wanted a power of two from {WARPGROUP_Q} on, got {self.block_kv}"
            raise ValueError(msg)
        _at_least(self, 2, "stages")
        if self.consumers not in (2, 3):
            raise ValueError(f"consumers: wanted 2 or 3, got {self.consumers}")
        if self.registers % 8 or not 24 <= self.registers <= 240:  # noqa: PLR2004
            msg = f"registers: wanted a multiple of 8 from 24 to 240, got {self.registers}"
            raise ValueError(msg)

    @property
    def block_q(self) -> int:
        """Return the queries of a program."""
        return self.consumers * WARPGROUP_Q

    def __str__(self) -> str:
        """Return block_q x block_kv and the stages."""
        return f"{self.block_q}x{self.block_kv} s{self.stages}"

    def shared(self, head_dim: int, value_dim: int | None = None) -> int:
        """Return the bytes of a program's tiles in shared memory: queries, o, keys and values."""
        columns = sum(tile_pieces(head_dim))
        of_values = sum(value_pieces(head_dim, value_dim or head_dim))
        queries = self.block_q * (2 * columns + of_values if self.own_o else columns)
        return HALF * (queries + self.stages * self.block_kv * (columns + of_values))


@dataclass(frozen=True)
class HopperBackwardTile:
    """Schedule of Hopper's one-pass backward, up to D = 128.

    Args:
        stages: tiles of queries, and as many of dO, in flight.
        section: under a mask, about how many heads have their key tiles started together, those
            that most queries see first. Where programs wait for a semaphore, a large section runs
            few programs of each head at once.
        persistent: whether there is one program per SM instead of one per tile of keys.
        stagger: query tiles between the starting points of a head's programs, if they are
            persistent and there is no mask.

    Raises:
        ValueError: a number is out of range.
    """

    BLOCK_KV = 2 * WARPGROUP_Q  # keys of a program

    stages: int = 2
    section: int = 1
    persistent: bool = False
    stagger: int = 4

    def __post_init__(self) -> None:
        """Check."""
        _at_least(self, 2, "stages")
        _at_least(self, 1, "section", "stagger")

    def __str__(self) -> str:
        """Return the stages."""
        return f"s{self.stages}"

    @staticmethod
    def block_q(head_dim: int) -> int:
        """Return the queries of a tile: its dq has two halves of at most 64 x 64 elements."""
        return 2 * WARPGROUP_Q * WARPGROUP_Q // block_d(head_dim)

    def shared(self, head_dim: int) -> int:
        """Return the bytes of a program's tiles in shared memory: k, v, q, dO, dS and dq."""
        d, block_q = block_d(head_dim), self.block_q(head_dim)
        rows = 4 * block_q * self.stages * (d + 16)  # with bf16 terms of two numbers per row
        ones = 32 * WARPGROUP_Q
        return 4 * d * self.BLOCK_KV + rows + ones + 8 * WARPGROUP_Q * block_q + 8 * WARPGROUP_Q**2


@dataclass(frozen=True)
class HopperD256Tile:
    """Schedule of Hopper's two-pass backward, for D from 129 to 256.

    Args:
        stages: tiles in flight: of queries and of dO, or of keys and one less of values.
        section: heads whose longest tiles are started together under a mask.

    Raises:
        ValueError: a number is out of range.
    """

    BLOCK_KV, BLOCK_Q = WARPGROUP_Q, 2 * WARPGROUP_Q  # rows of a program: of dk and dv, of dq

    stages: int = 2
    section: int = 4

    def __post_init__(self) -> None:
        """Check."""
        _at_least(self, 2, "stages")
        _at_least(self, 1, "section")

    def __str__(self) -> str:
        """Return the stages."""
        return f"s{self.stages}"

    def shared(self, head_dim: int) -> int:
        """Return the most bytes that a program's tiles take in either kernel."""
        tile = HALF * WARPGROUP_Q * sum(tile_pieces(head_dim))
        stage = 2 * tile + 2 * WARPGROUP_Q * 4 + HALF * WARPGROUP_Q**2  # q, dO, rows; P
        # k, v and stages; or q and dO for both warpgroups, k, v.
        return max(2 * tile + self.stages * stage, (3 + 2 * self.stages) * tile)


@dataclass(frozen=True)
class HopperFp32Tile:
    """Tile sizes of Hopper's fp32 kernels, whose operands are bf16 terms.

    Args:
        own: rows of a program's own tile.
        other: rows of a tile that it walks over.
    """

    own: int
    other: int

    def __str__(self) -> str:
        """Return own x other."""
        return f"{self.own}x{self.other}"


HopperBackward = HopperBackwardTile | HopperD256Tile
