"""Tile: how much of a problem one program takes; and the table that says which, per GPU.

A first call never searches. ``benchmarks/tune.py`` measures candidates on a GPU and prints the
rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args

import triton

# fwd_few: fwd for few programs; fwd_short: for still fewer, and keys so few that they stay whole;
# decode: for few queries. bwd: both passes of the backward side by side, where they are small;
# bwd_whole: and lse2 and delta with them, where there is next to nothing to do
Kernel = Literal["fwd", "fwd_few", "fwd_short", "decode", "bwd", "bwd_whole", "bwd_dkdv", "bwd_dq"]
JOINT: frozenset[Kernel] = frozenset({"bwd", "bwd_whole"})
OPTIONAL: frozenset[Kernel] = JOINT | {"fwd_few", "fwd_short"}  # that a table need not have
FP32 = 4  # bytes
SMALLEST_BLOCK_D = 16  # of a tensor-core product
HEAD_DIMS = (16, 32, 64, 128, 256)  # that kernels compute in
VECTOR = 8  # columns: the 16 bytes of half precision that a thread loads at once


def block_d(head_dim: int) -> int:
    """Return the columns a kernel computes in: 1, or the next power of two, 16 at least."""
    return 1 if head_dim == 1 else max(SMALLEST_BLOCK_D, 1 << (head_dim - 1).bit_length())


def padding(head_dim: int, strides: Iterable[Iterable[int]]) -> int:
    """Return 0 if a kernel computes in as many columns as there are.

    Else how many of them can be loaded at once: a power of two up to 8, which divides head_dim and
    the distances of all rows. Triton itself only looks whether an argument is a multiple of 16, and
    where it is not, as for 40 columns, would load them one by one.

    Args:
        head_dim: D.
        strides: of all tensors that are loaded or stored by pointers, but for the last dimensions'.
    """
    if head_dim == block_d(head_dim):
        return 0
    return math.gcd(VECTOR, head_dim, *itertools.chain(*strides))


@dataclass(frozen=True)
class Tile:
    """Block sizes and launch options of one kernel.

    Args:
        block_q: queries per tile, a power of two from 16 on.
        block_kv: keys per tile, likewise.
        warps: per program: 1, 2, 4, 8 or 16.
        stages: of the software pipeline that loads tiles ahead.
        descriptors: whether tiles are loaded by tensor descriptors (TMA) or by pointers.
        registers: that a thread may have, so that more programs fit a multiprocessor; 0 leaves it
            to the compiler.
        cut: whether fp32 that is six products of bf16 comes cut into its parts.

    Raises:
        ValueError: a number is not one of those.
    """

    block_q: int
    block_kv: int
    warps: int
    stages: int
    descriptors: bool = False
    registers: int = 0
    cut: bool = False

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
        if self.registers and not 24 <= self.registers <= 255:  # noqa: PLR2004 - the hardware's
            msg = f"registers: wanted 0, or 24 to 255, got {self.registers}"
            raise ValueError(msg)

    def block_d(self, head_dim: int) -> int:
        """Return the head dimension the kernel computes in."""
        return block_d(head_dim)

    def options(self, head_dim: int, strides: Iterable[Iterable[int]]) -> dict[str, Any]:
        """Return the keyword arguments of a launch; ``strides`` as ``padding`` takes them."""
        return {
            "BLOCK_Q": self.block_q,
            "BLOCK_KV": self.block_kv,
            "BLOCK_D": block_d(head_dim),
            "PADDED": padding(head_dim, strides),
            "DESCRIPTORS": self.descriptors,
            **self.compiler_options(),
        }

    def compiler_options(self) -> dict[str, int]:
        """Return those of the keyword arguments that are not the kernel's."""
        options = {"num_warps": self.warps, "num_stages": self.stages}
        return options | {"maxnreg": self.registers} if self.registers else options


# What picks a tile: kernel, bytes per element, BLOCK_D, causal, and whether inputs can have
# descriptors, or are fp32 and worth cutting.
Key = tuple[Kernel, int, int, bool, bool]
Table = dict[Key, Tile]
# block_q, block_kv, warps, stages; and registers, where they are limited.
Numbers = tuple[int, int, int, int] | tuple[int, int, int, int, int]


