"""Tiles and schedules of the Hopper kernels, and where they beat the portable ones."""

from __future__ import annotations

import math

from flashattn.plan.tile import HopperBackwardTile, HopperD256Tile, HopperFp32Tile, HopperTile

# Measured: one H200, 700 W, torch 2.11, triton 3.6, bf16, N = 1024 ... 16 384, 2026-11-21; by
# columns and mask, and then by the number of queries from which on a tile is taken.
_TWO, _THREE = HopperTile(stages=4), HopperTile(stages=4, consumers=3, registers=160)
_WIDE = {
    96: HopperTile(),
    128: HopperTile(),
    192: HopperTile(block_kv=64, stages=3, own_o=False),
    256: HopperTile(block_kv=64, own_o=False),
}
FORWARD = {(64, False): {0: _TWO, 2048: _THREE}, (64, True): {0: _TWO, 8192: _THREE}} | {
    (columns, mask): {0: tile} for columns, tile in _WIDE.items() for mask in (False, True)
}
# Of keys from 129 columns up to so many, with values of 128 at most (docs/tuning-log.md).
WIDEST_OF_NARROW, NARROW_FORWARD = 192, HopperTile(own_o=False)
# Where programs have few tiles each it is waves that count, of which the last may be almost empty:
# the one of these is taken that needs the least time. Measured: likewise, 1 to 128 heads of 512 to
# 32 768, 2026-11-22 (docs/tuning-log.md).
FEW_WAVES = 8
FEW_WAVES_FORWARD = {(64, False): (_TWO, _THREE), (64, True): (_TWO,)}
# Without a mask one tile is within 1.1% of the best, in the mean over one to 512 heads of 512 to
# 32 768, in any order and semaphore-ordered, 2026-11-22 (docs/tuning-log.md); for the heads of its
# sections see ``splits.rotating_section``.
ROTATING = {(columns, False): {0: HopperBackwardTile(persistent=True)} for columns in (64, 96, 128)}
# Under a mask the heads of a section begin with their longest tiles, and SMs take the next one when
# they are free. More heads at once wait less for dq's semaphores, and miss the L2 cache more often.
# Where there are as many heads as SMs, in any order, short ones are faster if each of these has its
# own tiles. Measured: 16 384 tokens, one H100, 2026-11-26 (docs/tuning-log.md).
_LONGEST = {0: HopperBackwardTile(section=8)}
BACKWARD = ROTATING | {(64, True): _LONGEST, (96, True): _LONGEST, (128, True): _LONGEST}
MANY_HEADS = 0.95  # heads for each SM
SHORT_HEADS = {64: 2048, 96: 1024, 128: 1024}  # queries of a head, at most, by columns
MANY_SHORT_HEADS = HopperBackwardTile(section=4, persistent=True)
_SEMAPHORE = {
    0: HopperBackwardTile(section=64, persistent=True),
    1024: HopperBackwardTile(section=32),
    4096: HopperBackwardTile(section=16),
    16384: HopperBackwardTile(section=8),
}
DETERMINISTIC = ROTATING | {
    (64, True): {
        0: HopperBackwardTile(section=64, persistent=True),
        2048: HopperBackwardTile(section=32),
        8192: HopperBackwardTile(section=16),
    },
    (96, True): _SEMAPHORE,
    (128, True): _SEMAPHORE,
}
# Documents take the tile of a head that is as long as they are, in any order, too. It has so many
# queries at least, if there are: programs of documents differ too much to be persistent.
LONG_HEAD = 2048
BACKWARD_D256 = {
    (192, False): {0: HopperD256Tile(stages=3)},
    (192, True): {0: HopperD256Tile(), 16384: HopperD256Tile(section=1)},
    (256, False): {0: HopperD256Tile()},
    (256, True): {0: HopperD256Tile(), 16384: HopperD256Tile(section=1)},
}
# Keys and values of a section of the forward, about what FlashAttention-4 keeps in the L2 cache.
SECTION_BYTES = 32 << 20
FP32_FORWARD = HopperFp32Tile(128, 64)
FP32_BACKWARD = {3: HopperFp32Tile(64, 32), 2: HopperFp32Tile(64, 64)}  # by bf16 terms
FP32_D = 64, 128  # BLOCK_D that these kernels take
FP32_BACKWARD_D = 128  # where they are the faster ones for gradients
HEAD_DIMS = range(33, 257)  # smaller ones the portable kernels take without padding
FP32_HEAD_DIMS = range(33, 129)

# Tiles of 128 queries for each SM from which on the forward is the faster one, up to so many keys;
# by the most columns and mask. With long rows and few tiles the portable one splits keys; under a
# mask many of Hopper's programs idle while the longest runs. Where a head has fewer than 128
# queries, as in decoding, most of a tile would be empty. 12 heads of 1024, causal, D = 128: 24 us
# against 28. Measured: one H200; without a mask, and D = 64 with one, again: one H100, 2026-11-27.
TILE_Q = TILE_KV = 128
FORWARD_FROM = {
    (64, False): ((math.inf, 0.52),),
    (64, True): ((3072, 0.6), (8192, 0.9), (math.inf, 1)),
    (128, False): ((math.inf, 0.6),),
    (128, True): ((4096, 2 / 3), (8192, 0.9), (math.inf, 1)),
    (256, False): ((1024, 0.2), (math.inf, 0.4)),
    (256, True): ((1024, 0.2), (4096, 0.4), (8192, 0.9), (math.inf, 1)),
}
# Of a short window much of a tile of 128 keys is hidden, and most of the time goes into the ends of
# a tile of queries. Keys of a window up to which the portable kernels are faster, by the most
# columns; in the backward times the query heads that share them. Measured: H200s, bf16, 8192 and
# 16 384 tokens, 2026-11-29 (docs/tuning-log.md).
FORWARD_WINDOW, BACKWARD_WINDOW = {64: 1024, 128: 256}, {64: 256}
FORWARD_FP32_FROM = {False: 0.75, True: 1}  # by mask
# Likewise tiles of 128 keys, of all query heads, of the backward: with fewer the portable one fuses
# both passes and splits them.
BACKWARD_FROM = {
    (64, False): 0.8,
    (64, True): 0.95,
    (96, False): 0.55,
    (96, True): 0.95,
    (128, False): 0.75,
    (128, True): 0.95,
    (256, False): 1 / 16,
    (256, True): 1 / 16,
}
# A portable program walks over all query heads that share its keys, so a tile of Hopper's counts
# for more: for their cube by this number (docs/tuning-log.md).
GROUP_CUBE = 24

# Cost model of GQA splits of dk and dv, up to D = 128 and beyond. Under a mask, the share of the
# longest program that runs after the mean of all, where there are two for each SM; and what it
# costs to add up a split of a tile of keys, in queries. Measured: H200s, bf16, 1024 to 32 768 keys,
# 2026-11-29 (docs/tuning-log.md): 0.4% longer than the best number of splits.
ONE_PASS = 128  # columns
LATE, ADDED = (0.6, 0.3), (5, 8)

# dQ accumulators: tiles of keys of a head for which there are two; programs of a head that may wait
# for one another, up to D = 64 and beyond, where an accumulator costs more to add up; and how many
# accumulators there are at most. Measured: H200s, bf16, 1024 to 32 768 keys (docs/tuning-log.md).
TWO_ACCUMULATORS = range(32, 257)
NARROW = 64  # columns
QUEUE, MOST_ACCUMULATORS = (16, 33), 8
