"""flashattn_fwd: algorithm 1 of FlashAttention-2 (Dao, 2023), one tile of queries per program.

Where that makes fewer programs than the GPU has room for, the keys are split as well, as in
Flash-Decoding (Dao, Haziza, Massa, Sizov, 2023): each program takes one split of the keys, and
flashattn_combine weighs the splits by their largest scores, always in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import triton
import triton.language as tl

from flashattn.kernels import choice, launch, splitting
from flashattn.kernels.constants import LOG2E, SIZES
from flashattn.kernels.launch import PLANS, Facts, Launch, Like, dense, facts
from flashattn.kernels.portable import combine
from flashattn.kernels.portable.bf16x3 import decompose_all, decomposed_like
from flashattn.kernels.portable.config import Config, ForwardLayout
from flashattn.kernels.portable.mask import apply_mask, key_tiles
from flashattn.kernels.portable.memory import load_tile, store_rows, store_tile
from flashattn.kernels.portable.mma import ONE_LOOP_FP32, dot, dot_transposed
from flashattn.kernels.portable.scheduler import own_tile, split_begin
from flashattn.kernels.portable.softmax import add_compensated, finite_max, normalized
from flashattn.kernels.tiles import Tile

SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # below it, -inf * scale is NaN on the GPU


@triton.jit
def mainloop(
    state,
    q_tile,
    k,
    v,
    layout,
    batch,
    kv_head,
    start_q,
    first,
    end,
    seq_kv,
    right,
    scale,
    MASKED: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """Update the online softmax (acc, m, l, l_error) by keys ``first ... end``; m is in base 2.

    In fp32 l_error is what rounding has added to l, a sum of as many terms as there are tiles.
    """
    acc, m, l, l_error = state
    scale_log2, sign = scale
    BLOCK_KV: tl.constexpr = CONFIG.BLOCK_KV
    COMPENSATED: tl.constexpr = CONFIG.TERMS > 0 or q_tile.dtype == tl.float32
    for start_kv in tl.range(first, end, BLOCK_KV):
        at = batch, kv_head, start_kv
        k_tile = load_tile(k, layout.k, at, seq_kv, layout.head_dim, BLOCK_KV, not MASKED, CONFIG)
        s = dot_transposed(q_tile, k_tile, CONFIG)  # [BLOCK_Q, BLOCK_KV]
        if sign is not None:  # a positive scale does not move the maximum
            s = s * sign
        if MASKED:
            s = apply_mask(
                s, start_q, start_kv, right, seq_kv, float("-inf"), CONFIG.BLOCK_Q, BLOCK_KV
            )
        m_new = tl.maximum(m, tl.max(s, 1) * scale_log2)
        finite = finite_max(m_new)
        p = tl.exp2(s * scale_log2 - finite[:, None])
        alpha = tl.exp2(m - finite)
        if COMPENSATED:
            l, l_error = add_compensated(l * alpha, l_error * alpha, tl.sum(p, 1))
        else:
            l = l * alpha + tl.sum(p, 1)
        v_tile = load_tile(v, layout.v, at, seq_kv, layout.head_dim, BLOCK_KV, not MASKED, CONFIG)
        acc = dot(p, v_tile, acc * alpha[:, None], CONFIG)
        m = m_new
    return acc, m, l, l_error


@triton.jit(do_not_specialize=SIZES)
def flashattn_fwd(
    q,
    k,
    v,
    o,
    lse,
    layout,
    heads,
    group,
    seq_q,
    seq_kv,
    right,
    batches,
    split_len,
    scale,
    CONFIG: tl.constexpr,
):
    """Compute o and lse; a program owns one tile of queries of one head.

    With split_len it sees only the keys of its split; o has a batch for each split, not divided by
    l, and lse holds m of each split, and then l of each.
    """
    BLOCK_Q: tl.constexpr = CONFIG.BLOCK_Q
    CAUSAL: tl.constexpr = right is not None
    start_q, out_batch, batch, head = own_tile(
        tl.program_id(0), tl.num_programs(0), seq_q, heads, batches, split_len,
        BLOCK_Q, CAUSAL, CAUSAL and CONFIG.TERMS > 0,
    )  # fmt: skip
    begin = split_begin(out_batch, batches, split_len)
    q_tile = load_tile(
        q, layout.q, (batch, head, start_q), seq_q, layout.head_dim, BLOCK_Q, False, CONFIG
    )
    acc = tl.zeros([BLOCK_Q, CONFIG.BLOCK_D], tl.float32)
    m = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_Q], tl.float32)
    l_error = tl.zeros([BLOCK_Q], tl.float32)
    _, full_begin, full_end, end = key_tiles(
        start_q, right, seq_q, seq_kv, begin, split_len, BLOCK_Q, CONFIG.BLOCK_KV
    )
    if CONFIG.TERMS > 0 or (CONFIG.PRECISION == "bf16x6" and CONFIG.BLOCK_D >= ONE_LOOP_FP32):
        full_end = full_begin
    else:
        acc, m, l, l_error = mainloop(
            (acc, m, l, l_error), q_tile, k, v, layout, batch, head // group, start_q,
            full_begin, full_end, seq_kv, right, scale, False, CONFIG,
        )  # fmt: skip
    acc, m, l, l_error = mainloop(
        (acc, m, l, l_error), q_tile, k, v, layout, batch, head // group, start_q,
        full_end, end, seq_kv, right, scale, True, CONFIG,
    )  # fmt: skip
    row = out_batch * heads + head
    if split_len is None:
        acc, m = normalized(acc, m, l)
        store_rows(lse, row, seq_q, start_q, seq_q, m, BLOCK_Q)
    else:  # m and l apart: a logsumexp in fp32 would round the weight of a split
        rows = tl.num_programs(0) // tl.cdiv(seq_q, BLOCK_Q)
        store_rows(lse, row, seq_q, start_q, seq_q, m, BLOCK_Q)
        store_rows(lse, row + rows, seq_q, start_q, seq_q, l, BLOCK_Q)
    store_tile(o, layout.o, (out_batch, head, start_q), seq_q, acc, layout.head_dim, CONFIG.PADDED,
               BLOCK_Q, CONFIG.BLOCK_D)  # fmt: skip


Outputs = tuple[torch.Tensor, torch.Tensor]
Plan = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Outputs]
Fill = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **how: Any) -> Outputs:
    """Launch what ``plan`` returns for the same arguments.

    Returns:
        o [B, H, T, D] in q's dtype, and lse [B, H, T] in fp32.
    """
    return plan(q, k, v, **how)(q, k, v)


def plan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    diagonal: int | None,
    scale: float,
    precision: str = "auto",
    tile: Tile | None = None,
    num_splits: int | None = None,
) -> Plan:
    """Return what launches flashattn_fwd, and flashattn_combine where keys are split.

    It does for q, k and v, and for all that are ``Like`` them.

    Args:
        q: [B, H, T, D], checked; copied once if the last dimension is not dense.
        k: [B, G, S, D], likewise.
        v: [B, G, S, D], likewise.
        diagonal: query t sees keys 0 ... t + diagonal; None lets it see all.
        scale: factor on the scores.
        precision: of fp32 products, see ``launch.input_precision``.
        tile: instead of the table's.
        num_splits: to split the keys into, at most; None lets ``splitting.split`` say.
    """
    precision = launch.input_precision(precision, q.dtype)
    return _plan(facts(q, k, v), diagonal, scale, precision, tile, num_splits)


@lru_cache(PLANS)
def _plan(
    given: tuple[Facts, ...],
    diagonal: int | None,
    scale: float,
    precision: str,
    tile: Tile | None,
    num_splits: int | None,
) -> Plan:
    """Choose what answers q, k and v."""
    q, k, v = (Like(*x) for x in given)
    launch.check_device(q.device)
    (_, heads, seq_q, _), (_, kv_heads, seq_kv, _) = q.shape, k.shape
    if 0 in q.shape or seq_kv == 0:
        return _sees_nothing
    options = scale, precision, tile, num_splits
    if not (q.dense and k.dense and v.dense):

        def copied(*inputs: torch.Tensor) -> Outputs:
            copies = [dense(x) for x in inputs]
            return _plan(facts(*copies), diagonal, *options)(*copies)

        return copied
    o = torch.empty_like(q.meta)
    if seq_q > 1 or heads == kv_heads:
        return Forward(q, _fill(q, k, v, o.stride(), diagonal, *options))
    # GQA packing of one query: the heads that share keys are rows of one tile, which reads those
    # keys once. The query sees all keys up to one, so no mask is needed.
    seen = seq_kv if diagonal is None else min(seq_kv, diagonal + 1)
    if seen <= 0:
        return _sees_nothing
    views = partial(_pack_gqa, kv_heads, seen)
    *inputs, o_rows = views(q.meta, k.meta, v.meta, o)
    q_rows, k_seen, v_seen = (
        like._replace(shape=x.shape, strides=x.stride())
        for like, x in zip((q, k, v), inputs, strict=True)
    )
    fill = _fill(q_rows, k_seen, v_seen, o_rows.stride(), None, *options)

    def viewed(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor
    ) -> None:
        fill(*views(q, k, v, o), lse.view(q_rows.shape[:3]))

    return Forward(q, viewed)


def _sees_nothing(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Outputs:
    """Answer without a launch: there is no query, or none that sees a key."""
    del k, v
    lse = torch.full(q.shape[:3], -torch.inf, device=q.device, dtype=torch.float32)
    return torch.zeros_like(q), lse


def _pack_gqa(
    kv_heads: int, seen: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q and o with the heads that share keys as rows, and the keys and values seen."""
    q, o = (x.squeeze(2).unflatten(1, (kv_heads, -1)) for x in (q, o))
    return q, k[:, :, :seen], v[:, :, :seen], o


