"""Tensor descriptors of launches, for TMA loads and stores."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashattn.kernels.descriptor import Form, Tiled, descriptor_strides, form_of
from flashattn.plan.tile import block_d

WARPS = 4  # of a warpgroup
PRODUCT = 16  # columns that one WGMMA multiplies
SWIZZLE = 128  # bytes, of tiles in shared memory


@cache
def swizzled(dtype: torch.dtype, block: tuple[int, ...], bytes_: int) -> Form:
    """Return the form of descriptors whose tiles are swizzled by ``bytes_``; 0 is no swizzle."""
    layout = gl.NVMMASharedLayout(bytes_, 8 * dtype.itemsize, len(block))
    return form_of(TensorDescriptor, dtype, block, layout=layout)


class TileSpec(NamedTuple):
    """A tensor that is loaded or stored in tiles [rows, columns]; out of bounds it reads as 0.

    Args:
        rows: rows of a tile.
        columns: columns of a tile; 0 means BLOCK_D.
    """

    rows: int
    columns: int = 0

    def tiles(self, x: torch.Tensor) -> Tiled:
        """Return the form, shape and strides of a descriptor of x [B, H, N, D]."""
        shape = x.shape
        return _form(self, x.dtype, shape[-1]), shape, descriptor_strides(shape, x.stride())


@cache
def _form(tile: TileSpec, dtype: torch.dtype, head_dim: int) -> Form:
    """Return the form of descriptors, which is the same for all lengths."""
    columns = tile.columns or block_d(head_dim)
    bytes_ = min(SWIZZLE, columns * dtype.itemsize)
    return swizzled(dtype, (1, 1, tile.rows, columns), bytes_)


class RowStatsSpec(NamedTuple):
    """Row statistics x [B * H, N], contiguous in fp32, loaded as [1, rows]."""

    rows: int

    def tiles(self, x: torch.Tensor) -> Tiled:
        """Return the form, shape and strides of a descriptor of x."""
        return swizzled(x.dtype, (1, self.rows), 0), x.shape, x.stride()


class RowTermsSpec(NamedTuple):
    """The terms of a number for each row, x [B * H, N, columns], loaded as [1, rows, PRODUCT].

    The columns from ``columns`` on read as 0.
    """

    rows: int

    def tiles(self, x: torch.Tensor) -> Tiled:
        """Return the form, shape and strides of a descriptor of x."""
        form = swizzled(x.dtype, (1, self.rows, PRODUCT), x.itemsize * PRODUCT)
        return form, x.shape, x.stride()
