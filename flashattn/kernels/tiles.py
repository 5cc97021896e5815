"""Tile: how much of a problem one program takes; and the table that says which, per GPU.

A first call never searches. ``benchmarks/tune.py`` measures candidates on a GPU and prints the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

Kernel = Literal["fwd", "bwd_dkdv", "bwd_dq"]
SMALLEST_BLOCK_D = 16  # of a tensor-core product
LARGEST_HEAD_DIM = 256


def block_d(head_dim: int) -> int:
    """Return the head dimension a kernel computes in: the next power of two, 16 at least."""
    return max(SMALLEST_BLOCK_D, 1 << (head_dim - 1).bit_length())


@dataclass(frozen=True)
class Tile:
    """Block sizes and launch options of one kernel.

    Args:
        block_q: queries per tile, a power of two from 16 on.
        block_kv: keys per tile, likewise.
        warps: per program: 1, 2, 4, 8 or 16.
        stages: of the software pipeline that loads tiles ahead.
        descriptors: whether tiles are loaded by tensor descriptors (TMA) or by pointers.

    Raises:
        ValueError: a number is not one of those.
    """

    block_q: int
    block_kv: int
    warps: int
    stages: int
    descriptors: bool = False

    def __post_init__(self) -> None:
        """Check."""
        for name, least, most in (("block_q", 16, 256), ("block_kv", 16, 256), ("warps", 1, 16)):
            value = getattr(self, name)
            if not least <= value <= most or value & (value - 1):
                msg = f"{name}: wanted a power of two from {least} to {most}, got {value}"
                raise ValueError(msg)
        if not 1 <= self.stages <= 8:  # noqa: PLR2004 - more would not fit any shared memory
            msg = f"stages: wanted 1 to 8, got {self.stages}"
            raise ValueError(msg)

    def block_d(self, head_dim: int) -> int:
        """Return the head dimension the kernel computes in."""
        return block_d(head_dim)

    def options(self, head_dim: int) -> dict[str, Any]:
        """Return the keyword arguments of a launch."""
        return {
            "BLOCK_Q": self.block_q,
            "BLOCK_KV": self.block_kv,
            "BLOCK_D": block_d(head_dim),
            "DESCRIPTORS": self.descriptors,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


# (kernel, bytes per element, BLOCK_D, descriptors): tile. TODO replaced below
Table = dict[tuple[Kernel, int, int, bool], Tile]


def _interpreted() -> Table:
    """Small tiles, so that small problems have several; speed does not matter there."""
    return {
        (kernel, size, d, descriptors): Tile(32, 64, 4, 1, descriptors)
        for kernel in ("fwd", "bwd_dkdv", "bwd_dq")
        for size in (2, 4)
        for d in (16, 32, 64, 128, 256)
        for descriptors in (False, True)
    }


TABLES = {"interpreter": _interpreted(), "sm_90": {
 (k, size, d, desc): t for desc in (False, True) for size in (2, 4) for d in (16, 32, 64, 128, 256) for k, t in (
   ("fwd", Tile(64, 32 if size == 4 or d == 256 else 64, 4, 2, desc)),
   ("bwd_dkdv", Tile(32 if size == 4 or d == 256 else 64, 64 if d < 256 else 32, 8 if d >= 128 else 4, 1 if size == 4 else 2, desc)),
   ("bwd_dq", Tile(64, 32 if size == 4 or d == 256 else 64, 8 if d == 256 else 4, 1 if size == 4 else 2, desc)))}}


def architecture(capability: tuple[int, int] | None) -> str:
    if capability is None:
        return "interpreter"
    return f"sm_{capability[0]}0"


@cache
def pick(
    kernel: Kernel, size: int, head_dim: int, capability: tuple[int, int] | None, *, descriptors: bool
) -> Tile:
    table = TABLES[architecture(capability)]
    return table.get((kernel, size, block_d(head_dim), descriptors)) or table[kernel, size, block_d(head_dim), False]
