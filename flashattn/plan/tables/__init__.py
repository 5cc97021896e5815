"""Tables: rows of tiles and thresholds, one module for each kind of GPU."""

from __future__ import annotations

from flashattn.plan.gpu import Gpu
from flashattn.plan.rows import OPTIONAL, Kernel, Rows
from flashattn.plan.tables import h200, interpreter, sm80, sm100
from flashattn.plan.tile import SMALLEST_BLOCK_D, Tile, block_d

BY_CAPABILITY = {0: "interpreter", 8: "sm_80", 9: "sm_90", 10: "sm_100", 12: "sm_80"}
TABLES = {
    "sm_80": sm80.ROWS,
    "sm_90": h200.ROWS,
    "sm_100": sm100.ROWS,
    "interpreter": interpreter.ROWS,
}


def rows_of(gpu: Gpu) -> Rows:
    """Return a GPU's table; an unknown GPU uses that of capability 8."""
    name = BY_CAPABILITY.get(gpu.capability[0], "sm_80")
    if name == "sm_90" and gpu.triton > h200.MEASURED_TRITON:
        return h200.ROWS_LATER
    return TABLES[name]


def find(
    rows: Rows, kernel: Kernel, size: int, head_dim: int, *, causal: bool, large: bool
) -> Tile | None:
    """Return a table's tile, or None where it has none.

    A single column has no optional kernel: its products are computed in registers, and both passes
    together would spill.

    Args:
        rows: the table.
        kernel: its name.
        size: bytes per element.
        head_dim: D.
        causal: whether scores are masked.
        large: whether inputs are TMA-compatible, or fp32 and worth decomposing beforehand; the
            table's tile may still load them by pointers, or not decomposed.
    """
    d = max(block_d(head_dim), SMALLEST_BLOCK_D)
    if kernel in OPTIONAL and head_dim == 1:
        return None
    by_pointers = rows.tiles.get((kernel, size, d, causal, False))
    if not large or head_dim == 1:  # a descriptor loads 16 bytes of a row or more
        return by_pointers
    return rows.tiles.get((kernel, size, d, causal, True), by_pointers)


def find_tf32(rows: Rows, kernel: Kernel, head_dim: int, *, tma: bool, large: bool) -> Tile | None:
    """Return the tile where TF32 is allowed, or None: use one product, with the bf16x6 tile.

    Args:
        rows: the table.
        kernel: its name.
        head_dim: D.
        tma: whether the inputs are TMA-compatible as they are.
        large: whether they are worth decomposing.
    """
    whole, decomposed = rows.tf32
    key = kernel, block_d(head_dim)
    if large and key in decomposed:
        return decomposed[key]
    tile = whole.get(key)
    return None if tile is None or (tile.descriptors and not tma) else tile


def find_window(rows: Rows, kernel: Kernel, tile: Tile, head_dim: int, keys: float) -> Tile | None:
    """Return the tile that replaces another for a window of so many keys, or None."""
    if tile.decomposed or not tile.descriptors or keys > rows.limits.window:
        return None
    return rows.window.get((kernel, block_d(head_dim)))
