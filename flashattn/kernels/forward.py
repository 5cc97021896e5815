"""flashattn_fwd: algorithm 1 of FlashAttention-2 (Dao, 2023), one tile of queries per program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flashattn.kernels import launch
from flashattn.kernels.primitives import (
    LN2,
    LOG2E,
    SIZES,
    dot,
    load_tile,
    program_tile,
    seen_keys,
    store_rows,
    store_tile,
    visited_keys,
)
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
    """Fold keys ``first ... end`` into (acc, m, l), the online softmax; ``m`` is in base 2."""
    acc, m, l = state
    if POSITIVE_SCALE:  # it does not move the maximum, so it folds into exp2's multiply-add
        factor = scale_log2
    else:
        factor = 1.0
    for start_kv in tl.range(first, end, BLOCK_KV):
        k_tile = load_tile(
            k, k_strides, batch, kv_head, start_kv, seq_kv,
            head_dim, PADDED, BLOCK_KV, BLOCK_D, not MASKED, DESCRIPTORS,
        )  # fmt: skip
        s = dot(q_tile, k_tile.T, None, PRECISION)  # [BLOCK_Q, BLOCK_KV]
        if not POSITIVE_SCALE:
            s = s * scale_log2
        if MASKED:
            seen = seen_keys(start_q, start_kv, seq_kv, diagonal, BLOCK_Q, BLOCK_KV, CAUSAL)
            s = tl.where(seen, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * factor)
        finite = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row that has seen no key yet
        p = tl.exp2(s * factor - finite[:, None])
        alpha = tl.exp2(m - finite)
        l = l * alpha + tl.sum(p, 1)
        v_tile = load_tile(
            v, v_strides, batch, kv_head, start_kv, seq_kv,
            head_dim, PADDED, BLOCK_KV, BLOCK_D, not MASKED, DESCRIPTORS,
        )  # fmt: skip
        acc = dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], PRECISION)
        m = m_new
    return acc, m, l


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
    scale_log2,
    head_dim,
    PADDED: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    CAUSAL: tl.constexpr,
    POSITIVE_SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """Compute o and lse; a program folds all the keys that one tile of queries of one head sees."""
    block, batch, head = program_tile(tl.cdiv(seq_q, BLOCK_Q), heads, CAUSAL)
    start_q = block * BLOCK_Q
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
    )
    acc = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    m = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_Q], tl.float32)
    full, end = visited_keys(start_q, seq_q, seq_kv, diagonal, BLOCK_Q, BLOCK_KV, CAUSAL)
    acc, m, l = fold_keys(
        (acc, m, l), q_tile, k, v, k_strides, v_strides, batch, head // group,
        start_q, 0, full, seq_kv, diagonal, scale_log2,
        head_dim, PADDED, BLOCK_D, BLOCK_Q, BLOCK_KV, CAUSAL, False, POSITIVE_SCALE,
        PRECISION, DESCRIPTORS,
    )  # fmt: skip
    acc, m, l = fold_keys(
        (acc, m, l), q_tile, k, v, k_strides, v_strides, batch, head // group,
        start_q, full, end, seq_kv, diagonal, scale_log2,
        head_dim, PADDED, BLOCK_D, BLOCK_Q, BLOCK_KV, CAUSAL, True, POSITIVE_SCALE,
        PRECISION, DESCRIPTORS,
    )  # fmt: skip
    dead = l == 0.0  # rows that see no key
    l = tl.where(dead, 1.0, l)
    acc = acc / l[:, None]
    store_tile(o, o_strides, batch, head, start_q, seq_q, acc, head_dim, PADDED, BLOCK_Q, BLOCK_D)
    lse_tile = tl.where(dead, float("-inf"), (m + tl.log2(l)) * LN2)
    store_rows(lse, batch * heads + head, seq_q, start_q, seq_q, lse_tile, BLOCK_Q)


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    diagonal: int | None,
    scale: float,
    precision: str = "auto",
    tile: Tile | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch flashattn_fwd.

    Args:
        q: [B, H, T, D], checked, the last dimension dense.
        k: [B, G, S, D], likewise.
        v: [B, G, S, D], likewise.
        diagonal: query t sees keys 0 ... t + diagonal; None lets it see all.
        scale: factor on the scores.
        precision: of fp32 products, see ``launch.input_precision``.
        tile: instead of the table's.

    Returns:
        o [B, H, T, D] in q's dtype, and lse [B, H, T] in fp32.
    """
    batch, heads, seq_q, head_dim = q.shape
    seq_kv = k.shape[2]
    o, lse = torch.empty_like(q), torch.empty(q.shape[:3], device=q.device, dtype=torch.float32)
    if lse.numel() == 0 or seq_kv == 0:
        return o.zero_(), lse.fill_(-torch.inf)
    tile = tile or launch.pick_tile("fwd", q, k, v, causal=diagonal is not None)
    scale_log2 = scale * LOG2E.value
    with launch.on_device(q):
        flashattn_fwd[(triton.cdiv(seq_q, tile.block_q) * batch * heads,)](
            launch.operand(q, tile, tile.block_q),
            launch.operand(k, tile, tile.block_kv),
            launch.operand(v, tile, tile.block_kv),
            o,
            lse,
            *(x.stride()[:3] for x in (q, k, v, o)),
            heads,
            heads // k.shape[1],
            seq_q,
            seq_kv,
            diagonal or 0,
            scale_log2,
            head_dim=head_dim,
            CAUSAL=diagonal is not None,
            POSITIVE_SCALE=scale_log2 >= SMALLEST_SCALE,
            PRECISION=launch.input_precision(precision, q.dtype),
            **tile.options(head_dim),
        )
    return o, lse
