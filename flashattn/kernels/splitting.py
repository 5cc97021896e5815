"""Splitting: where programs are few, what one would walk over is divided into parts of several."""

from __future__ import annotations

import torch

from flashattn.kernels import launch
from flashattn.kernels.constants import INTERPRETED
from flashattn.kernels.tiles import Kernel

# Programs that a multiprocessor shall have, when few tiles of queries are to fill a GPU, and tiles
# that a part has at least, or merging costs more than the split gains; the finest split counts. On
# an H200 one head of 16 384 causal queries took 114 us with 4 programs and 187 with 2; decoding,
# which waits for memory, 142 us with 2 and 161 with 4.
FILL: dict[Kernel, tuple[tuple[int, int], ...]] = {
    "fwd": ((4, 4),),
    "decode": ((2, 4),),
    "bwd": ((2, 2), (4, 16)),
    "bwd_dkdv": ((4, 2),),
    "bwd_dq": ((4, 2),),
}
if INTERPRETED.value:  # that small problems are split; and it pretends to one multiprocessor
    FILL = {kernel: tuple((n, 2) for n, _ in pairs) for kernel, pairs in FILL.items()}
    FILL["bwd"] = ((16, 2),)  # twice as many own a tile, of keys or of queries


def split(
    kernel: Kernel,
    programs: int,
    rows: int,
    block: int,
    device: torch.device,
    most: int | None = None,
) -> tuple[int, int]:
    """Return (parts, rows of a part), so that few programs, which walk over rows, fill the GPU.

    It depends on sizes and on the GPU alone, so a repeated call gives the same bits.

    Args:
        kernel: which.
        programs: without a split.
        rows: that a program walks over, keys or queries; at least 1.
        block: rows of a tile, of which a part has whole ones.
        device: of the launch.
        most: parts, instead of what fills the GPU.
    """
    tiles = -(-rows // block)
    if most is None:
        sms = launch.multiprocessors(device)
        most = max(min(n * sms // programs, tiles // least) for n, least in FILL[kernel])
    chunk = -(-tiles // max(most, 1)) * block
    return -(-rows // chunk), chunk