def _table(
    rows: dict[tuple[Kernel, int, int], Numbers | tuple[Numbers, Numbers]],
    *,
    descriptors: bool = False,
    cut: bool = False,
    aligned: bool = False,
) -> Table:
    """Spell out rows (kernel, bytes, BLOCK_D): one tile, or one for full and one for causal.

    Args:
        rows: the tiles.
        descriptors: whether they have descriptors.
        cut: whether they are for what comes cut.
        aligned: whether they are for what could have descriptors, whether they have some or not.
    """
    table: Table = {}
    for (kernel, size, d), numbers in rows.items():
        full, causal = numbers if isinstance(numbers[0], tuple) else (numbers, numbers)
        for mask, tile in ((False, full), (True, causal)):
            limit = tile[4] if len(tile) == 5 else 0  # noqa: PLR2004
            key = kernel, size, d, mask, descriptors or cut or aligned
            table[key] = Tile(*tile[:4], descriptors, limit, cut)
    return table


MEASURED_TRITON = (3, 6)
# Measured: one H200, 700 W, driver 580.159.04, torch 2.11, triton 3.6, bf16, N = 4096, 2026-11-21;
# those of limited registers at N = 1024 to 16 384, 2026-11-22.
H200_DESCRIPTORS = _table(
    {
        ("fwd", 2, 32): (64, 128, 4, 3, 128),
        ("fwd", 2, 64): (64, 128, 4, 2),
        ("fwd", 2, 128): ((64, 128, 4, 1), (64, 64, 4, 3)),
        ("fwd", 2, 256): (128, 64, 8, 2),
        ("decode", 2, 16): (16, 64, 4, 3),
        ("decode", 2, 32): (16, 64, 4, 2),
        ("decode", 2, 64): (16, 128, 4, 3),
        ("decode", 2, 128): (16, 64, 4, 3),
        ("decode", 2, 256): (16, 32, 4, 3),
        ("bwd_dkdv", 2, 32): ((64, 64, 4, 3, 128), (64, 64, 4, 3)),
        ("bwd_dkdv", 2, 64): ((64, 64, 4, 3), (128, 64, 4, 2)),
        ("bwd_dkdv", 2, 128): (64, 64, 4, 2),
        ("bwd_dkdv", 2, 256): (32, 64, 8, 3),
        ("bwd_dq", 2, 32): (64, 64, 4, 3),
        ("bwd_dq", 2, 64): (128, 64, 8, 3),
        ("bwd_dq", 2, 128): (64, 64, 4, 2),
        ("bwd_dq", 2, 256): (128, 32, 8, 3),
    },
    descriptors=True,
)
# Rows of 32 bytes, which pointers load faster than descriptors. Likewise, 2026-11-22.
H200_NARROW = _table(
    {
        ("fwd", 2, 16): (64, 128, 4, 3, 128),
        ("bwd_dkdv", 2, 16): (64, 64, 4, 3),
        ("bwd_dq", 2, 16): ((64, 64, 4, 3), (64, 64, 4, 3, 128)),
    },
    aligned=True,
)
# Measured likewise, of one to 64 heads of 64 to 16 384, aligned, 2026-11-22. What is split and
# comes misaligned has the tiles of a full GPU.
H200_FEW = (
    _table(
        {
            **{("fwd_few", 2, d): (64, 64, 4, 2) for d in (16, 32, 64)},
            ("fwd_few", 2, 128): (128, 64, 8, 2),
            ("fwd_few", 2, 256): (64, 32, 4, 2),
            **{("fwd_short", 2, d): (16, 128, 4, 3) for d in (16, 32, 64, 128)},
            ("fwd_short", 2, 256): (16, 64, 4, 2),
        }
    )
    | _table({("fwd_few", 2, d): (64, 128, 4, 3) for d in (16, 32, 64)}, aligned=True)
    | _table(
        {
            ("fwd_few", 2, 128): (64, 64, 4, 3),
            ("fwd_few", 2, 256): (128, 64, 8, 2),
            ("fwd_short", 2, 128): (16, 128, 4, 3),
            ("fwd_short", 2, 256): (16, 128, 8, 2),
        },
        descriptors=True,
    )
)
# Inputs that no descriptor can address (expanded, misaligned), and those that are not worth one.
# Measured likewise, of misaligned inputs, but for "decode", which was chosen by compiling without a
# GPU. Nothing spills with Triton 3.6 and 3.9.
H200_POINTERS = _table(
    {
        ("fwd", 2, 16): (64, 64, 4, 2),
        ("fwd", 2, 32): (64, 64, 4, 2),
        ("fwd", 2, 64): (64, 64, 4, 2),
        ("fwd", 2, 128): (128, 64, 8, 2),
        ("fwd", 2, 256): (64, 32, 4, 2),
        ("decode", 2, 16): (16, 64, 4, 3),
        ("decode", 2, 32): (16, 64, 4, 3),
        ("decode", 2, 64): (16, 64, 4, 3),
        ("decode", 2, 128): (16, 64, 4, 3),
        ("decode", 2, 256): (16, 32, 4, 3),
        ("bwd_dkdv", 2, 16): (64, 64, 4, 2),
        ("bwd_dkdv", 2, 32): (64, 64, 4, 2),
        ("bwd_dkdv", 2, 64): ((64, 64, 4, 1), (32, 64, 4, 2)),
        ("bwd_dkdv", 2, 128): ((32, 128, 8, 1), (16, 128, 8, 1)),
        ("bwd_dkdv", 2, 256): ((64, 32, 8, 1), (32, 32, 8, 2)),
        ("bwd_dq", 2, 16): (64, 64, 4, 2),
        ("bwd_dq", 2, 32): (64, 64, 4, 2),
        ("bwd_dq", 2, 64): (64, 64, 4, 2),
        ("bwd_dq", 2, 128): (128, 128, 8, 2),
        ("bwd_dq", 2, 256): (128, 32, 8, 2),
    }
)
# fp32 as six bf16 products, measured as above. By pointers a kernel cuts what it loads. Triton 3.6
# miscompiles some of those tiles, such as 64 x 16 with 8 warps: the search met illegal accesses,
# and left them out.
H200_FP32 = _table(
    {
        ("fwd", 4, 16): (128, 32, 4, 1),
        ("fwd", 4, 32): ((128, 32, 4, 1), (64, 64, 4, 1)),
        ("fwd", 4, 64): ((128, 32, 8, 1), (64, 32, 4, 1)),
        ("fwd", 4, 128): ((128, 32, 8, 1), (64, 32, 4, 1)),
        ("fwd", 4, 256): (128, 16, 8, 1),
        ("decode", 4, 16): (16, 32, 4, 2),
        ("decode", 4, 32): (16, 64, 4, 2),
        ("decode", 4, 64): (16, 32, 4, 2),
        ("decode", 4, 128): (16, 32, 4, 2),
        ("decode", 4, 256): (16, 16, 8, 2),
        ("bwd_dkdv", 4, 16): (32, 64, 4, 1),
        ("bwd_dkdv", 4, 32): ((32, 128, 4, 1), (64, 128, 8, 1)),
        ("bwd_dkdv", 4, 64): ((32, 64, 4, 1), (32, 128, 8, 1)),
        ("bwd_dkdv", 4, 128): (16, 64, 4, 1),
        ("bwd_dkdv", 4, 256): (16, 16, 4, 1),
        ("bwd_dq", 4, 16): (64, 32, 4, 1),
        ("bwd_dq", 4, 32): (128, 32, 8, 1),
        ("bwd_dq", 4, 64): (128, 64, 8, 1),
        ("bwd_dq", 4, 128): (128, 32, 8, 1),
        ("bwd_dq", 4, 256): (16, 16, 4, 1),
    }
)
# The same, cut beforehand. N = 4096, 2026-11-22.
H200_CUT = _table(
    {
        ("fwd", 4, 16): (64, 64, 4, 2),
        ("fwd", 4, 32): (64, 64, 4, 2),
        ("fwd", 4, 64): (128, 64, 8, 3),
        ("fwd", 4, 128): (64, 64, 4, 1),
        ("bwd_dkdv", 4, 16): ((64, 64, 4, 2), (32, 64, 4, 2)),
        ("bwd_dkdv", 4, 32): (64, 64, 4, 2),
        ("bwd_dkdv", 4, 64): (64, 128, 8, 2),
        ("bwd_dkdv", 4, 128): ((32, 64, 4, 2), (64, 64, 4, 1)),
        ("bwd_dq", 4, 16): (64, 64, 4, 2),
        ("bwd_dq", 4, 32): (64, 64, 4, 2),
        ("bwd_dq", 4, 64): (128, 64, 8, 2),
        ("bwd_dq", 4, 128): (64, 32, 4, 2),
    },
    descriptors=True,
    cut=True,
)
# Not measured, likewise; they fit the 99 KiB of consumer cards, so they serve all of 8.x and 12.x.
# Wide fp32 comes cut, or it spills up to 500 bytes; for dK and dV of 256 columns there is no room.
SM_80_CUT = _table(
    {
        ("fwd", 4, 128): (32, 32, 8, 2),
        ("fwd", 4, 256): (16, 32, 8, 1),
        ("bwd_dkdv", 4, 128): (16, 32, 8, 1),
        ("bwd_dq", 4, 128): (32, 32, 8, 1),
        ("bwd_dq", 4, 256): (16, 16, 8, 1),
    },
    cut=True,
)
SM_80 = SM_80_CUT | _table(
    {
        ("fwd", 2, 16): (128, 64, 8, 2),
        ("fwd", 2, 32): (128, 64, 8, 2),
        ("fwd", 2, 64): (128, 64, 8, 2),
        ("fwd", 2, 128): (64, 64, 8, 2),
        ("fwd", 2, 256): (64, 32, 8, 2),
        ("decode", 2, 16): (16, 64, 4, 3),
        ("decode", 2, 32): (16, 64, 4, 3),
        ("decode", 2, 64): (16, 64, 4, 3),
        ("decode", 2, 128): (16, 32, 4, 3),
        ("decode", 2, 256): (16, 16, 4, 3),
        ("bwd_dkdv", 2, 16): (64, 64, 4, 2),
        ("bwd_dkdv", 2, 32): (64, 64, 4, 2),
        ("bwd_dkdv", 2, 64): (32, 64, 8, 2),
        ("bwd_dkdv", 2, 128): (32, 64, 8, 2),
        ("bwd_dkdv", 2, 256): (16, 32, 8, 1),
        ("bwd_dq", 2, 16): (64, 64, 4, 2),
        ("bwd_dq", 2, 32): (64, 32, 4, 2),
        ("bwd_dq", 2, 64): (64, 64, 4, 2),
        ("bwd_dq", 2, 128): (64, 64, 8, 2),
        ("bwd_dq", 2, 256): (32, 32, 8, 1),
        ("fwd", 4, 16): (64, 32, 4, 1),
        ("fwd", 4, 32): (64, 32, 4, 1),
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
        ("bwd_dkdv", 4, 128): (16, 16, 8, 1),
        ("bwd_dkdv", 4, 256): (16, 16, 8, 1),
        ("bwd_dq", 4, 16): (64, 32, 4, 1),
        ("bwd_dq", 4, 32): (32, 16, 4, 1),
        ("bwd_dq", 4, 64): (32, 32, 8, 1),
        ("bwd_dq", 4, 128): (16, 16, 8, 1),
        ("bwd_dq", 4, 256): (16, 16, 8, 1),
    }
)
# Not measured, likewise; without the tensor memory of that architecture's own matrix instructions.
SM_100 = SM_80 | _table(
    {
        ("fwd", 2, 64): (64, 64, 4, 2),
        ("fwd", 2, 256): (64, 32, 4, 2),
        ("fwd", 4, 16): (64, 32, 8, 1),
        ("fwd", 4, 32): (64, 32, 8, 1),
        ("fwd", 4, 64): (32, 32, 8, 1),
        ("bwd_dkdv", 4, 32): (32, 64, 8, 1),
        ("bwd_dq", 4, 32): (64, 32, 8, 1),
        ("bwd_dq", 4, 64): (64, 32, 8, 1),
        ("bwd_dkdv", 2, 32): (64, 64, 8, 2),
        ("bwd_dkdv", 2, 64): (64, 64, 8, 2),
        ("bwd_dkdv", 2, 128): (32, 64, 8, 1),
        ("bwd_dq", 2, 32): (64, 64, 8, 2),
        ("bwd_dq", 2, 128): (64, 64, 4, 2),
    }
)
# With 64 x 32 of the second Triton 3.6 makes an empty kernel.
SM_100 |= _table(
    {
        ("bwd_dkdv", 4, 128): (32, 32, 8, 1),
        ("bwd_dq", 4, 128): (32, 32, 4, 1),
        ("bwd_dkdv", 4, 256): (16, 16, 8, 1),
    },
    cut=True,
)
# With later compilers than the measured one some of those spill. Not measured there; with 3.6 the
# first of these makes 483 of 569 TFLOP/s, the second 153 of 247.
H200_LATER = _table(
    {
        ("fwd", 2, 32): ((64, 128, 4, 3), (64, 64, 4, 3)),
        ("bwd_dkdv", 2, 32): (64, 64, 4, 3),
        ("bwd_dkdv", 2, 128): ((64, 64, 4, 2), (32, 64, 4, 4)),
        ("bwd_dkdv", 2, 256): (16, 64, 8, 3),
        ("bwd_dkdv", 2, 64): ((64, 64, 4, 3), (64, 64, 4, 2)),
    },
    descriptors=True,
) | _table(
    {
        ("bwd_dkdv", 4, 32): (32, 64, 4, 2),
        ("bwd_dkdv", 4, 64): (16, 64, 4, 1),
        ("bwd_dq", 4, 64): (128, 32, 8, 1),
    }
)
H200_LATER["bwd_dkdv", 2, 256, True, True] = Tile(16, 32, 8, 1)
# Both passes at once, of one head of 512 to 32 768 keys and of batches as small, and "bwd_whole" of
# one head of 64 to 256 and of batches as small. Measured likewise, 2026-11-22, but for "bwd" at D =
# 128 by pointers, which was chosen by compiling; nothing of "bwd_whole" may spill. Narrow heads are
# loaded by pointers, which was the faster by up to a fifth. fp32 that is not cut has none: those
# tried spill.
H200_BOTH = (
    _table(
        {
            ("bwd", 2, 16): (64, 64, 4, 3),
            ("bwd", 2, 32): (64, 64, 4, 3),
            ("bwd", 2, 64): (32, 64, 4, 2),
            ("bwd", 2, 128): (32, 64, 4, 2),
        }
    )
    | _table(
        {
            ("bwd_whole", 2, 16): (64, 64, 4, 1),
            ("bwd_whole", 2, 32): (64, 64, 4, 1),
            ("bwd_whole", 2, 64): (64, 64, 4, 1),
            ("bwd_whole", 2, 128): (32, 32, 4, 1),
        }
    )
    | _table(
        {("bwd", 2, 64): (64, 64, 4, 2), ("bwd", 2, 128): (64, 64, 4, 2)},
        descriptors=True,
    )
    | _table(
        {("bwd", 4, d): (64, 64, 4, 2) for d in (16, 32, 64)},
        descriptors=True,
        cut=True,
    )
)
# One product of TF32, which needs no registers for parts: larger tiles fit. N = 4096, 2026-11-22;
# where there is none the tile of six products serves.
H200_TF32: dict[tuple[Kernel, int], Tile] = {
    ("fwd", 16): Tile(64, 64, 4, 3, descriptors=True),
    ("fwd", 32): Tile(128, 32, 4, 3, descriptors=True),
    ("bwd_dkdv", 128): Tile(32, 128, 8, 2, descriptors=True),
}
# In its place three products of two parts of bf16, cut beforehand: the same speed at D = 64, and
# faster at 128, where those tried for dK and dV spill (Hopper's own do not). Both passes at once at
# D = 16 are up to a third slower for one head.
H200_TF32_CUT: dict[tuple[Kernel, int], Tile] = {
    ("fwd", 64): Tile(128, 64, 8, 2, descriptors=True, cut=True),
    ("fwd", 128): Tile(128, 64, 8, 2, descriptors=True, cut=True),
    ("bwd_dkdv", 64): Tile(64, 64, 4, 2, descriptors=True, cut=True),
    ("bwd_dq", 64): Tile(64, 64, 4, 2, descriptors=True, cut=True),
    ("bwd_dq", 128): Tile(128, 32, 8, 3, descriptors=True, cut=True),
    ("bwd", 32): Tile(64, 64, 4, 2, descriptors=True, cut=True),
    ("bwd", 64): Tile(64, 64, 4, 2, descriptors=True, cut=True),
}
MEASURED_HERE = tuple(map(int, triton.__version__.split(".")[:2])) <= MEASURED_TRITON
H200 = (
    H200_DESCRIPTORS
    | H200_NARROW
    | H200_POINTERS
    | H200_FEW
    | H200_FP32
    | H200_CUT
    | H200_BOTH
    | ({} if MEASURED_HERE else H200_LATER)
)
# Small, so that small problems have several tiles, and oblong, so that a swapped index shows.
INTERPRETER: Table = {
    (kernel, size, d, causal, large): Tile(
        32, 64, 4, 1, large, cut=large and size == FP32 and kernel != "bwd_whole"
    )
    for kernel, size, d, causal, large in itertools.product(
        get_args(Kernel), (2, 4), HEAD_DIMS, (False, True), (False, True)
    )
}
TABLES: dict[str, Table] = {
    "sm_80": SM_80,
    "sm_90": H200,
    "sm_100": SM_100,
    "interpreter": INTERPRETER,
}
# By whether it comes cut.
TF32 = {
    "sm_90": {False: H200_TF32, True: H200_TF32_CUT},
    "interpreter": {
        True: {(kernel, d): tile for (kernel, _, d, _, _), tile in INTERPRETER.items() if tile.cut}
    },
}
ARCHITECTURES = {8: "sm_80", 9: "sm_90", 10: "sm_100", 12: "sm_80"}  # by compute capability


