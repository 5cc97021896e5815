"""Choice: which tile a forward takes, by how many programs it has, and into how many parts keys go.

The table's for a full GPU is not for few programs: smaller ones are more programs, or some have
only a part of the keys.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from flashattn.kernels import launch
from flashattn.kernels.constants import INTERPRETED
from flashattn.kernels.launch import Like
from flashattn.kernels.tiles import Kernel, Tile

FEW_QUERIES = 16  # from here down a tile has rows to spare: what counts is how fast keys come
# Keys up to which "fwd_short" has them whole: then 16 queries for each program are enough, if all
# run at once. One head of 512, causal, takes 8.0 to 10.6 us at D = 16 to 128 on an H200 where tiles
# of 64 queries take 9 to 14; one of 1024 at D = 64 13.2, and 12.8 if those are split.
SHORT_KEYS = 100 if INTERPRETED.value else 768
# Programs of "fwd_few" for each multiprocessor, up to which there are few: of narrow heads under a
# mask, and of others. With more "fwd" is as fast or faster: eight heads of 4096, causal, take 54
# and 62 us at D = 32, 80 and 68 at D = 64.
FEW_PROGRAMS, FEW_NARROW, NARROW = 2, 4, 32
# Programs that a multiprocessor shall have of those, and keys that a part has at least; the finest
# split counts. 256 where there would not even be one program, 1024 for two, 2048 for four under a
# mask, where some parts see no key. Eight heads of 1024, causal, D = 64, take 16 us whole and 18 in
# two parts, one of 8192 68 whole and 49 in four.
FEW: tuple[tuple[int, int], ...] = ((1, 256), (2, 1024))
FEW_CAUSAL = (*FEW, (4, 2048))
if INTERPRETED.value:
    FEW = FEW_CAUSAL = ((4, 128),)
LONE = 256  # columns, of which one program fits a multiprocessor at once


def programs(q: Like, tile: Tile) -> int:
    """Return how many programs own a tile of queries each."""
    batch, heads, seq_q, _ = q.shape
    return triton.cdiv(seq_q, tile.block_q) * batch * heads


def usual(q: Like) -> Kernel:
    """Return the row of the table for as many programs as there may be."""
    return "decode" if q.shape[2] <= FEW_QUERIES else "fwd"


def choose(q: Like, k: Like, v: Like, *, causal: bool, precision: str) -> tuple[Kernel, Tile]:
    """Return the row of the table for so many programs, and its tile.

    Args:
        q: [B, H, T, D].
        k: [B, G, S, D].
        v: likewise.
        causal: whether scores are masked.
        precision: as ``launch.input_precision`` returns it.
    """
    how: dict[str, Any] = {"causal": causal, "precision": precision}
    kernel, sms = usual(q), launch.multiprocessors(q.device)
    if kernel == "fwd" and k.shape[2] <= SHORT_KEYS:
        short = launch.find_tile("fwd_short", q, k, v, **how)
        if short and programs(q, short) <= sms:
            return "fwd_short", short
    few = launch.find_tile("fwd_few", q, k, v, **how) if kernel == "fwd" else None
    if few:
        narrow = causal and few.block_d(q.shape[3]) <= NARROW
        if programs(q, few) <= (FEW_NARROW if narrow else FEW_PROGRAMS) * sms:
            return "fwd_few", few
    return kernel, launch.pick_tile(kernel, q, k, v, **how)


def most_parts(kernel: Kernel, q: Like, k: Like, tile: Tile, *, causal: bool) -> int | None:
    """Return into how many parts keys are split at most; None lets ``splitting.split`` say."""
    if kernel == "fwd_short":
        return 1
    if kernel != "fwd_few":
        return None
    several = causal and tile.block_d(q.shape[3]) < LONE
    return few_parts(programs(q, tile), k.shape[2], q.device, causal=several)


def few_parts(owners: int, keys: int, device: torch.device, *, causal: bool) -> int:
    """Return into how many parts few programs split their keys at most.

    Args:
        owners: programs without a split.
        keys: that each walks over.
        device: of the launch.
        causal: whether several fit a multiprocessor at once, and scores are masked.
    """
    sms = launch.multiprocessors(device)
    pairs = FEW_CAUSAL if causal else FEW
    return max(1, *(min(n * sms // owners, keys // least) for n, least in pairs))
