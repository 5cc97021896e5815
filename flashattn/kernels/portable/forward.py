"""flashattn_fwd: algorithm 1 of FlashAttention-2 (Dao, 2023), one tile of queries per program.

Where that makes fewer programs than the GPU has room for, the keys are split as well, as in
Flash-Decoding (Dao, Haziza, Massa, Sizov, 2023): each program folds a part of the keys, and
flashattn_combine puts the parts together by their largest scores, always in the same order.
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
from flashattn.kernels.portable.bf16x3 import cut_all, cut_like
from flashattn.kernels.portable.mask import seen_keys, visited_keys
from flashattn.kernels.portable.memory import load_tile, store_rows, store_tile
from flashattn.kernels.portable.mma import WIDE_FP32, cut_parts, dot, dot_transposed
from flashattn.kernels.portable.scheduler import banded_tile
from flashattn.kernels.portable.softmax import add_compensated, normalized
from flashattn.kernels.tiles import Tile

SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # below it, -inf * scale is NaN on the GPU


@triton.jit
def fold_keys(
    state,
    q_tile,
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
    scale_sign,
    head_dim,
    PADDED: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
    POSITIVE_SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """Fold keys ``first ... end`` into the online softmax, (acc, m, l, lost); ``m`` is in base 2.

    In fp32 ``lost`` is what rounding has added to ``l``, a sum of as many terms as there are tiles.
    """
    acc, m, l, lost = state
    COMPENSATED: tl.constexpr = cut_parts(PRECISION) > 0 or q_tile.dtype == tl.float32
    for start_kv in tl.range(first, end, BLOCK_KV):
        k_tile = load_tile(
            k, k_strides, batch, kv_head, start_kv, seq_kv,
            head_dim, PADDED, BLOCK_KV, BLOCK_D, not MASKED, DESCRIPTORS, PRECISION,
        )  # fmt: skip
        s = dot_transposed(q_tile, k_tile, PRECISION)  # [BLOCK_Q, BLOCK_KV]
        if not POSITIVE_SCALE:  # what is positive does not move the maximum
            s = s * scale_sign
        if MASKED:
            seen = seen_keys(start_q, start_kv, seq_kv, diagonal, BLOCK_Q, BLOCK_KV, CAUSAL)
            s = tl.where(seen, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * scale_log2)
        finite = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row that has seen no key yet
        p = tl.exp2(s * scale_log2 - finite[:, None])
        alpha = tl.exp2(m - finite)
        if COMPENSATED:
            l, lost = add_compensated(l * alpha, lost * alpha, tl.sum(p, 1))
        else:
            l = l * alpha + tl.sum(p, 1)
        v_tile = load_tile(
            v, v_strides, batch, kv_head, start_kv, seq_kv,
            head_dim, PADDED, BLOCK_KV, BLOCK_D, not MASKED, DESCRIPTORS, PRECISION,
        )  # fmt: skip
        acc = dot(p, v_tile, acc * alpha[:, None], PRECISION)
        m = m_new
    return acc, m, l, lost


@triton.jit(do_not_specialize=SIZES)
def flashattn_fwd(
    q,
    k,
    v,
    o,
    lse,
    q_strides,
    k_strides,
    v_strides,
    o_strides,
    heads,
    group,
    seq_q,
    seq_kv,
    diagonal,
    batches,
    chunk,
    scale_log2,
    scale_sign,
    head_dim,
    PADDED: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    CAUSAL: tl.constexpr,
    POSITIVE_SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Compute o and lse; a program folds the keys that one tile of queries of one head sees.

    With SPLIT only those of its part, of ``chunk`` keys; o has a batch for each part, of sums that
    nothing has divided, and lse holds m of each part, and then l of each.
    """
    CUT: tl.constexpr = cut_parts(PRECISION) > 0
    block, place, head = banded_tile(
        tl.program_id(0), tl.num_programs(0), tl.cdiv(seq_q, BLOCK_Q), heads, CAUSAL, CAUSAL and CUT
    )
    start_q = block * BLOCK_Q
    if SPLIT:
        batch, first = place % batches, place // batches * chunk
    else:
        batch, first = place, 0
    q_tile = load_tile(
        q,
        q_strides,
        batch,
        head,
        start_q,
        seq_q,
        head_dim,
        PADDED,
        BLOCK_Q,
        BLOCK_D,
        False,
        DESCRIPTORS,
        PRECISION,
    )
    acc = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    m = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_Q], tl.float32)
    lost = tl.zeros([BLOCK_Q], tl.float32)
    full, end = visited_keys(start_q, seq_q, seq_kv, diagonal, BLOCK_Q, BLOCK_KV, CAUSAL)
    if SPLIT:  # a chunk is whole tiles
        full = tl.maximum(tl.minimum(full, first + chunk), first)
        end = tl.minimum(end, first + chunk)
    if CUT or (PRECISION == "bf16x6" and BLOCK_D >= WIDE_FP32):
        full = first
    else:
        acc, m, l, lost = fold_keys(
            (acc, m, l, lost), q_tile, k, v, k_strides, v_strides, batch, head // group,
            start_q, first, full, seq_kv, diagonal, scale_log2, scale_sign,
            head_dim, PADDED, BLOCK_D, BLOCK_Q, BLOCK_KV, CAUSAL, False, POSITIVE_SCALE,
            PRECISION, DESCRIPTORS,
        )  # fmt: skip
    acc, m, l, lost = fold_keys(
        (acc, m, l, lost), q_tile, k, v, k_strides, v_strides, batch, head // group,
        start_q, full, end, seq_kv, diagonal, scale_log2, scale_sign,
        head_dim, PADDED, BLOCK_D, BLOCK_Q, BLOCK_KV, CAUSAL, True, POSITIVE_SCALE,
        PRECISION, DESCRIPTORS,
    )  # fmt: skip
    row = place * heads + head
    if SPLIT:  # m and l apart: a logsumexp in fp32 would round what a part weighs
        rows = tl.num_programs(0) // tl.cdiv(seq_q, BLOCK_Q)
        store_rows(lse, row, seq_q, start_q, seq_q, m, BLOCK_Q)
        store_rows(lse, row + rows, seq_q, start_q, seq_q, l, BLOCK_Q)
    else:
        acc, m = normalized(acc, m, l)
        store_rows(lse, row, seq_q, start_q, seq_q, m, BLOCK_Q)
    store_tile(o, o_strides, place, head, start_q, seq_q, acc, head_dim, PADDED, BLOCK_Q, BLOCK_D)


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
    parts: int | None = None,
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
        parts: to split the keys into, at most; None lets ``splitting.split`` say.
    """
    precision = launch.input_precision(precision, q.dtype)
    return _plan(facts(q, k, v), diagonal, scale, precision, tile, parts)


@lru_cache(PLANS)
def _plan(
    given: tuple[Facts, ...],
    diagonal: int | None,
    scale: float,
    precision: str,
    tile: Tile | None,
    parts: int | None,
) -> Plan:
    """Choose what answers q, k and v."""
    q, k, v = (Like(*x) for x in given)
    launch.check_device(q.device)
    (_, heads, seq_q, _), (_, kv_heads, seq_kv, _) = q.shape, k.shape
    if 0 in q.shape or seq_kv == 0:
        return _sees_nothing
    options = scale, precision, tile, parts
    if not (q.dense and k.dense and v.dense):

        def copied(*inputs: torch.Tensor) -> Outputs:
            copies = [dense(x) for x in inputs]
            return _plan(facts(*copies), diagonal, *options)(*copies)

        return copied
    o = torch.empty_like(q.meta)
    if seq_q > 1 or heads == kv_heads:
        return Forward(q, _fill(q, k, v, o.stride(), diagonal, *options))
    # One query: the heads that share keys are rows of one tile, and read them once. It sees all
    # keys up to one, without a mask.
    seen = seq_kv if diagonal is None else min(seq_kv, diagonal + 1)
    if seen <= 0:
        return _sees_nothing
    views = partial(_one_query, kv_heads, seen)
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


def _one_query(
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
        fold: flashattn_fwd.
        parts: shape of o for each part of the keys.
        combine: flashattn_combine.
    """

    fold: Launch
    parts: tuple[int, ...]
    combine: Launch

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor
    ) -> None:
        """Fill o and lse."""
        o_partial = torch.empty(self.parts, device=q.device, dtype=torch.float32)
        lse_partial = torch.empty((2, *self.parts[:3]), device=q.device, dtype=torch.float32)
        self.fold(q, k, v, o_partial, lse_partial)
        self.combine(o_partial, lse_partial, o, lse)