class Forward:
    """Allocates o and lse, and fills them.

    Args:
        q: what the inputs' q are like.
        fill: of q, k, v, o and lse.
    """

    def __init__(self, q: Like, fill: Fill) -> None:
        """Know the sizes of lse."""
        self._rows, self._device, self._fill = tuple(q.shape[:3]), q.device, fill

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Outputs:
        """Return o and lse."""
        o = torch.empty_like(q)
        lse = torch.empty(*self._rows, dtype=torch.float32, device=self._device)
        with launch.on_device(q):
            self._fill(q, k, v, o, lse)
        return o, lse


@dataclass(frozen=True)
class _Split:
    """flashattn_fwd on splits of the keys, then flashattn_combine.

    Args:
        kernel: flashattn_fwd.
        shape: of o for all splits.
        combine: flashattn_combine.
    """

    kernel: Launch
    shape: tuple[int, ...]
    combine: Launch

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor
    ) -> None:
        """Fill o and lse."""
        o_partial = torch.empty(self.shape, device=q.device, dtype=torch.float32)
        lse_partial = torch.empty((2, *self.shape[:3]), device=q.device, dtype=torch.float32)
        self.kernel(q, k, v, o_partial, lse_partial)
        self.combine(o_partial, lse_partial, o, lse)


@dataclass(frozen=True)
class Cut:
    """Decomposes fp32 inputs into bf16 terms for what takes them so.

    Args:
        fill: of the terms of q, k and v, and of o and lse.
        terms: of each number.
    """

    fill: Fill
    terms: int

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor
    ) -> None:
        """Fill o and lse."""
        q, k, v = decompose_all(q, k, v, terms=self.terms)
        self.fill(q, k, v, o, lse)


