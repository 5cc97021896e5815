"""Tensor descriptors: what TMA loads and stores, as a launch describes it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashattn.kernels import launch
from flashattn.plan.tile import block_d

WARPS = 4  # of a warpgroup
PRODUCT = 16  # columns that are multiplied at once
SWIZZLE = 128  # bytes, of tiles in shared memory


@dataclass(frozen=True)
class Tiles:
    """What is loaded and stored in tiles of [rows, columns]; what lies outside is 0.

    Args:
        rows: of a tile.
        columns: likewise; 0 is BLOCK_D.
    """

    rows: int
    columns: int = 0

    def describe(self, x: torch.Tensor) -> TensorDescriptor:
        """Return a descriptor of x [B, H, N, D]."""
        columns, size = self.columns or block_d(x.shape[-1]), x.element_size()
        layout = gl.NVMMASharedLayout(min(SWIZZLE, columns * size), 8 * size, x.ndim)
        block = [1, 1, self.rows, columns]
        return TensorDescriptor(
            x, list(x.shape), launch.described_strides(x.shape, x.stride()), block, layout
        )


@dataclass(frozen=True)
class Numbers:
    """Rows of x [B * H, N], contiguous in fp32, of which [1, rows] are loaded at a time."""

    rows: int

    def describe(self, x: torch.Tensor) -> TensorDescriptor:
        """Return a descriptor of x."""
        layout = gl.NVMMASharedLayout(0, 32, 2)
        return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, self.rows], layout)


@dataclass(frozen=True)
class RowTerms:
    """Terms of a number for each row, x [B * H, N, columns], loaded as [1, rows, PRODUCT].

    Columns from ``columns`` on are 0.
    """

    rows: int

    def describe(self, x: torch.Tensor) -> TensorDescriptor:
        """Return a descriptor of x."""
        layout = gl.NVMMASharedLayout(x.element_size() * PRODUCT, 8 * x.element_size(), 3)
        block = [1, self.rows, PRODUCT]
        return TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout)
