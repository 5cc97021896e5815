"""Tiles and schedules of the Hopper kernels, and where they beat the portable ones."""

from __future__ import annotations

import math

from flashattn.plan.tile import HopperBackwardTile, HopperD256Tile, HopperFp32Tile, HopperTile

# By columns and mask, then by the number of queries from which on a tile is used. Measured: one
# H200, 700 W, torch 2.11, triton 3.6, bf16, N = 1024 ... 16 384, 2026-11-21.
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
# For keys of 129 to 192 columns with values of at most 128 (docs/tuning-log.md).
WIDEST_OF_NARROW, NARROW_FORWARD = 192, HopperTile(own_o=False)
# With few tiles per program, the number of waves decides, and the last wave may be almost empty:
# the fastest of these tiles is used. Measured: likewise, 1 to 128 heads of 512 to 32 768,
# 2026-11-22 (docs/tuning-log.md).
FEW_WAVES = 8
FEW_WAVES_FORWARD = {(64, False): (_TWO, _THREE), (64, True): (_TWO,)}
# Without a mask, one schedule is within 1.1% of the best on average, over one to 512 heads of 512
# to 32 768, unordered and semaphore-ordered, 2026-11-22 (docs/tuning-log.md). Its sections come
# from ``splits.rotating_section``.
ROTATING = {(columns, False): {0: HopperBackwardTile(persistent=True)} for columns in (64, 96, 128)}
# Under a mask, the heads of a section begin with their longest tiles, and a free SM takes the next
# tile. With larger sections, programs wait less for dQ semaphores, but miss the L2 cache more
# often. With as many heads as SMs and unordered dQ, short heads are faster with persistent
# programs. Measured: 16 384 tokens, one H100, 2026-11-26 (docs/tuning-log.md).
_LONGEST = {0: HopperBackwardTile(section=8)}
BACKWARD = ROTATING | {(64, True): _LONGEST, (96, True): _LONGEST, (128, True): _LONGEST}
MANY_HEADS = 0.95  # heads per SM
SHORT_HEADS = {64: 2048, 96: 1024, 128: 1024}  # most queries of a head, by columns
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
# Documents use the deterministic schedule of a head of their length, even if dQ is unordered. The
# length is at least this, if there are so many queries: their programs differ too much to persist.
LONG_HEAD = 2048
BACKWARD_D256 = {
    (192, False): {0: HopperD256Tile(stages=3)},
    (192, True): {0: HopperD256Tile(), 16384: HopperD256Tile(section=1)},
    (256, False): {0: HopperD256Tile()},
    (256, True): {0: HopperD256Tile(), 16384: HopperD256Tile(section=1)},
}
# Bytes of a section, about as many as FlashAttention-4 keeps in the L2 cache: of keys and values in
# the forward; of q, dO and dQ (2 + 2 + 4 a number) in the backward, if a window has two sides.
SECTION_BYTES = 32 << 20
FP32_FORWARD = HopperFp32Tile(128, 64)
FP32_BACKWARD = {3: HopperFp32Tile(64, 32), 2: HopperFp32Tile(64, 64)}  # by bf16 terms
FP32_D = 64, 128  # BLOCK_D that these kernels take
FP32_BACKWARD_D = 128  # BLOCK_D for which they are faster in the backward
HEAD_DIMS = range(33, 257)  # the portable kernels take smaller ones without padding
FP32_HEAD_DIMS = range(33, 129)

# By (most columns, mask): pairs (most keys, tiles of 128 queries per SM from which on Hopper's
# forward is faster). With long rows and few tiles the portable one splits keys; under a mask many
# of Hopper's programs idle while the longest runs. With fewer than 128 queries per head, as in
# decoding, most of a tile would be empty. 12 heads of 1024, causal, D = 128: 24 us against 28.
# Measured: one H200; without a mask, and D = 64 with one, again: one H100, 2026-11-27.
TILE_Q = TILE_KV = 128
FORWARD_FROM = {
    (64, False): ((math.inf, 0.52),),
    (64, True): ((3072, 0.6), (8192, 0.9), (math.inf, 1)),
    (128, False): ((math.inf, 0.6),),
    (128, True): ((4096, 2 / 3), (8192, 0.9), (math.inf, 1)),
    (256, False): ((1024, 0.2), (math.inf, 0.4)),
    (256, True): ((1024, 0.2), (4096, 0.4), (8192, 0.9), (math.inf, 1)),
}
# The longest window, in keys, for which the portable kernels are faster, by the most columns; in
# the backward, times the query heads that share keys. A short window hides much of a tile of 128
# keys, and most time goes into the start and end of a query tile. Measured: H200s, bf16, 4096 to
# 16 384 tokens, 2026-11-29 (docs/tuning-log.md).
FORWARD_WINDOW, BACKWARD_WINDOW = {64: 512, 128: 128}, {64: 256}
FORWARD_FP32_FROM = {False: 0.75, True: 1}  # by mask
# Likewise for the backward, tiles of 128 keys of all query heads per SM: with fewer, the portable
# kernels fuse both passes and split them.
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
# A portable program walks over all query heads that share its keys, so each of Hopper's tiles
# counts for more: the cube of the number of these heads, divided by this (docs/tuning-log.md).
GROUP_CUBE = 24

# Cost model of GQA splits of dK and dV, for (D <= 128, D > 128). LATE: the fraction of the longest
# program that runs past the mean finish time under a mask, with two programs per SM. ADDED: the
# cost of reducing one split of a key tile, in queries. Measured: H200s, bf16, 1024 to 32 768 keys,
# 2026-11-29 (docs/tuning-log.md): 0.4% slower than the best number of splits.
ONE_PASS = 128  # columns
LATE, ADDED = (0.6, 0.3), (5, 8)

# dQ accumulators: the numbers of key tiles of a head that get two at least; how many programs of
# a head may wait for one another, for (D <= 64, D > 64), where an accumulator costs more to add up;
# and the most accumulators. Measured: H200s, bf16, 1024 to 32 768 keys (docs/tuning-log.md).
TWO_ACCUMULATORS = range(32, 257)
NARROW = 64  # columns
QUEUE, MOST_ACCUMULATORS = (16, 33), 8