def _fill(
    q: Like,
    k: Like,
    v: Like,
    o_strides: tuple[int, ...],
    diagonal: int | None,
    scale: float,
    precision: str,
    tile: Tile | None,
    num_splits: int | None,
) -> Fill:
    """Choose a tile and a split, and prepare the launches."""
    batch, heads, seq_q, head_dim = q.shape
    kv_heads, seq_kv = k.shape[1:3]
    causal = diagonal is not None
    if tile is None:
        row, tile = choice.choose(q, k, v, causal=causal, precision=precision)
    else:
        row = choice.usual(q)
    terms = launch.cuts(tile, q.dtype, precision)
    operands = [decomposed_like(x, terms) if terms else x for x in (q, k, v)]
    programs = choice.programs(q, tile)
    num_splits = num_splits or choice.most_parts(row, q, k, tile, causal=causal)
    num_splits, split_len = splitting.split(
        row, programs, seq_kv, tile.block_kv, q.device, num_splits
    )
    packed = (heads * seq_q * head_dim, seq_q * head_dim, head_dim)
    strides = *(x.strides[:3] for x in operands), packed if num_splits > 1 else o_strides[:3]
    blocks = tile.block_q, tile.block_kv, tile.block_kv
    scale_log2 = scale * LOG2E.value
    # The product with a sign is exact: were scores rounded, those in a tile with a mask would be,
    # and in others not, where the compiler joins the product with the difference from m.
    size = max(abs(scale_log2), SMALLEST_SCALE)
    kernel = Launch(
        flashattn_fwd,
        programs * num_splits,
        [*(launch.loaded(tile, n) for n in blocks), None, None],
        (
            ForwardLayout._make((*strides, head_dim)),
            heads,
            heads // kv_heads,
            seq_q,
            seq_kv,
            diagonal,
            batch,
            split_len if num_splits > 1 else None,
            (size, None if scale_log2 >= SMALLEST_SCALE else scale_log2 / size),
        ),
        {
            "CONFIG": Config.of(tile, head_dim, strides, precision, terms),
            **tile.compiler_options(),
        },
    )
    if num_splits == 1:
        return Cut(kernel, terms) if terms else kernel
    combined = combine.combine_launch(num_splits, q.shape, o_strides)
    split = _Split(kernel, (num_splits * batch, heads, seq_q, head_dim), combined)
    return Cut(split, terms) if terms else split
