"""Config: how much of a problem a program of a Hopper kernel takes; and the table of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from flashattn.kernels.tiles import block_d

ROWS = 64  # queries of a warpgroup
SHARED = 227 << 10  # bytes that a program can have
SIZE = 2  # bytes of an element


def columns(head_dim: int) -> tuple[int, int]:
    """Return the columns of a tile that are multiplied, as two powers of two or as one and 0.

    So 65 to 96 are 64 + 32 of 128, and 129 to 192 are 128 + 64 of 256.
    """
    d = block_d(head_dim)
    return (d // 2, d // 4) if d > ROWS and head_dim <= d // 4 * 3 else (d, 0)


@dataclass(frozen=True)
class Config:
    """Sizes of the forward kernel.

    Args:
        block_kv: keys of a tile, a power of two from 64 on.
        slots: tiles of keys, and of values, that are under way at once.
        groups: warpgroups that attend, each to 64 queries: 2 or 3.
        registers: of a thread that attends.
        staged: whether o leaves through shared memory of its own, and the next queries come early;
            through that of q otherwise, and then they wait.
        pinned: whether the exponentials of a step must be done before its product with V is.

    Raises:
        ValueError: a number is none of those.
    """

    block_kv: int = 128
    slots: int = 2
    groups: int = 2
    registers: int = 240
    staged: bool = True
    pinned: bool = False

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
        queries = self.groups * ROWS * (3 if self.staged else 1)
        return SIZE * block_d(head_dim) * (queries + 2 * self.slots * self.block_kv)


@dataclass(frozen=True)
class BackwardConfig:
    """Schedule of the backward kernel.

    Args:
        slots: tiles of queries, and of dO, that are under way at once.
        band: heads whose tiles of keys that most queries see come first, before the next band's.
            Where programs wait for one another's turn, a wide one lets few of a head run at once.
        persistent: whether there is a program for each multiprocessor, or one for each tile of
            keys.
        apart: tiles of queries between those that programs of a head visit at once, if they are
            persistent and there is no mask.

    Raises:
        ValueError: a number is none of those.
    """

    slots: int = 2
    band: int = 1
    persistent: bool = False
    apart: int = 4

    def __post_init__(self) -> None:
        """Check."""
        if self.slots < 2:  # noqa: PLR2004
            msg = f"slots: wanted 2 at least, got {self.slots}"
            raise ValueError(msg)
        for name in ("band", "apart"):
            if getattr(self, name) < 1:
                msg = f"{name}: wanted 1 at least, got {getattr(self, name)}"
                raise ValueError(msg)

    def shared(self, head_dim: int) -> int:
        """Return the bytes of tiles that a program holds: k, v, q, dO, dS and dq."""
        d = block_d(head_dim)
        block_q = 2 * ROWS * ROWS // d
        rows = 2 * block_q * (2 * self.slots * d + 4)  # and two numbers for each
        return 4 * d * 2 * ROWS + rows + 8 * ROWS * block_q + 8 * ROWS * ROWS


@dataclass(frozen=True)
class WideConfig:
    """Schedule of the backward kernels of heads of 129 to 256.

    Args:
        band: heads whose longest tiles come first under a mask, before the next band's.

    Raises:
        ValueError: a number is none of those.
    """

    band: int = 4

    def __post_init__(self) -> None:
        """Check."""
        if self.band < 1:
            msg = f"band: wanted 1 at least, got {self.band}"
            raise ValueError(msg)

    def shared(self, head_dim: int) -> int:
        """Return the bytes of tiles that a program of either kernel holds at most."""
        tile = SIZE * ROWS * block_d(head_dim)
        keys = 6 * tile + 4 * ROWS * 4 + 2 * SIZE * ROWS * ROWS  # k, v, q, dO, two numbers; P
        return max(keys, 7 * tile)  # q and dO for both warpgroups, k, v


# Measured: one H200, 700 W, torch 2.11, triton 3.6, bf16, N = 1024 ... 16 384, 2026-11-21; by
# columns and mask, and then by the number of queries from which on a config is taken.
FORWARD = {
    (64, False): {
        0: Config(slots=4, pinned=True),
        2048: Config(slots=4, groups=3, registers=160),
    },
    (64, True): {0: Config(slots=4), 8192: Config(slots=4, groups=3, registers=160)},
    (96, False): {0: Config()},
    (96, True): {0: Config()},
    (128, False): {0: Config()},
    (128, True): {0: Config()},
    (192, False): {0: Config(block_kv=64, staged=False)},
    (192, True): {0: Config(block_kv=64, staged=False)},
    (256, False): {0: Config(block_kv=64, staged=False, pinned=True)},
    (256, True): {0: Config(block_kv=64, staged=False)},
}
# Where programs have few tiles each it is rounds that count, of which the last may be almost empty:
# the one of these is taken that needs the least time. Measured: likewise, 1 to 128 heads of 512 to
# 32 768, 2026-11-22 (docs/tuning-log.md).
FEW_ROUNDS = 8
FEW = {
    (64, False): (Config(slots=4, pinned=True), Config(slots=4, groups=3, registers=160)),
    (64, True): (Config(slots=4),),
}
# Without a mask one config is within 1.1% of the best, in the mean over one to 512 heads of 512 to
# 32 768, in any order and in turns, 2026-11-22 (docs/tuning-log.md).
ROTATING = {
    (64, False): {0: BackwardConfig(persistent=True)},
    (96, False): {0: BackwardConfig(slots=3, persistent=True)},
    (128, False): {0: BackwardConfig(persistent=True)},
}
# Under a mask 32 heads begin with their longest tiles, and multiprocessors take the next one when
# they are free. Where there are as many heads as multiprocessors, in any order, short ones are
# faster if each of these has its own tiles, a few heads after the other. Measured: likewise, 8 to
# 512 heads of 512 to 32 768, 2026-11-23 (docs/tuning-log.md): 0.5% longer than the best of ten in
# the mean, 0.6% in turns.
_LONGEST = {0: BackwardConfig(band=32)}
BACKWARD = ROTATING | {(64, True): _LONGEST, (96, True): _LONGEST, (128, True): _LONGEST}
MANY = 0.95  # heads for each multiprocessor
SHORT = {64: 2048, 96: 1024, 128: 1024}  # queries of a head, at most, by columns
MANY_SHORT = BackwardConfig(band=4, persistent=True)
_IN_TURNS = {
    0: BackwardConfig(band=64, persistent=True),
    1024: BackwardConfig(band=32),
    4096: BackwardConfig(band=16),
    16384: BackwardConfig(band=8),
}
DETERMINISTIC = ROTATING | {
    (64, True): {0: BackwardConfig(band=64, persistent=True), 8192: BackwardConfig(band=32)},
    (96, True): _IN_TURNS,
    (128, True): _IN_TURNS,
}
WIDE = {
    (192, False): {0: WideConfig()},
    (192, True): {0: WideConfig(), 16384: WideConfig(band=1)},
    (256, False): {0: WideConfig()},
    (256, True): {0: WideConfig(), 16384: WideConfig(band=1)},
}
Of = TypeVar("Of", Config, BackwardConfig, WideConfig)


def _pick(
    table: Mapping[tuple[int, bool], Mapping[int, Of]], head_dim: int, seq_q: int, *, causal: bool
) -> Of | None:
    configs = table.get((sum(columns(head_dim)), causal))
    return configs[max(least for least in configs if least <= seq_q)] if configs else None


def pick(
    head_dim: int, seq_q: int, *, causal: bool, heads: int, multiprocessors: int
) -> Config | None:
    """Return the forward's config; None leaves the problem to the portable kernel.

    Args:
        head_dim: D.
        seq_q: queries of a head.
        causal: whether there is a mask.
        heads: of all batches.
        multiprocessors: of the GPU; each has a program, and a tile of queries in a round.
    """

    def rounds(config: Config) -> int:
        return -(-heads * -(-seq_q // (config.groups * ROWS)) // multiprocessors)

    few = FEW.get((sum(columns(head_dim)), causal))
    if few and rounds(few[0]) < FEW_ROUNDS:
        # A round takes 4/3 of the time with three groups, which share what it costs to begin one.
        return min(few, key=lambda config: rounds(config) * (config.groups + 1))
    return _pick(FORWARD, head_dim, seq_q, causal=causal)


def pick_backward(
    head_dim: int,
    seq_q: int,
    *,
    causal: bool,
    deterministic: bool,
    heads: int,
    multiprocessors: int,
) -> BackwardConfig | None:
    """Return the config of the backward in one pass; None where there is none.

    Args:
        head_dim: D.
        seq_q: queries of a head.
        causal: whether there is a mask.
        deterministic: whether dq is added to in turns.
        heads: that have keys of their own, of all batches.
        multiprocessors: of the GPU.
    """
    short = causal and seq_q <= SHORT.get(sum(columns(head_dim)), 0)
    if short and not deterministic and heads >= MANY * multiprocessors:
        return MANY_SHORT
    table = DETERMINISTIC if deterministic else BACKWARD
    return _pick(table, head_dim, seq_q, causal=causal)


def pick_wide(head_dim: int, seq_q: int, *, causal: bool) -> WideConfig | None:
    """Return the config of the backward in two passes; None where there is none."""
    return _pick(WIDE, head_dim, seq_q, causal=causal)
