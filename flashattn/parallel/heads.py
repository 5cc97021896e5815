"""Give each rank all rows of some heads, by an all-to-all before and after attention.

Source: Jacobs et al., 2023, "DeepSpeed Ulysses".
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch.distributed._functional_collectives import all_to_all_single_autograd

from flashattn.parallel.placement import Placement

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName


def to_heads(x: torch.Tensor, length: int, placement: Placement, group: GroupName) -> torch.Tensor:
    """Return all rows of this rank's heads [B, H / W, T, D]; differentiable.

    Args:
        x: this rank's rows of all heads [B, H, rows, D].
        length: T.
        placement: the placement of the rows.
        group: name of the process group.
    """
    world, rows = placement.world, placement.lengths(length)
    sent = x.unflatten(1, (world, -1)).permute(1, 3, 0, 2, 4).flatten(0, 1)
    arrived = all_to_all_single_autograd(sent.contiguous(), rows, [x.shape[2]] * world, group)
    starts = list(accumulate([0, *rows]))
    found = [
        arrived.narrow(0, starts[y.rank] + y.at, y.stop - y.start) for y in placement.chunks(length)
    ]
    return torch.cat(found).permute(1, 2, 0, 3)


def to_rows(x: torch.Tensor, placement: Placement, rank: int, group: GroupName) -> torch.Tensor:
    """Return this rank's rows of all heads [B, H, rows, D], the inverse; differentiable.

    Args:
        x: all rows of this rank's heads [B, H / W, T, D].
        placement: the placement of the rows.
        rank: this rank.
        group: name of the process group.
    """
    length, world = x.shape[2], placement.world
    rows, chunks = placement.lengths(length), placement.chunks(length)
    chunks.sort(key=lambda y: y.rank)  # stable: the chunks of a rank stay in order
    by_rank = x.permute(2, 0, 1, 3)
    sent = torch.cat([by_rank[y.start : y.stop] for y in chunks])
    arrived = all_to_all_single_autograd(sent.contiguous(), [rows[rank]] * world, rows, group)
    return arrived.unflatten(0, (world, rows[rank])).permute(2, 0, 3, 1, 4).flatten(1, 2)
