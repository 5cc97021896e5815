"""Config: how much of a problem a program of a Hopper kernel takes; and the table of them."""

from __future__ import annotations

from dataclasses import dataclass

from flashattn.kernels.tiles import block_d

ROWS = 64  # queries of a warpgroup
SHARED = 227 << 10  # bytes that a program can have
SIZE = 2  # bytes of an element


@dataclass(frozen=True)
class Config:
    """Sizes of the forward kernel.

    Args:
        block_kv: keys of a tile, a power of two from 64 on.
        slots: tiles of keys, and of values, that are under way at once.
        groups: warpgroups that attend, each to 64 queries: 2 or 3.
        registers: of a thread that attends.
        staged: whether o leaves through shared memory of its own; through that of q otherwise, and
            then the next queries wait.

    Raises:
        ValueError: a number is none of those.
    """

    block_kv: int = 128
    slots: int = 2
    groups: int = 2
    registers: int = 240
    staged: bool = True

    def __post_init__(self) -> None:
        """Check."""
        if self.block_kv < ROWS or self.block_kv & (self.block_kv - 1):
            msg = f"block_kv: wanted a power of two from {ROWS} on, got {self.block_kv}"
            raise ValueError(msg)
        if self.slots < 2:  # noqa: PLR2004
            msg = f"slots: wanted 2 at least, got {self.slots}"
            raise ValueError(msg)
        if self.groups not in (2, 3):
            msg = f"groups: wanted 2 or 3, got {self.groups}"
            raise ValueError(msg)
        if self.registers % 8 or not 24 <= self.registers <= 240:  # noqa: PLR2004
            msg = f"registers: wanted a multiple of 8 from 24 to 240, got {self.registers}"
            raise ValueError(msg)

    def shared(self, head_dim: int) -> int:
        """Return the bytes of tiles that a program holds: queries, o, keys and values."""
        queries = self.groups * ROWS * (2 if self.staged else 1)
        return SIZE * block_d(head_dim) * (queries + 2 * self.slots * self.block_kv)


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


SHORT, LONG = Config(slots=4), Config(slots=4, groups=3, registers=160)
LONG_ROWS = 4096  # queries from which on three warpgroups are faster
# Measured: one H200, 700 W, torch 2.11, triton 3.6, bf16, N = 1024 ... 16 384, 2026-11-21.
FORWARD = {
    64: {False: (SHORT, LONG), True: (SHORT, SHORT)},
    128: dict.fromkeys((False, True), (Config(), Config())),
    256: dict.fromkeys((False, True), (Config(block_kv=64, staged=False),) * 2),
}

BACKWARD = {64: BackwardConfig(), 128: BackwardConfig()}


def pick(head_dim: int, seq_q: int, *, causal: bool) -> Config:
    """Return the table's config."""
    return FORWARD[block_d(head_dim)][causal][seq_q >= LONG_ROWS]
