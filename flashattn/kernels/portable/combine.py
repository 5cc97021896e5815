"""Results of splits combined: o by a weighted mean, gradients by a sum, in a fixed order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from flashattn.kernels import launch
from flashattn.kernels.constants import SIZES
from flashattn.kernels.launch import Launch
from flashattn.kernels.portable.memory import multiple, tile_mask
from flashattn.kernels.portable.softmax import normalized

COMBINE_BLOCK, COMBINE_WARPS = 4, 1  # rows of o that a program of flashattn_combine puts together
SUM_BLOCK, SUM_WARPS = 16, 4  # likewise of flashattn_bwd_sum


@triton.jit
def store_dense(x, strides, row, heads, size, cols, tile, mask, PADDED: tl.constexpr):
    """Store rows, counted through all heads of all batches, where x has them; ``size`` a head."""
    stride_b, stride_h, stride_t = strides
    batch, head = (row // size // heads).to(tl.int64), (row // size % heads).to(tl.int64)
    origin = batch * multiple(stride_b, PADDED) + head * multiple(stride_h, PADDED)
    origin += (row % size).to(tl.int64) * multiple(stride_t, PADDED)
    tl.store(x + origin[:, None] + cols, tile.to(x.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=SIZES)
def flashattn_combine(
    o_partial,
    lse_partial,
    o,
    lse,
    o_strides,
    parts,
    rows,
    heads,
    seq_q,
    head_dim,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Put together parts that are dense: o [parts, rows, head_dim] and lse [2, parts, rows]."""
    start = tl.program_id(0) * BLOCK
    row = start + tl.arange(0, BLOCK)
    cols = tl.arange(0, BLOCK_D)[None, :]
    mask = tile_mask(start, rows, head_dim, PADDED, BLOCK, BLOCK_D, False)
    m = tl.full([BLOCK], float("-inf"), tl.float32)
    for part in range(parts):
        m_part = tl.load(lse_partial + part * rows + row, mask=row < rows, other=float("-inf"))
        m = tl.maximum(m, m_part)
    finite = tl.where(m == float("-inf"), 0.0, m)  # a row that sees no key
    acc = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    l = tl.zeros([BLOCK], tl.float32)
    for part in range(parts):
        at = part * rows + row
        m_part = tl.load(lse_partial + at, mask=row < rows, other=float("-inf"))
        weight = tl.exp2(m_part - finite)
        l += weight * tl.load(lse_partial + parts * rows + at, mask=row < rows, other=0.0)
        origin = at.to(tl.int64)[:, None] * multiple(head_dim, PADDED)
        acc += weight[:, None] * tl.load(o_partial + origin + cols, mask=mask, other=0.0)
    acc, lse_rows = normalized(acc, m, l)
    store_dense(o, o_strides, row, heads, seq_q, cols, acc, mask, PADDED)
    tl.store(lse + row, lse_rows, mask=row < rows)


