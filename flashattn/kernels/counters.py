"""Counters that the kernels of a stream share: each kernel leaves them zero."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from triton.runtime import driver

MOST = 4096  # counters of a stream; plans that fill a GPU need fewer
_KEPT: dict[tuple[torch.device, int], torch.Tensor] = {}  # by GPU and stream


def counters(device: torch.device, count: int) -> torch.Tensor:
    """Return at least ``count`` int32 zeros, for a kernel that leaves them zero.

    The kernels of a stream run one after another, so they can share counters that are never
    cleared. A CUDA graph may later run beside other kernels, so it clears counters of its own. An
    interpreted kernel may end early with an exception, so it gets new counters.

    Args:
        device: of the kernel.
        count: number of counters; more than MOST are not shared.
    """
    alone = device.type != "cuda" or count > MOST
    if alone or torch.cuda.is_current_stream_capturing():
        return torch.zeros(count, device=device, dtype=torch.int32)
    key = device, driver.active.get_current_stream(device.index)
    found = _KEPT.get(key)
    if found is None:
        # In another thread: this one may be allocating in a memory pool that others expect back.
        with ThreadPoolExecutor(1) as thread:
            stream = torch.cuda.current_stream(device)
            found = _KEPT[key] = thread.submit(_zeros, device, stream).result()
    return found


def _zeros(device: torch.device, stream: torch.cuda.Stream) -> torch.Tensor:
    """Return zeros, written on a stream."""
    with torch.cuda.stream(stream):
        return torch.zeros(MOST, device=device, dtype=torch.int32)
