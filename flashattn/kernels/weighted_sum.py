"""Teaching kernels: y = x @ w and its gradients, tiled over rows and columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flashattn.kernels.launch import on_device

BLOCK_ROWS, BLOCK_COLS = 16, 64


@triton.jit
def flashattn_weighted_sum_fwd(
    x, w, y, rows, cols, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr
):
    """Compute y [rows]; a program owns BLOCK_ROWS rows and walks over the columns."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    acc = tl.zeros([BLOCK_ROWS], tl.float32)
    for start in tl.range(0, cols, BLOCK_COLS):
        col = start + tl.arange(0, BLOCK_COLS)
        mask = (row < rows)[:, None] & (col < cols)[None, :]
        x_tile = tl.load(x + row.to(tl.int64)[:, None] * cols + col[None, :], mask=mask, other=0.0)
        w_tile = tl.load(w + col, mask=col < cols, other=0.0)
        acc += tl.sum(x_tile.to(tl.float32) * w_tile.to(tl.float32)[None, :], 1)
    tl.store(y + row, acc.to(y.dtype.element_ty), mask=row < rows)


@triton.jit
def flashattn_weighted_sum_bwd(
    x, w, grad_y, grad_x, partial_w, rows, cols, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr
):
    """Compute grad_x [rows, cols] and a row of partial sums of grad_w for each program.

    A program owns BLOCK_ROWS rows. The partial sums are added up afterwards, in a fixed order.
    """
    block = tl.program_id(0)
    row = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    dy = tl.load(grad_y + row, mask=row < rows, other=0.0).to(tl.float32)
    for start in tl.range(0, cols, BLOCK_COLS):
        col = start + tl.arange(0, BLOCK_COLS)
        mask = (row < rows)[:, None] & (col < cols)[None, :]
        offsets = row.to(tl.int64)[:, None] * cols + col[None, :]
        w_tile = tl.load(w + col, mask=col < cols, other=0.0).to(tl.float32)
        dx = dy[:, None] * w_tile[None, :]
        tl.store(grad_x + offsets, dx.to(grad_x.dtype.element_ty), mask=mask)
        x_tile = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
        partial = tl.sum(x_tile * dy[:, None], 0)
        tl.store(partial_w + block.to(tl.int64) * cols + col, partial, mask=col < cols)


def forward(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Launch flashattn_weighted_sum_fwd: y [rows] from contiguous x [rows, cols] and w [cols]."""
    y = x.new_empty(x.shape[0])
    if y.numel() == 0:
        return y
    with on_device(x):
        flashattn_weighted_sum_fwd[(triton.cdiv(x.shape[0], BLOCK_ROWS),)](
            x, w, y, *x.shape, BLOCK_ROWS=BLOCK_ROWS, BLOCK_COLS=BLOCK_COLS
        )
    return y


def backward(
    x: torch.Tensor, w: torch.Tensor, grad_y: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch flashattn_weighted_sum_bwd: the gradients of x [rows, cols] and w [cols]."""
    programs = triton.cdiv(x.shape[0], BLOCK_ROWS)
    grad_x = torch.empty_like(x)
    partial_w = torch.zeros((programs, x.shape[1]), device=x.device, dtype=torch.float32)
    if x.numel() != 0:
        with on_device(x):
            flashattn_weighted_sum_bwd[(programs,)](
                x,
                w,
                grad_y,
                grad_x,
                partial_w,
                *x.shape,
                BLOCK_ROWS=BLOCK_ROWS,
                BLOCK_COLS=BLOCK_COLS,
            )
    return grad_x, partial_w.sum(0).to(w.dtype)
