"""Fetch keys and values from other ranks, and return their gradients.

Keys and values are sent as [rows, B, G, 2 D], k beside v: the rows of the ranks are consecutive
without a copy for each batch or head, and one collective moves both. Gradients are sent in the
dtype in which the kernels return them, and their owner sums them in fp32, in the order of the
ranks. This is a reduce-scatter in fp32 with half the bytes, and the same bits whatever algorithm
NCCL picks.

Collectives run on a side stream, so that kernels run meanwhile. A persistent kernel takes every SM,
so it must not start before the collective does.
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
_WORD = torch.int64  # the unit of copies
# Cycles that the main stream waits, 20 us on an H200. There a collective starts 15 us after the
# work that it waits for, and a kernel of ours 2 us after (docs/tuning-log.md).
_HEAD_START = 40_000


@contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """Queue the block on a side stream, after all that is queued so far.

    Its memory comes from the pool of that stream, which nothing else uses, and is reused only after
    all that was queued when it was freed, so no tensor needs ``record_stream``.
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
    """Make the current stream wait for its side stream."""
    if device.type == "cuda":
        main = torch.cuda.current_stream(device)
        main.wait_stream(_SIDES[main])


def _let_start(device: torch.device) -> None:
    """Make the main stream wait for the side stream so far, and a little longer.

    So the collective that follows on the side stream takes its SMs before a kernel on the main
    stream takes them all.
    """
    if device.type == "cuda":
        side = torch.cuda.current_stream(device)
        main = next(stream for stream, beside in _SIDES.items() if beside == side)
        main.wait_stream(side)
        with torch.cuda.stream(main):
            torch.cuda._sleep(_HEAD_START)  # noqa: SLF001 - nothing public occupies a stream


def copy_rows(x: torch.Tensor, y: torch.Tensor) -> None:
    """Copy y to x, both with dense rows, in words of 8 bytes if they are aligned."""
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
    """Fetch the buffer of this rank [keys, B, G, 2 D].

    Args:
        kv: this rank's own keys [rows, B, G, 2 D].
        plan: the plan of this rank.
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
    """Send the gradients of the buffer to their owners; return those of this rank's own keys.

    An entry is a slice of rows and their gradients [rows, B, G, 2 D]. The entries are in the order
    of the ranks that sent them; the caller sums them.

    Args:
        dkv: gradients of the buffer [keys, B, G, 2 D].
        plan: the plan of this rank.
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
    """Return slices of x joined, without a copy if they are consecutive in x."""
    if all(a.stop == b.start for a, b in pairwise(slices)):
        return x[slices[0].start : slices[-1].stop] if slices else x[:0]
    return torch.cat([x[rows] for rows in slices])
