"""Splits: into how many parts work is divided, so that few programs fill a GPU.

They depend on sizes and the GPU alone, so a repeated call gives the same bits.
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
        num: parts.
        length: rows of a part, whole tiles.
    """

    num: int
    length: int


def split(rows: int, block: int, most: int) -> Split:
    """Divide rows, at least 1, into whole tiles of ``block``, and into ``most`` parts at most."""
    tiles = cdiv(rows, block)
    length = cdiv(tiles, max(most, 1)) * block
    return Split(cdiv(rows, length), length)


def equal_sections(heads: int, wanted: float) -> int:
    """Return how many heads a section has, about as wanted, so that sections are equal.

    Under a mask a last section of few heads has SMs idle while its longest tile runs.
    """
    sections = max(1, min(round(heads / wanted), heads))
    fewer = max(1, heads // sections)
    return fewer if heads % fewer == 0 else cdiv(heads, sections)


def rotating_section(blocks: int, query_tiles: int, num_sms: int) -> float:
    """Return how many heads a section wants where programs of keys take query tiles in rotation.

    A section runs programs of all its heads at once. The fewer of a head run at once, the further
    apart in its query tiles they are: two tiles, so that none waits long for the one before it.

    Args:
        blocks: tiles of keys of a head, a program each.
        query_tiles: of a head.
        num_sms: of the GPU.
    """
    most = max(1, query_tiles / 2)  # programs of a head
    return num_sms / most if blocks > most else 1


def num_splits(fill: SplitTargets, programs: int, rows: int, num_sms: int) -> int:
    """Return how many parts fill the GPU: the most of any pair.

    Args:
        fill: pairs (programs for each SM, rows that a part has at least).
        programs: without a split.
        rows: that each walks over, or tiles of them.
        num_sms: of the GPU.
    """
    return max(1, *[min(n * num_sms // programs, rows // least) for n, least in fill])


def gqa_splits(q: TensorSpec, k: TensorSpec, tiles: int, num_sms: int, options: Options) -> int:
    """Return over how many programs the query heads of a tile of keys are divided.

    It is the fewest that take the least time, by the cost model of ``tables.hopper``.

    Args:
        q: [B, H, T, D].
        k: [B, G, S, D].
        tiles: of keys, of all heads.
        num_sms: of the GPU.
        options: the mask. Under a window all programs have as much to do. Under others the mean is
            half of the longest, and of many programs the last ones are short, but with documents.
    """
    group = q.shape[1] // k.shape[1]
    if group == 1:
        return 1
    equal, walk = not options.causal or options.window_keys < math.inf, options.reach(q.shape[2])
    late, added = (x[q.shape[3] > hopper.ONE_PASS] for x in (hopper.LATE, hopper.ADDED))

    def time(splits: int) -> float:  # the unit is a walk over the queries of a head that see a key
        longest, each = group // splits, tiles * splits / (2 * num_sms)
        waves = cdiv(tiles * splits, num_sms) * longest
        last = late * longest / (1 if options.bounds else math.sqrt(max(1, each)))
        masked = max(longest, each * longest + last)
        reduction = added * tiles * splits / walk if splits > 1 else 0
        return (waves if equal else masked) + reduction

    return min((n for n in range(1, group + 1) if group % n == 0), key=time)


def dq_accumulators(heads: int, blocks: int, num_sms: int, *, head_dim: int) -> int:
    """Return how many workspaces hold dq under a mask, so that programs do not queue for one.

    All programs begin with the last queries, so each waits for those of its head that started
    earlier, some 3 us each on an H200. Two workspaces halve the queue, which is worth what they
    cost to add up where heads are long, but not the longest ones. More are where few heads have all
    programs. None is needed where all programs run at once: the first ones, which never wait, have
    the most to do.

    Args:
        heads: that have keys of their own.
        blocks: tiles of keys of a head.
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
