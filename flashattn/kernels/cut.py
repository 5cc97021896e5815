"""flashattn_cut: fp32 as three numbers of bf16, for kernels that multiply in six products.

A kernel can cut what it has loaded, each tile as often as it comes by. Cut beforehand a tile is in
shared memory as the tensor cores take it, which leaves registers and a third more speed: see
``docs/kernels.md``.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from flashattn.kernels.launch import PLANS, Facts, Launch, Like, facts
from flashattn.kernels.primitives import SIZES, cut, load_one, program_tile, store_tile
from flashattn.kernels.tiles import block_d

BLOCK, WARPS = 32, 4
THREE = tl.constexpr(3)


@triton.jit(do_not_specialize=SIZES)
def flashattn_cut(
    x,
    cut_x,
    strides,
    cut_strides,
    heads,
    rows,
    head_dim,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Cut x [B, H, rows, D] into three heads of cut_x [B, 3 H, rows, BLOCK_D] for each of its."""
    block, batch, head = program_tile(tl.cdiv(rows, BLOCK), heads, False)
    start = block * BLOCK
    tile = load_one(
        x, strides, batch, head, start, rows, head_dim, PADDED, BLOCK, BLOCK_D, False, False
    )
    three = cut(tile)
    for i in tl.static_range(THREE):
        store_tile(
            cut_x, cut_strides, batch, head * THREE + i, start, rows, three[i],
            head_dim, False, BLOCK, BLOCK_D,
        )  # fmt: skip


def cut_like(x: Like) -> Like:
    """Return what x [B, H, N, D] is like when it is cut: [B, 3 H, N, D padded], in bf16."""
    batch, heads, rows, head_dim = x.shape
    shape = torch.Size((batch, heads * THREE.value, rows, block_d(head_dim)))
    strides = torch.empty(shape, device="meta").stride()
    return Like(shape, strides, torch.bfloat16, x.device, 0)


def cut_all(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Launch flashattn_cut for each of the tensors; the current device is theirs.

    Args:
        tensors: [B, H, N, D], fp32, with dense rows, not empty.

    Returns:
        What ``cut_like`` says of each.
    """
    found = []
    for x, given in zip(tensors, facts(*tensors), strict=True):
        shape, launch = _plan(given)
        found.append(torch.empty(shape, dtype=torch.bfloat16, device=x.device))
        launch(x, found[-1])
    return found


@lru_cache(PLANS)
def _plan(given: Facts) -> tuple[torch.Size, Launch]:
    """Prepare a launch."""
    x = Like(*given)
    parts = cut_like(x)
    batch, heads, rows, head_dim = x.shape
    launch = Launch(
        flashattn_cut,
        triton.cdiv(rows, BLOCK) * batch * heads,
        [None, None],
        (x.strides[:3], parts.strides[:3], heads, rows),
        {
            "head_dim": head_dim,
            "PADDED": head_dim < parts.shape[3],
            "BLOCK": BLOCK,
            "BLOCK_D": parts.shape[3],
            "num_warps": WARPS,
        },
    )
    return parts.shape, launch
