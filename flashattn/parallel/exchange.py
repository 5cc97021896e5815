"""Keys and values fetched from other ranks, and their gradients given back.

What travels is [rows, B, G, 2 D], k beside v: ranks' rows lie one behind the other without a copy
for each batch or head, and one collective moves both. Gradients travel in the dtype in which the
kernels return them, and their owner adds them up in fp32, in the order of the ranks: that is a
reduce-scatter in fp32 with half its bytes, and the same bits whatever algorithm NCCL picks.

The functional collectives run on the backend's own stream. ``beside`` puts the copies around them
on a stream, too, so that kernels run meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

from flashattn.parallel.plan import Plan, size

_COLLECTIVES = torch.ops._c10d_functional  # noqa: SLF001 - torch.distributed's keep changing names
_SIDES: dict[torch.cuda.Stream, torch.cuda.Stream] = {}


@contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """Queue what follows on a side stream, behind all that is queued so far.

    Its memory comes from that stream's pool, which nobody else uses, and is used again only behind
    all that was queued when it was freed; so no tensor needs ``record_stream``.
    """
    if device.type != "cuda":
        yield
        return
    main = torch.cuda.current_stream(device)
    if main not in _SIDES:
        _SIDES[main] = torch.cuda.Stream(device, priority=-1)
    _SIDES[main].wait_stream(main)
    with torch.cuda.stream(_SIDES[main]):
        yield


def join(device: torch.device) -> None:
    """Let the current stream wait for what was queued beside it."""
    if device.type == "cuda":
        main = torch.cuda.current_stream(device)
        main.wait_stream(_SIDES[main])


def rows_first(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return [rows, B, G, 2 D] of k and v [B, G, rows, D]."""
    batch, heads, rows, width = k.shape
    kv = k.new_empty(rows, batch, heads, 2 * width)
    for x, there in zip((k, v), heads_first(kv), strict=True):
        there.copy_(x)
    return kv


def heads_first(kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return k and v [B, G, rows, D], views of [rows, B, G, 2 D]."""
    k, v = kv.permute(1, 2, 0, 3).chunk(2, -1)
    return k, v


def fetch(kv: torch.Tensor, plan: Plan, group: str) -> torch.Tensor:
    """Return the buffer of this rank [keys, B, G, 2 D].

    Args:
        kv: this rank's own keys [rows, B, G, 2 D].
        plan: of this rank.
        group: name of the process group.
    """
    if plan.gathers:
        padding = kv.new_zeros(plan.leaving[0] - plan.rows, *kv.shape[1:])
        kv = torch.cat([kv, padding]) if len(padding) else kv
        arrived = _COLLECTIVES.all_gather_into_tensor(kv, len(plan.arriving), group)
        arrived = _COLLECTIVES.wait_tensor(arrived)
    else:
        sent = torch.cat([kv[:0], *(kv[rows] for to_one in plan.sends for rows in to_one)])
        arrived = _all_to_all(sent, plan.leaving, plan.arriving, group)
    return _joined(arrived, plan.places)


def give_back(dkv: torch.Tensor, plan: Plan, group: str) -> torch.Tensor:
    """Return the gradients of this rank's own keys [rows, B, G, 2 D] in fp32, summed over ranks.

    Args:
        dkv: gradients of the buffer [keys, B, G, 2 D].
        plan: of this rank.
        group: name of the process group.
    """
    sent = dkv
    if plan.places != [piece.keys for piece in plan.pieces] or sum(plan.arriving) != len(dkv):
        sent = dkv.new_zeros(sum(plan.arriving), *dkv.shape[1:])
        for place, piece in zip(plan.places, plan.pieces, strict=True):
            sent[place] = dkv[piece.keys]
    arrived = _all_to_all(sent, plan.arriving, plan.leaving, group)
    wide = torch.promote_types(dkv.dtype, torch.float32)
    if plan.gathers:
        every = arrived.unflatten(0, (len(plan.leaving), -1))
        return every.sum(0, dtype=wide)[: plan.rows]
    total, at = arrived.new_zeros(plan.rows, *dkv.shape[1:], dtype=wide), 0
    for rows in (rows for from_one in plan.sends for rows in from_one):
        total[rows] += arrived[at : at + size(rows)]
        at += size(rows)
    return total


def _all_to_all(x: torch.Tensor, leaving: list[int], arriving: list[int], group: str) -> Any:
    arrived = _COLLECTIVES.all_to_all_single(x, arriving, leaving, group)
    return _COLLECTIVES.wait_tensor(arrived)


def _joined(x: torch.Tensor, slices: list[slice]) -> torch.Tensor:
    """Return rows of x one behind the other; without a copy where they lie so."""
    if all(a.stop == b.start for a, b in pairwise(slices)):
        return x[slices[0].start : slices[-1].stop] if slices else x[:0]
    return torch.cat([x[rows] for rows in slices])
