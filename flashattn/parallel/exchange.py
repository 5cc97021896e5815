"""Keys and values fetched from other ranks, and their gradients given back.

What travels is [rows, B, G, 2 D], k beside v: ranks' rows lie one behind the other without a copy
for each batch or head, and one collective moves both. Gradients travel in the dtype in which the
kernels return them, and their owner adds them up in fp32, in the order of the ranks: that is a
reduce-scatter in fp32 with half its bytes, and the same bits whatever algorithm NCCL picks.

Collectives run on a side stream, so that kernels run meanwhile. A kernel whose programs stay until
its end takes every SM, so it must not start before the collective does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import distributed
from torch.distributed.distributed_c10d import _resolve_process_group

from flashattn.parallel.plan import Plan, size

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName

_SIDES: dict[torch.cuda.Stream, torch.cuda.Stream] = {}
_WORD = torch.int64  # what copies move at a time
# Cycles that the main stream waits, 20 us on an H200: there a collective starts 15 us after what it
# waits for, and a kernel of ours 2 us (docs/tuning-log.md).
_HEAD_START = 40_000


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


def _let_start(device: torch.device) -> None:
    """Let the main stream wait for what is queued beside it, but not for what follows there.

    What follows there takes its SMs before a kernel on the main stream takes them all.
    """
    if device.type == "cuda":
        side = torch.cuda.current_stream(device)
        main = next(stream for stream, beside in _SIDES.items() if beside == side)
        main.wait_stream(side)
        with torch.cuda.stream(main):
            torch.cuda._sleep(_HEAD_START)  # noqa: SLF001 - nothing public occupies a stream


def copy_rows(x: torch.Tensor, y: torch.Tensor) -> None:
    """Copy y to x, with dense rows, in words of 8 bytes where they lie so."""
    if all(_in_words(z) for z in (x, y)):
        x, y = x.view(_WORD), y.view(_WORD)
    x.copy_(y)


def _in_words(x: torch.Tensor) -> bool:
    """Return whether each row of x begins, and ends, at a multiple of 8 bytes."""
    numbers = x.storage_offset(), x.shape[-1], *x.stride()[:-1]
    return x.stride(-1) == 1 and not any(n * x.itemsize % _WORD.itemsize for n in numbers)


def rows_first(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return [rows, B, G, 2 D] of k and v [B, G, rows, D]."""
    batch, heads, rows, width = k.shape
    kv = k.new_empty(rows, batch, heads, 2 * width)
    for x, there in zip((k, v), heads_first(kv), strict=True):
        copy_rows(there, x)
    return kv


def heads_first(kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return k and v [B, G, rows, D], views of [rows, B, G, 2 D]."""
    k, v = kv.permute(1, 2, 0, 3).chunk(2, -1)
    return k, v


def fetch(kv: torch.Tensor, plan: Plan, group: GroupName) -> torch.Tensor:
    """Return the buffer of this rank [keys, B, G, 2 D].

    Args:
        kv: this rank's own keys [rows, B, G, 2 D].
        plan: of this rank.
        group: name of the process group.
    """
    if not plan.gathers:
        sent = torch.cat([kv[:0], *(kv[rows] for to_one in plan.sends for rows in to_one)])
        return _joined(_all_to_all(sent, plan.leaving, plan.arriving, group), plan.places)
    padding = kv.new_zeros(plan.most - plan.rows, *kv.shape[1:])
    kv = torch.cat([kv, padding]) if len(padding) else kv
    arrived = kv.new_empty(plan.most * len(plan.arriving), *kv.shape[1:])
    _let_start(kv.device)
    distributed.all_gather_into_tensor(arrived, kv, _resolve_process_group(group))
    return _joined(arrived, plan.places)


def give_back(dkv: torch.Tensor, plan: Plan, group: GroupName) -> list[tuple[slice, torch.Tensor]]:
    """Return gradients of this rank's own keys: which rows, and those [rows, B, G, 2 D].

    Each rank's come one after the other, in the order of the ranks; to be added up.

    Args:
        dkv: gradients of the buffer [keys, B, G, 2 D].
        plan: of this rank.
        group: name of the process group.
    """
    by_rank = sorted(plan.pieces, key=lambda piece: piece.rank)  # stable
    sent = _joined(dkv, [piece.keys for piece in by_rank])
    arrived = _all_to_all(sent, plan.arriving, plan.leaving, group)
    rows = [rows for from_one in plan.sends for rows in from_one]
    return list(zip(rows, arrived.split([size(x) for x in rows]), strict=True))


def _all_to_all(
    x: torch.Tensor, leaving: list[int], arriving: list[int], group: GroupName
) -> torch.Tensor:
    arrived = x.new_empty(sum(arriving), *x.shape[1:])
    _let_start(x.device)
    distributed.all_to_all_single(
        arrived, x.contiguous(), arriving, leaving, _resolve_process_group(group)
    )
    return arrived


def _joined(x: torch.Tensor, slices: list[slice]) -> torch.Tensor:
    """Return rows of x one behind the other; without a copy where they lie so."""
    if all(a.stop == b.start for a, b in pairwise(slices)):
        return x[slices[0].start : slices[-1].stop] if slices else x[:0]
    return torch.cat([x[rows] for rows in slices])