def _architecture(capability: tuple[int, int] | None) -> str:
    """Return whose table a GPU takes; None is the interpreter."""
    return "interpreter" if capability is None else ARCHITECTURES.get(capability[0], "sm_80")


@cache
def pick_tf32(
    kernel: Kernel,
    head_dim: int,
    capability: tuple[int, int] | None,
    *,
    descriptors: bool,
    large: bool,
) -> Tile | None:
    """Return the tile where TF32 will do, or None: one product, with the tile of six.

    Args:
        kernel: which.
        head_dim: D.
        capability: as in ``pick``.
        descriptors: whether the inputs can have descriptors, as they are.
        large: whether they are worth cutting.
    """
    key, table = (kernel, block_d(head_dim)), TF32.get(_architecture(capability), {})
    if large and key in table.get(True, {}):
        return table[True][key]
    tile = table.get(False, {}).get(key)
    return None if tile is None or (tile.descriptors and not descriptors) else tile


@cache
def pick(
    kernel: Kernel,
    size: int,
    head_dim: int,
    capability: tuple[int, int] | None,
    *,
    causal: bool,
    descriptors: bool,
) -> Tile | None:
    """Return the table's tile, or None: of those that are optional, where nothing is known of it.

    Nor for a single column, whose products are made in registers: those of both passes spill.

    Args:
        kernel: which.
        size: bytes per element.
        head_dim: D.
        capability: of the GPU; None for the interpreter. One that is not known is taken for an
            sm_80.
        causal: whether scores are masked.
        descriptors: whether the inputs can have descriptors, or are fp32 and worth cutting; the
            tile may still do without.
    """
    table, d = TABLES[_architecture(capability)], max(block_d(head_dim), SMALLEST_BLOCK_D)
    if kernel in OPTIONAL and head_dim == 1:
        return None
    by_pointers = table.get((kernel, size, d, causal, False))
    if not descriptors or head_dim == 1:  # 16 bytes is the least that a descriptor loads of a row
        return by_pointers
    return table.get((kernel, size, d, causal, True), by_pointers)
