"""The gradients, in two deterministic passes: algorithm 2 of FlashAttention-2 (Dao, 2023), split.

``flashattn_bwd_delta`` prepares two numbers a row; ``flashattn_bwd_dkdv`` owns a tile of keys and
walks over queries; ``flashattn_bwd_dq`` owns a tile of queries and walks over keys. Each output
element is written by one program, in one order: no atomics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from flashattn.kernels import launch
from flashattn.kernels.cut import cut_all, cut_like
from flashattn.kernels.launch import PLANS, Facts, Launch, Like, dense, facts
from flashattn.kernels.passes import Pass, numbers, pitch, walk
from flashattn.kernels.primitives import (
    LOG2E,
    SIZES,
    dot,
    dot_transposed,
    load_one,
    load_rows,
    load_tile,
    program_tile,
    seen_keys,
    store_rows,
    store_tile,
    visited_keys,
)
from flashattn.kernels.tiles import Kernel, Tile, block_d

DELTA_BLOCK = 64  # rows of o and dO that a program of flashattn_bwd_delta reduces
DELTA_WARPS = 4


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
    """Write lse2 = lse * log2(e) and delta = rowsum(dO * O) - dlse; a program takes BLOCK rows.

    Rows that see no key, and those that only pad, get lse2 = +inf and delta = 0: their P is then 0.
    """
    block, batch, head = program_tile(pitch // BLOCK, heads, False)
    start, row = block * BLOCK, batch * heads + head
    o_tile = load_one(
        o, o_strides, batch, head, start, seq_q,
        head_dim, PADDED, BLOCK, BLOCK_D, False, False,
    )  # fmt: skip
    do_tile = load_one(
        grad_o, grad_o_strides, batch, head, start, seq_q,
        head_dim, PADDED, BLOCK, BLOCK_D, False, False,
    )  # fmt: skip
    delta_rows = tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1)
    rows = start + tl.arange(0, BLOCK)
    offsets = row.to(tl.int64) * seq_q + rows
    lse_rows = tl.load(lse + offsets, mask=rows < seq_q, other=float("-inf"))
    if grad_lse is not None:
        delta_rows -= tl.load(grad_lse + offsets, mask=rows < seq_q, other=0.0)
    dead = lse_rows == float("-inf")
    store_rows(
        lse2, row, pitch, start, pitch, tl.where(dead, float("inf"), lse_rows * LOG2E), BLOCK
    )
    store_rows(delta, row, pitch, start, pitch, tl.where(dead, 0.0, delta_rows), BLOCK)


@triton.jit
def fold_queries(
    state,
    k_tile,
    v_tile,
    q,
    grad_o,
    lse2,
    delta,
    q_strides,
    grad_o_strides,
    batch,
    head,
    row,
    pitch,
    start_kv,
    first,
    end,
    seq_q,
    diagonal,
    scale_log2,
    head_dim,
    PADDED: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """Add what queries ``first ... end`` of one head give to (dk, dv) of a tile of keys.

    The scores are computed transposed, [BLOCK_KV, BLOCK_Q], so that P and dS come out of one
    product in the layout in which the next one takes them.
    """
    dk, dv = state
    for start_q in tl.range(first, end, BLOCK_Q):
        q_tile = load_tile(
            q, q_strides, batch, head, start_q, seq_q,
            head_dim, PADDED, BLOCK_Q, BLOCK_D, False, DESCRIPTORS, PRECISION,
        )  # fmt: skip
        lse2_rows = load_rows(lse2, row, pitch, start_q, BLOCK_Q)
        s = dot_transposed(k_tile, q_tile, PRECISION)
        p = tl.exp2(s * scale_log2 - lse2_rows[None, :])
        if MASKED:
            rows = start_q + tl.arange(0, BLOCK_Q)[None, :]
            p = tl.where(start_kv + tl.arange(0, BLOCK_KV)[:, None] <= rows + diagonal, p, 0.0)
        do_tile = load_tile(
            grad_o, grad_o_strides, batch, head, start_q, seq_q,
            head_dim, PADDED, BLOCK_Q, BLOCK_D, False, DESCRIPTORS, PRECISION,
        )  # fmt: skip
        dv = dot(p, do_tile, dv, PRECISION)
        dp = dot_transposed(v_tile, do_tile, PRECISION)
        delta_rows = load_rows(delta, row, pitch, start_q, BLOCK_Q)
        ds = p * (dp - delta_rows[None, :])
        dk = dot(ds, q_tile, dk, PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=SIZES)
def flashattn_bwd_dkdv(
    q,
    k,
    v,
    grad_o,
    lse2,
    delta,
    dk,
    dv,
    q_strides,
    k_strides,
    v_strides,
    grad_o_strides,
    dk_strides,
    dv_strides,
    heads,
    group,
    seq_q,
    seq_kv,
    pitch,
    diagonal,
    batches,
    chunk,
    scale,
    scale_log2,
    head_dim,
    PADDED: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Compute dk and dv; a program owns a tile of keys of one head and sums its query heads.

    With SPLIT only those of its part, of ``chunk`` queries; dk and dv have a batch for each part.
    """
    kv_heads = heads // group
    # Under a causal mask the first keys are seen by most queries, so they come first.
    block, place, kv_head = program_tile(tl.cdiv(seq_kv, BLOCK_KV), kv_heads, False)
    start_kv = block * BLOCK_KV
    if SPLIT:
        batch = place % batches
    else:
        batch = place
    k_tile = load_tile(
        k, k_strides, batch, kv_head, start_kv, seq_kv,
        head_dim, PADDED, BLOCK_KV, BLOCK_D, False, DESCRIPTORS, PRECISION,
    )  # fmt: skip
    v_tile = load_tile(
        v, v_strides, batch, kv_head, start_kv, seq_kv,
        head_dim, PADDED, BLOCK_KV, BLOCK_D, False, DESCRIPTORS, PRECISION,
    )  # fmt: skip
    dk_acc = tl.zeros([BLOCK_KV, BLOCK_D], tl.float32)
    dv_acc = tl.zeros([BLOCK_KV, BLOCK_D], tl.float32)
    first, full = 0, 0  # queries from ``full`` on see all of the tile, those before ``first`` none
    if CAUSAL:
        first = tl.maximum(start_kv - diagonal, 0) // BLOCK_Q * BLOCK_Q
        full = tl.maximum(start_kv + BLOCK_KV - 1 - diagonal, 0)
        full = tl.minimum(tl.cdiv(full, BLOCK_Q) * BLOCK_Q, tl.cdiv(seq_q, BLOCK_Q) * BLOCK_Q)
    end = seq_q
    if SPLIT:  # a chunk is whole tiles
        begin = place // batches * chunk
        end = tl.minimum(end, begin + chunk)
        first = tl.maximum(first, begin)
        full = tl.maximum(tl.minimum(full, end), first)
    # Of what comes cut, two loops would keep the addresses of twice as many operands.
    ONE_LOOP: tl.constexpr = CAUSAL and PRECISION == "cut"
    if ONE_LOOP:
        full = end
    for head in tl.range(kv_head * group, kv_head * group + group):
        row = batch * heads + head
        if CAUSAL:
            dk_acc, dv_acc = fold_queries(
                (dk_acc, dv_acc), k_tile, v_tile, q, grad_o, lse2, delta, q_strides, grad_o_strides,
                batch, head, row, pitch, start_kv, first, full, seq_q, diagonal, scale_log2,
                head_dim, PADDED, BLOCK_D, BLOCK_Q, BLOCK_KV, True, PRECISION, DESCRIPTORS,
            )  # fmt: skip
        if not ONE_LOOP:
            dk_acc, dv_acc = fold_queries(
                (dk_acc, dv_acc), k_tile, v_tile, q, grad_o, lse2, delta, q_strides, grad_o_strides,
                batch, head, row, pitch, start_kv, full, end, seq_q, diagonal, scale_log2,
                head_dim, PADDED, BLOCK_D, BLOCK_Q, BLOCK_KV, False, PRECISION, DESCRIPTORS,
            )  # fmt: skip
    store_tile(
        dk, dk_strides, place, kv_head, start_kv, seq_kv, dk_acc * scale,
        head_dim, PADDED, BLOCK_KV, BLOCK_D,
    )  # fmt: skip
    store_tile(
        dv, dv_strides, place, kv_head, start_kv, seq_kv, dv_acc,
        head_dim, PADDED, BLOCK_KV, BLOCK_D,
    )  # fmt: skip


