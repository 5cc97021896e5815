"""Splits: divide the work of few programs among more, so that they fill a GPU.

Splits depend only on sizes and the GPU, so a repeated call gives the same bits.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from flashattn.plan.rows import SplitTargets
from flashattn.plan.spec import Options, TensorSpec
from flashattn.plan.tables import hopper


class Split(NamedTuple):
    """How the rows that a program would walk over are divided.

    Args:
        num: number of splits.
        length: rows of a split, whole tiles.
    """

    num: int
    length: int


def split(rows: int, block: int, most: int) -> Split:
    """Divide rows, at least 1, into at most ``most`` splits of whole tiles of ``block`` rows."""
    tiles = cdiv(rows, block)
    length = cdiv(tiles, max(most, 1)) * block
    return Split(cdiv(rows, length), length)


def equal_sections(heads: int, wanted: float) -> int:
    """Return a number of heads per section, close to ``wanted``, that makes sections equal.

    Under a mask, a last section of few heads leaves SMs idle while its longest tile runs.
    """
    sections = max(1, min(round(heads / wanted), heads))
    fewer = max(1, heads // sections)
    return fewer if heads % fewer == 0 else cdiv(heads, sections)


def rotating_section(blocks: int, query_tiles: int, num_sms: int) -> float:
    """Return the heads per section for programs of keys that visit query tiles in rotation.

    A section runs programs of all its heads at once. The fewer programs of a head run at once, the
    further apart they are in its query tiles. Two tiles apart, none waits long for the one before.

    Args:
        blocks: key tiles of a head, one program each.
        query_tiles: query tiles of a head.
        num_sms: of the GPU.
    """
    most = max(1, query_tiles / 2)  # programs of a head
    return num_sms / most if blocks > most else 1


def num_splits(fill: SplitTargets, programs: int, rows: int, num_sms: int) -> int:
    """Return how many splits fill the GPU: the most that any pair allows.

    Args:
        fill: pairs (programs per SM, fewest rows of a split).
        programs: number of programs without a split.
        rows: rows, or tiles of them, that each program walks over.
        num_sms: of the GPU.
    """
    return max(1, *[min(n * num_sms // programs, rows // least) for n, least in fill])


def gqa_splits(q: TensorSpec, k: TensorSpec, tiles: int, num_sms: int, options: Options) -> int:
    """Return among how many programs the query heads of a key tile are divided.

    It is the smallest number that takes the least time by the cost model of ``tables.hopper``.

    Args:
        q: [B, H, T, D].
        k: [B, G, S, D].
        tiles: key tiles of all heads.
        num_sms: of the GPU.
        options: the mask. Under a window all programs have equal work. Under other masks the mean
            is half of the longest, and the last of many programs are short, except with documents.
    """
    group = q.shape[1] // k.shape[1]
    if group == 1:
        return 1
    equal, walk = not options.causal or options.window_keys < math.inf, options.reach(q.shape[2])
    late, added = (x[q.shape[3] > hopper.ONE_PASS] for x in (hopper.LATE, hopper.ADDED))

    def time(splits: int) -> float:  # in walks over the queries of a head that see a key
        longest, each = group // splits, tiles * splits / (2 * num_sms)
        waves = cdiv(tiles * splits, num_sms) * longest
        last = late * longest / (1 if options.bounds else math.sqrt(max(1, each)))
        masked = max(longest, each * longest + last)
        reduction = added * tiles * splits / walk if splits > 1 else 0
        return (waves if equal else masked) + reduction

    return min((n for n in range(1, group + 1) if group % n == 0), key=time)


def dq_accumulators(heads: int, blocks: int, num_sms: int, *, head_dim: int) -> int:
    """Return the number of dQ accumulators under a mask, so that programs do not queue for one.

    All programs begin with the last queries, so each waits for those of its head that started
    earlier, some 3 us each on an H200. Two accumulators halve the queue. Adding them up pays off
    where heads are long, except the longest. Where few heads have all programs, there are more. One
    is enough where all programs run at once: the first programs, which never wait, have the most
    work.

    Args:
        heads: heads with keys of their own.
        blocks: key tiles of a head.
        num_sms: of the GPU.
        head_dim: D.
    """
    if heads * blocks <= num_sms:
        return 1
    queue = hopper.QUEUE[head_dim > hopper.NARROW]
    least = 2 if blocks in hopper.TWO_ACCUMULATORS else 1
    return max(least, min(hopper.MOST_ACCUMULATORS, min(blocks, num_sms // heads) // queue))


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)
