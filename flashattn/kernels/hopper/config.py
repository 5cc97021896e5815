"""Config: how much of a problem a program of a Hopper kernel takes, and the table of them."""

from __future__ import annotations

from dataclasses import dataclass

ROWS = 64  # queries of a warpgroup
SHARED = 227 << 10  # bytes that a program can have


@dataclass(frozen=True)
class Config:
    """Sizes and schedule of the forward kernel.

    Args:
        block_kv: keys of a tile, a power of two from 64 on.
        slots: tiles of keys, and of values, that are under way at once.
        registers: of a thread that attends.
        persistent: whether there is a program for each multiprocessor, or one for each tile.

    Raises:
        ValueError: a number is none of those.
    """

    block_kv: int = 128
    slots: int = 2
    registers: int = 240
    persistent: bool = True
    groups: int = 2  # warpgroups that attend
    order: int = 0  # heads of a band; 0: head by head

    def __post_init__(self) -> None:
        """Check."""
        if self.block_kv < ROWS or self.block_kv & (self.block_kv - 1):
            msg = f"block_kv: wanted a power of two from {ROWS} on, got {self.block_kv}"
            raise ValueError(msg)
        if self.slots < 2:  # noqa: PLR2004
            msg = f"slots: wanted 2 at least, got {self.slots}"
            raise ValueError(msg)
        if self.registers % 8 or not 24 <= self.registers <= 240:  # noqa: PLR2004
            msg = f"registers: wanted a multiple of 8 from 24 to 240, got {self.registers}"
            raise ValueError(msg)

    def shared(self, block_d: int) -> int:
        """Return the bytes of tiles that a program holds: queries, o, keys and values."""
        return 2 * block_d * (2 * self.groups * ROWS + 2 * self.slots * self.block_kv)


# Not measured yet: what fits, by the head dimension that is computed in.
FORWARD = {64: Config(slots=4), 128: Config(slots=2), 256: Config(block_kv=64, slots=2)}


@dataclass(frozen=True)
class BackwardConfig:
    """Schedule of the backward kernel.

    Args:
        slots: tiles of queries, and of dO, that are under way at once.
        order: heads of a band, whose keys that most queries see come first; 0: head by head.
        persistent: whether there is a program for each multiprocessor, or one for each tile of
            keys; a deterministic dq always has the latter.
        spread: whether programs begin with different queries, if all see all and dq is not
            deterministic.

    Raises:
        ValueError: a number is none of those.
    """

    slots: int = 2
    order: int = 0
    persistent: bool = False
    spread: bool = False

    def __post_init__(self) -> None:
        """Check."""
        if self.slots < 2:  # noqa: PLR2004
            msg = f"slots: wanted 2 at least, got {self.slots}"
            raise ValueError(msg)
        if self.order < 0:
            msg = f"order: wanted 0 or a number of heads, got {self.order}"
            raise ValueError(msg)

    def shared(self, block_d: int) -> int:
        """Return the bytes of tiles that a program holds: k, v, q, dO, dS and dq."""
        block_q = 2 * ROWS * ROWS // block_d
        rows = 2 * block_q * (2 * self.slots * block_d + 4)  # and two numbers for each
        return 4 * block_d * 2 * ROWS + rows + 8 * ROWS * block_q + 8 * ROWS * ROWS


BACKWARD = {64: BackwardConfig(), 128: BackwardConfig()}
