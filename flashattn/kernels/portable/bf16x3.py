"""flashattn_cut: fp32 as three numbers of bf16, or two, for kernels that add up their products.

A kernel can cut what it has loaded, each tile as often as it comes by. Cut beforehand a tile is in
shared memory as the tensor cores take it, which leaves registers and a third more speed: see
``docs/kernels.md``.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from flashattn.kernels.constants import SIZES
from flashattn.kernels.launch import PLANS, Facts, Launch, Like, facts, row_options
from flashattn.kernels.portable.memory import load_one, store_tile
from flashattn.kernels.portable.mma import cut
from flashattn.kernels.portable.scheduler import program_tile
from flashattn.kernels.tiles import block_d

BLOCK, WARPS = 32, 4


@triton.jit
def cut_rows(
    program,
    x,
    cut_x,
    strides,
    heads,
    rows,
    head_dim,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Cut BLOCK rows of x [B, H, rows, D] into cut_x [B, PARTS H, rows, BLOCK_D], dense."""
    block, batch, head = program_tile(program, tl.cdiv(rows, BLOCK), heads, False)
    start = block * BLOCK
    tile = load_one(
        x, strides, batch, head, start, rows, head_dim, PADDED, BLOCK, BLOCK_D, False, False
    )
    pitch = tl.cast(rows, tl.int64) * BLOCK_D
    parts = cut(tile, PARTS)
    for i in tl.static_range(PARTS):
        store_tile(
            cut_x, (pitch * heads * PARTS, pitch, BLOCK_D), batch, head * PARTS + i, start, rows,
            parts[i], head_dim, 0, BLOCK, BLOCK_D,
        )  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def flashattn_cut(
    q,
    k,
    v,
    grad_o,
    cut_q,
    cut_k,
    cut_v,
    cut_grad_o,
    q_strides,
    k_strides,
    v_strides,
    grad_o_strides,
    batches,
    heads,
    kv_heads,
    seq_q,
    seq_kv,
    head_dim,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Cut k, v, q, and grad_o unless it is None: some programs each, in this order."""
    program = tl.program_id(0)
    of_keys = tl.cdiv(seq_kv, BLOCK) * batches * kv_heads
    of_queries = tl.cdiv(seq_q, BLOCK) * batches * heads
    if program < of_keys:
        cut_rows(
            program, k, cut_k, k_strides, kv_heads, seq_kv, head_dim, PADDED, BLOCK, BLOCK_D, PARTS
        )
    elif program < 2 * of_keys:
        cut_rows(
            program - of_keys, v, cut_v, v_strides, kv_heads, seq_kv, head_dim,
            PADDED, BLOCK, BLOCK_D, PARTS,
        )  # fmt: skip
    elif program < 2 * of_keys + of_queries:
        cut_rows(
            program - 2 * of_keys, q, cut_q, q_strides, heads, seq_q, head_dim,
            PADDED, BLOCK, BLOCK_D, PARTS,
        )  # fmt: skip
    elif grad_o is not None:
        cut_rows(
            program - 2 * of_keys - of_queries, grad_o, cut_grad_o, grad_o_strides, heads, seq_q,
            head_dim, PADDED, BLOCK, BLOCK_D, PARTS,
        )  # fmt: skip


def cut_like(x: Like, parts: int) -> Like:
    """Return what x [B, H, N, D] is like when it is cut: [B, parts H, N, D padded], in bf16."""
    batch, heads, rows, head_dim = x.shape
    shape = torch.Size((batch, heads * parts, rows, block_d(head_dim)))
    strides = torch.empty(shape, device="meta").stride()
    return Like(shape, strides, torch.bfloat16, x.device, 0)


def cut_all(*inputs: torch.Tensor, parts: int) -> list[torch.Tensor]:
    """Launch flashattn_cut; the current device is theirs.

    Args:
        inputs: q [B, H, T, D], k and v [B, G, S, D], and grad_o like q or nothing, in fp32, with
            dense rows, not empty.
        parts: of each number, two or three.

    Returns:
        What ``cut_like`` says of each.
    """
    shapes, launch = _plan(facts(*inputs), parts)
    device = inputs[0].device
    filled = [torch.empty(shape, dtype=torch.bfloat16, device=device) for shape in shapes]
    absent = [None] * (4 - len(inputs))
    launch(*inputs, *absent, *filled, *absent)
    return filled


@lru_cache(PLANS)
def _plan(given: tuple[Facts, ...], parts: int) -> tuple[list[torch.Size], Launch]:
    """Prepare a launch."""
    likes = [Like(*x) for x in given]
    (batch, heads, seq_q, head_dim), (_, kv_heads, seq_kv, _) = (x.shape for x in likes[:2])
    strides = [x.strides[:3] for x in likes] + [(0, 0, 0)] * (4 - len(likes))
    launch = Launch(
        flashattn_cut,
        sum(triton.cdiv(x.shape[2], BLOCK) * batch * x.shape[1] for x in likes),
        [None] * 8,
        (*strides, batch, heads, kv_heads, seq_q, seq_kv),
        row_options(head_dim, strides, BLOCK, WARPS) | {"PARTS": parts},
    )
    return [cut_like(x, parts).shape for x in likes], launch
