"""flashattn_bwd_delta: two numbers a row that the backward needs, before its passes."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from flashattn.kernels import launch
from flashattn.kernels.constants import LOG2E, SIZES
from flashattn.kernels.launch import PLANS, Facts, Launch, Like, facts
from flashattn.kernels.portable.memory import load_one, load_rows, store_rows
from flashattn.kernels.portable.scheduler import program_tile

ROW_PADDING = 256  # rows of lse2 and delta are padded to whole tiles, whatever the tile
DELTA_BLOCK = 64  # rows of o and dO that a program of flashattn_bwd_delta reduces
DELTA_WARPS = 4


@triton.jit
def load_lse2(lse2, o, row, pitch, start, seq_q, BLOCK: tl.constexpr):
    """Load lse2 of a tile's rows as ``flashattn_bwd_delta`` left it; with o, lse2 is lse.

    lse2 = lse * log2(e). Rows that see no key, and those that only pad, have +inf: their P is 0.
    """
    if o is None:
        lse2_rows = load_rows(lse2, row, pitch, start, BLOCK)
    else:
        rows = start + tl.arange(0, BLOCK)
        offsets = row.to(tl.int64) * seq_q + rows
        lse_rows = tl.load(lse2 + offsets, mask=rows < seq_q, other=float("-inf"))
        dead = lse_rows == float("-inf")
        lse2_rows = tl.where(dead, float("inf"), lse_rows * LOG2E)
    return lse2_rows


@triton.jit
def load_delta(
    delta,
    o,
    o_strides,
    do_tile,
    lse2_rows,
    batch,
    head,
    row,
    pitch,
    start,
    seq_q,
    head_dim,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Load delta of a tile's rows likewise; with o, ``delta`` is the gradient of lse, or None.

    delta = rowsum(dO * O) - dlse, and 0 where lse2 is +inf.
    """
    if o is None:
        delta_rows = load_rows(delta, row, pitch, start, BLOCK)
    else:
        o_tile = load_one(
            o, o_strides, batch, head, start, seq_q,
            head_dim, PADDED, BLOCK, BLOCK_D, False, False,
        )  # fmt: skip
        delta_rows = tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1)
        if delta is not None:
            rows = start + tl.arange(0, BLOCK)
            offsets = row.to(tl.int64) * seq_q + rows
            delta_rows -= tl.load(delta + offsets, mask=rows < seq_q, other=0.0)
        delta_rows = tl.where(lse2_rows == float("inf"), 0.0, delta_rows)
    return delta_rows


@triton.jit(do_not_specialize=SIZES)
def flashattn_bwd_delta(
    o,
    grad_o,
    lse,
    grad_lse,
    lse2,
    delta,
    o_strides,
    grad_o_strides,
    heads,
    seq_q,
    pitch,
    head_dim,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write lse2 and delta, see ``load_lse2`` and ``load_delta``; a program takes BLOCK rows."""
    block, batch, head = program_tile(tl.program_id(0), pitch // BLOCK, heads, False)
    start, row = block * BLOCK, batch * heads + head
    do_tile = load_one(
        grad_o, grad_o_strides, batch, head, start, seq_q,
        head_dim, PADDED, BLOCK, BLOCK_D, False, False,
    )  # fmt: skip
    lse2_rows = load_lse2(lse, o, row, pitch, start, seq_q, BLOCK)
    delta_rows = load_delta(
        grad_lse, o, o_strides, do_tile, lse2_rows, batch, head, row, pitch, start, seq_q,
        head_dim, PADDED, BLOCK, BLOCK_D,
    )  # fmt: skip
    store_rows(lse2, row, pitch, start, pitch, lse2_rows, BLOCK)
    store_rows(delta, row, pitch, start, pitch, delta_rows, BLOCK)


def pitch(seq_q: int) -> int:
    """Return how many numbers of lse2 and delta a head has."""
    return triton.cdiv(seq_q, ROW_PADDING) * ROW_PADDING


def row_shape(shape: torch.Size) -> tuple[int, int]:
    """Return the shape of lse2 and delta for that of o."""
    batch, heads, seq_q, _ = shape
    return batch * heads, pitch(seq_q)


def row_terms(
    grad_o: torch.Tensor, grad_lse: torch.Tensor | None, o: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch flashattn_bwd_delta: lse2 and delta, each [B * H, T padded to whole tiles]."""
    given = (o, grad_o, lse) if grad_lse is None else (o, grad_o, lse, grad_lse)
    lse2 = torch.empty(row_shape(o.shape), device=o.device, dtype=torch.float32)
    delta = torch.empty_like(lse2)
    delta_launch(facts(*given))(o, grad_o, lse, grad_lse, lse2, delta)
    return lse2, delta


@lru_cache(PLANS)
def delta_launch(given: tuple[Facts, ...]) -> Launch:
    """Prepare the launch of flashattn_bwd_delta.

    Args:
        given: what is to be known of o, grad_o, lse, and grad_lse where there is one.
    """
    o, grad_o = Like(*given[0]), Like(*given[1])
    batch, heads, seq_q, head_dim = o.shape
    padded = pitch(seq_q)
    strides = o.strides[:3], grad_o.strides[:3]
    return Launch(
        flashattn_bwd_delta,
        padded // DELTA_BLOCK * batch * heads,
        [None] * 6,
        (*strides, heads, seq_q, padded),
        launch.row_options(head_dim, strides, DELTA_BLOCK, DELTA_WARPS),
    )