@triton.jit
def fold_keys_dq(
    dq,
    q_tile,
    do_tile,
    lse2_rows,
    delta_rows,
    k,
    v,
    k_strides,
    v_strides,
    batch,
    kv_head,
    start_q,
    first,
    end,
    seq_kv,
    diagonal,
    scale_log2,
    head_dim,
    PADDED: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """Add what keys ``first ... end`` give to dq of a tile of queries."""
    for start_kv in tl.range(first, end, BLOCK_KV):
        k_tile = load_tile(
            k, k_strides, batch, kv_head, start_kv, seq_kv,
            head_dim, PADDED, BLOCK_KV, BLOCK_D, not MASKED, DESCRIPTORS, PRECISION,
        )  # fmt: skip
        s = dot_transposed(q_tile, k_tile, PRECISION)  # [BLOCK_Q, BLOCK_KV]
        p = tl.exp2(s * scale_log2 - lse2_rows[:, None])
        if MASKED:  # keys that do not exist, too: their P could be inf, and inf * 0 is NaN
            seen = seen_keys(start_q, start_kv, seq_kv, diagonal, BLOCK_Q, BLOCK_KV, CAUSAL)
            p = tl.where(seen, p, 0.0)
        v_tile = load_tile(
            v, v_strides, batch, kv_head, start_kv, seq_kv,
            head_dim, PADDED, BLOCK_KV, BLOCK_D, not MASKED, DESCRIPTORS, PRECISION,
        )  # fmt: skip
        dp = dot_transposed(do_tile, v_tile, PRECISION)
        ds = p * (dp - delta_rows[:, None])
        dq = dot(ds, k_tile, dq, PRECISION)
    return dq


@triton.jit(do_not_specialize=SIZES)
def flashattn_bwd_dq(
    q,
    k,
    v,
    grad_o,
    lse2,
    delta,
    dq,
    q_strides,
    k_strides,
    v_strides,
    grad_o_strides,
    dq_strides,
    heads,
    group,
    seq_q,
    seq_kv,
    pitch,
    diagonal,
    batches,
    chunk,
    scale,
    scale_log2,
    head_dim,
    PADDED: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Compute dq; a program owns a tile of queries of one head.

    With SPLIT only what a part of its keys gives, ``chunk`` of them; dq has a batch for each part.
    """
    block, place, head = program_tile(tl.cdiv(seq_q, BLOCK_Q), heads, CAUSAL)
    if SPLIT:
        batch, first = place % batches, place // batches * chunk
    else:
        batch, first = place, 0
    start_q, row = block * BLOCK_Q, batch * heads + head
    q_tile = load_tile(
        q, q_strides, batch, head, start_q, seq_q,
        head_dim, PADDED, BLOCK_Q, BLOCK_D, False, DESCRIPTORS, PRECISION,
    )  # fmt: skip
    do_tile = load_tile(
        grad_o, grad_o_strides, batch, head, start_q, seq_q,
        head_dim, PADDED, BLOCK_Q, BLOCK_D, False, DESCRIPTORS, PRECISION,
    )  # fmt: skip
    lse2_rows = load_rows(lse2, row, pitch, start_q, BLOCK_Q)
    delta_rows = load_rows(delta, row, pitch, start_q, BLOCK_Q)
    acc = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    full, end = visited_keys(start_q, seq_q, seq_kv, diagonal, BLOCK_Q, BLOCK_KV, CAUSAL)
    if SPLIT:  # a chunk is whole tiles
        full = tl.maximum(tl.minimum(full, first + chunk), first)
        end = tl.minimum(end, first + chunk)
    if PRECISION == "cut":
        full = first
    else:
        acc = fold_keys_dq(
            acc, q_tile, do_tile, lse2_rows, delta_rows, k, v, k_strides, v_strides, batch, head //
            group, start_q, first, full, seq_kv, diagonal, scale_log2,
            head_dim, PADDED, BLOCK_D, BLOCK_Q, BLOCK_KV, CAUSAL, False, PRECISION, DESCRIPTORS,
        )  # fmt: skip
    acc = fold_keys_dq(
        acc, q_tile, do_tile, lse2_rows, delta_rows, k, v, k_strides, v_strides, batch, head //
        group, start_q, full, end, seq_kv, diagonal, scale_log2,
        head_dim, PADDED, BLOCK_D, BLOCK_Q, BLOCK_KV, CAUSAL, True, PRECISION, DESCRIPTORS,
    )  # fmt: skip
    store_tile(
        dq, dq_strides, place, head, start_q, seq_q, acc * scale, head_dim, PADDED, BLOCK_Q, BLOCK_D
    )


@dataclass(frozen=True, kw_only=True)
class Recomputation:
    """What both passes find P and dS from.

    q, k, v and grad_o have dense rows; lse2 and delta are ``row_terms``; parts are those that a
    pass is split into at most, None lets ``splitting.split`` say.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad_o: torch.Tensor
    lse2: torch.Tensor
    delta: torch.Tensor
    diagonal: int | None
    scale: float
    precision: str
    parts: int | None = None

    def launch(self, kernel: Kernel, tile: Tile | None, *grads: torch.Tensor) -> None:
        """Launch a pass that writes ``grads``."""
        inputs = self.q, self.k, self.v, self.grad_o
        strides = tuple(x.stride() for x in grads)
        precision = launch.input_precision(self.precision, self.q.dtype)
        plan = prepare(
            kernel,
            facts(*inputs),
            strides,
            self.diagonal,
            self.scale,
            precision,
            tile,
            self.parts,
        )
        operands = cut_all(*inputs) if plan.cut else inputs
        plan((*operands, self.lse2, self.delta), grads)


@lru_cache(PLANS)
def prepare(
    kernel: Kernel,
    given: tuple[Facts, ...],
    strides: tuple[tuple[int, ...], ...],
    diagonal: int | None,
    scale: float,
    precision: str,
    tile: Tile | None = None,
    parts: int | None = None,
) -> Pass:
    """Prepare the launch of flashattn_bwd_dkdv or flashattn_bwd_dq.

    Args:
        kernel: which.
        given: what is to be known of q, k, v and grad_o.
        strides: of the gradients that it writes.
        diagonal: as in ``forward``.
        scale: as in ``forward``.
        precision: as ``launch.input_precision`` returns it.
        tile: instead of the table's.
        parts: as in ``Recomputation``.
    """
    inputs = [Like(*x) for x in given]
    q, k = inputs[:2]
    tile = tile or launch.pick_tile(
        kernel, *inputs, causal=diagonal is not None, precision=precision
    )
    cut = launch.cuts(tile, q.dtype, precision)
    operands = [cut_like(x) if cut else x for x in inputs]
    rows = (tile.block_q, tile.block_kv, tile.block_kv, tile.block_q)
    way = walk(kernel, q, k, (tile.block_q, tile.block_kv), strides, parts)
    fold = Launch(
        flashattn_bwd_dkdv if kernel == "bwd_dkdv" else flashattn_bwd_dq,
        way.programs,
        [*(launch.loaded(tile, n) for n in rows), *[None] * (2 + len(strides))],
        (
            *(x[:3] for x in (*(like.strides for like in operands), *way.strides)),
            *numbers(q, k, way, diagonal, scale),
        ),
        {
            "head_dim": q.shape[3],
            "CAUSAL": diagonal is not None,
            "PRECISION": "cut" if cut else precision,
            "SPLIT": way.parts > 1,
            **tile.options(q.shape[3]),
        },
    )
    return Pass(fold, cut, way.parts, way.sums)


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
    _delta(facts(*given))(o, grad_o, lse, grad_lse, lse2, delta)
    return lse2, delta


@lru_cache(PLANS)
def _delta(given: tuple[Facts, ...]) -> Launch:
    """Prepare the launch of flashattn_bwd_delta.

    Args:
        given: what is to be known of o, grad_o, lse, and grad_lse where there is one.
    """
    o, grad_o = Like(*given[0]), Like(*given[1])
    batch, heads, seq_q, head_dim = o.shape
    padded, d = pitch(seq_q), block_d(head_dim)
    return Launch(
        flashattn_bwd_delta,
        padded // DELTA_BLOCK * batch * heads,
        [None] * 6,
        (o.strides[:3], grad_o.strides[:3], heads, seq_q, padded),
        {
            "head_dim": head_dim,
            "PADDED": head_dim < d,
            "BLOCK": DELTA_BLOCK,
            "BLOCK_D": d,
            "num_warps": DELTA_WARPS,
        },
    )


def key_gradients(
    given: Recomputation, tile: Tile | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch flashattn_bwd_dkdv with the table's tile or another: the gradients of k and v."""
    dk, dv = torch.empty_like(given.k), torch.empty_like(given.v)
    given.launch("bwd_dkdv", tile, dk, dv)
    return dk, dv


def query_gradients(given: Recomputation, tile: Tile | None = None) -> torch.Tensor:
    """Launch flashattn_bwd_dq with the table's tile or another: the gradient of q."""
    dq = torch.empty_like(given.q)
    given.launch("bwd_dq", tile, dq)
    return dq


Grads = tuple[torch.Tensor, torch.Tensor | None]
Saved = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Plan = Callable[[Grads, Saved], Gradients]


def backward(grads: Grads, saved: Saved, **how: Any) -> Gradients:
    """Launch what ``plan`` returns for the same arguments.

    Returns:
        The gradients of q, k and v, in their dtype.
    """
    return plan(grads, saved, **how)(grads, saved)


def plan(
    grads: Grads,
    saved: Saved,
    *,
    diagonal: int | None,
    scale: float,
    precision: str = "auto",
    deterministic: bool = True,
    passes: Callable[..., Pass] = prepare,
) -> Plan:
    """Return what launches the three kernels, for these and for all that are ``Like`` them.

    Args:
        grads: of o [B, H, T, D], copied once if the last dimension is not dense, and of lse
            [B, H, T], copied if not contiguous, or None.
        saved: q, k, v as ``forward`` took them, o and lse as it returned them, copied likewise.
        diagonal: as in ``forward.plan``.
        scale: as in ``forward.plan``.
        precision: as in ``forward.plan``.
        deterministic: it is, whatever is asked.
        passes: ``prepare``, or what prepares other kernels.
    """
    del deterministic
    precision = launch.input_precision(precision, saved[0].dtype)
    return _plan(known(grads, saved), diagonal, scale, precision, passes)


def known(grads: Grads, saved: Saved) -> tuple[Facts, ...]:
    """Return the facts of q, k, v, grad_o, o, lse, and grad_lse where there is one."""
    (grad_o, grad_lse), (q, k, v, o, lse) = grads, saved
    given = q, k, v, grad_o, o, lse
    return facts(*given) if grad_lse is None else facts(*given, grad_lse)


@lru_cache(PLANS)
def _plan(
    given: tuple[Facts, ...],
    diagonal: int | None,
    scale: float,
    precision: str,
    passes: Callable[..., Pass],
) -> Plan:
    """Choose what answers.

    Args:
        given: what is ``known``.
        diagonal: as in ``plan``.
        scale: as in ``plan``.
        precision: as ``launch.input_precision`` returns it.
        passes: as in ``plan``.
    """
    likes = [Like(*x) for x in given]
    q, k, v = likes[:3]
    launch.check_device(q.device)
    if 0 in q.shape or 0 in k.shape:
        return _no_gradients
    if not readable(likes[:5], likes[5:]):

        def copied(grads: Grads, saved: Saved) -> Gradients:
            grads, saved = copies(grads, saved)
            how: dict[str, Any] = {"diagonal": diagonal, "scale": scale, "precision": precision}
            return backward(grads, saved, **how, passes=passes)

        return copied
    options = diagonal, scale, precision
    dq, dk, dv = (torch.empty_like(x.meta).stride() for x in (q, k, v))
    return _Backward(
        row_shape(q.shape),
        q.device,
        _delta((given[4], given[3], *given[5:])),
        passes("bwd_dkdv", given[:4], (dk, dv), *options),
        passes("bwd_dq", given[:4], (dq,), *options),
    )


def readable(rows: Sequence[Like], numbers: Sequence[Like]) -> bool:
    """Return whether kernels can read tensors: rows of D, and one number a row."""
    return all(x.dense for x in rows) and all(x.meta.is_contiguous() for x in numbers)


def copies(grads: Grads, saved: Saved) -> tuple[Grads, Saved]:
    """Return copies of tensors that are not ``readable``, and the others."""
    (grad_o, grad_lse), (q, k, v, o, lse) = grads, saved
    grads = dense(grad_o), None if grad_lse is None else grad_lse.contiguous()
    return grads, (dense(q), dense(k), dense(v), dense(o), lse.contiguous())


def _no_gradients(grads: Grads, saved: Saved) -> Gradients:
    """Answer without a launch: there is no query, or no key."""
    del grads
    q, k, v = saved[:3]
    return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


@dataclass(frozen=True)
class _Backward:
    """Allocates what a backward fills, and launches it.

    Args:
        rows: sizes of lse2 and delta.
        device: of all.
        delta: flashattn_bwd_delta.
        keys: the pass of flashattn_bwd_dkdv.
        queries: that of flashattn_bwd_dq.
    """

    rows: tuple[int, int]
    device: torch.device
    delta: Launch
    keys: Pass
    queries: Pass

    def __call__(self, grads: Grads, saved: Saved) -> Gradients:
        """Return dq, dk and dv."""
        (grad_o, grad_lse), (q, k, v, o, lse) = grads, saved
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        lse2 = torch.empty(*self.rows, dtype=torch.float32, device=self.device)
        delta = torch.empty_like(lse2)
        with launch.on_device(q):
            self.delta(o, grad_o, lse, grad_lse, lse2, delta)
            cut = cut_all(q, k, v, grad_o) if self.keys.cut or self.queries.cut else ()
            for step, grads_of in ((self.keys, (dk, dv)), (self.queries, (dq,))):
                operands = cut if step.cut else (q, k, v, grad_o)
                step((*operands, lse2, delta), grads_of)
        return dq, dk, dv