@triton.jit
def add_parts(
    program,
    terms,
    total,
    strides,
    parts,
    batches,
    heads,
    size,
    head_dim,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Add up BLOCK rows of a gradient, terms [parts, rows, head_dim], dense, in their order."""
    rows = batches * heads * size
    start = program * BLOCK
    row = start + tl.arange(0, BLOCK)
    cols = tl.arange(0, BLOCK_D)[None, :]
    mask = tile_mask(start, rows, head_dim, PADDED, BLOCK, BLOCK_D, False)
    acc = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    for part in range(parts):
        origin = (tl.cast(part, tl.int64) * rows + row)[:, None] * multiple(head_dim, PADDED)
        acc += tl.load(terms + origin + cols, mask=mask, other=0.0)
    store_dense(total, strides, row, heads, size, cols, acc, mask, PADDED)


@triton.jit(do_not_specialize=SIZES)
def flashattn_bwd_sum(
    dk_terms,
    dv_terms,
    dq_terms,
    dk,
    dv,
    dq,
    dk_strides,
    dv_strides,
    dq_strides,
    parts,
    parts_kv,
    batches,
    heads,
    kv_heads,
    seq_q,
    seq_kv,
    head_dim,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Add up the parts of gradients, of dk and dv, of dq, or of all; None are those without.

    Args:
        dk_terms: fp32, of ``parts`` parts of the queries.
        dv_terms: likewise.
        dq_terms: fp32, of ``parts_kv`` parts of the keys.
        dk: [batches, kv_heads, seq_kv, head_dim].
        dv: likewise.
        dq: [batches, heads, seq_q, head_dim].
        dk_strides: of its batches, heads and rows.
        dv_strides: likewise.
        dq_strides: likewise.
        parts: of the queries.
        parts_kv: of the keys.
        batches: of all.
        heads: of dq.
        kv_heads: of dk and dv.
        seq_q: rows of dq.
        seq_kv: of dk and dv.
        head_dim: D.
        PADDED: see ``primitives.tile_mask``.
        BLOCK: rows of a program.
        BLOCK_D: columns of a program.
    """
    program = tl.program_id(0)
    if dk is not None:
        programs = tl.cdiv(batches * kv_heads * seq_kv, BLOCK)
        if program < programs:
            add_parts(
                program, dk_terms, dk, dk_strides, parts, batches, kv_heads, seq_kv, head_dim,
                PADDED, BLOCK, BLOCK_D,
            )  # fmt: skip
        elif program < 2 * programs:
            add_parts(
                program - programs, dv_terms, dv, dv_strides, parts, batches, kv_heads, seq_kv,
                head_dim, PADDED, BLOCK, BLOCK_D,
            )  # fmt: skip
        program -= 2 * programs
    if dq is not None:
        if program >= 0:
            add_parts(
                program, dq_terms, dq, dq_strides, parts_kv, batches, heads, seq_q, head_dim,
                PADDED, BLOCK, BLOCK_D,
            )  # fmt: skip


class Written(NamedTuple):
    """A gradient that programs write.

    Args:
        parts: in which they do so; 1: it is whole.
        shape: its own.
        strides: likewise.
    """

    parts: int
    shape: torch.Size
    strides: tuple[int, ...]


Tensors = Sequence[torch.Tensor]


def combine_launch(parts: int, shape: torch.Size, strides: tuple[int, ...]) -> Launch:
    """Prepare the launch of flashattn_combine for o of this shape and strides."""
    batch, heads, seq_q, head_dim = shape
    rows = batch * heads * seq_q
    return Launch(
        flashattn_combine,
        triton.cdiv(rows, COMBINE_BLOCK),
        [None] * 4,
        (strides[:3], parts, rows, heads, seq_q),
        launch.row_options(head_dim, [strides[:3]], COMBINE_BLOCK, COMBINE_WARPS),
    )


def adding(written: Sequence[Written]) -> Callable[[Tensors, Tensors], None]:
    """Prepare the launch of flashattn_bwd_sum.

    Args:
        written: dk and dv, dq, or all three; at least one of them in parts.

    Returns:
        What fills such gradients, the second argument, from their parts, the first.
    """
    first = 2 if len(written) == 1 else 0  # of the kernel's dk, dv and dq
    added = {first + i: x for i, x in enumerate(written) if x.parts > 1}
    dk, dv, dq = (added.get(i, Written(1, torch.Size((0, 1, 1)), (0, 0, 0))) for i in range(3))
    strides = [x.strides[:3] for x in (dk, dv, dq)]
    add = Launch(
        flashattn_bwd_sum,
        sum(triton.cdiv(x.shape[:3].numel(), SUM_BLOCK) for x in added.values()),
        [None] * 6,
        (
            *strides,
            *(dk.parts, dq.parts, written[0].shape[0]),
            *(dq.shape[1], dk.shape[1], dq.shape[2], dk.shape[2]),
        ),
        launch.row_options(written[0].shape[3], strides, SUM_BLOCK, SUM_WARPS),
    )

    def fill(terms: Tensors, grads: Tensors) -> None:
        add(*(x[i - first] if i in added else None for x in (terms, grads) for i in range(3)))

    return fill


def room(grads: Tensors, parts: Sequence[int]) -> list[torch.Tensor]:
    """Return what parts of gradients are written to: the gradient itself where it is whole."""
    return [
        x
        if n == 1
        else torch.empty((n * len(x), *x.shape[1:]), dtype=torch.float32, device=x.device)
        for x, n in zip(grads, parts, strict=True)
    ]