@dataclass(frozen=True)
class Cut:
    """What is asked for inputs in fp32, and takes them cut into so many parts."""

    fill: Fill
    parts: int

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor
    ) -> None:
        """Fill o and lse."""
        q, k, v = cut_all(q, k, v, parts=self.parts)
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
    parts: int | None,
) -> Fill:
    """Choose a tile and a split, and prepare the launches."""
    batch, heads, seq_q, head_dim = q.shape
    kv_heads, seq_kv = k.shape[1:3]
    causal = diagonal is not None
    if tile is None:
        kernel, tile = choice.choose(q, k, v, causal=causal, precision=precision)
    else:
        kernel = choice.usual(q)
    cut = launch.cuts(tile, q.dtype, precision)
    operands = [cut_like(x, cut) if cut else x for x in (q, k, v)]
    programs = choice.programs(q, tile)
    parts = parts or choice.most_parts(kernel, q, k, tile, causal=causal)
    parts, chunk = splitting.split(kernel, programs, seq_kv, tile.block_kv, q.device, parts)
    packed = (heads * seq_q * head_dim, seq_q * head_dim, head_dim)
    strides = *(x.strides[:3] for x in operands), packed if parts > 1 else o_strides[:3]
    scale_log2 = scale * LOG2E.value
    # The product with a sign is exact: were scores rounded, those in a tile with a mask would be,
    # and in others not, where the compiler joins the product with the difference from m.
    size = max(abs(scale_log2), SMALLEST_SCALE)
    fold = Launch(
        flashattn_fwd,
        programs * parts,
        [
            launch.loaded(tile, tile.block_q),
            launch.loaded(tile, tile.block_kv),
            launch.loaded(tile, tile.block_kv),
            None,
            None,
        ],
        (
            *strides,
            heads,
            heads // kv_heads,
            seq_q,
            seq_kv,
            diagonal or 0,
            batch,
            chunk,
            size,
            scale_log2 / size,
        ),
        {
            "head_dim": head_dim,
            "CAUSAL": causal,
            "POSITIVE_SCALE": scale_log2 >= SMALLEST_SCALE,
            "PRECISION": f"cut{cut}" if cut else precision,
            "SPLIT": parts > 1,
            **tile.options(head_dim, strides),
        },
    )
    if parts == 1:
        return Cut(fold, cut) if cut else fold
    combined = combine.combine_launch(parts, q.shape, o_strides)
    split = _Split(fold, (parts * batch, heads, seq_q, head_dim), combined)
    return Cut(split, cut) if cut else split
