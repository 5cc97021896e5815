"""flash-attn's functions on our kernels: its names, argument order, defaults, layouts and results.

``from flashattn.integrations.flash_attn import flash_attn_func`` replaces ``from flash_attn import
flash_attn_func``. Positional arguments are those of flash-attn 2.8; ``flash_attn_func`` and
``flash_attn_varlen_func`` also take keywords of FlashAttention-4. Unsupported arguments that would
change the result raise NotImplementedError.

Causal masks and windows are aligned at the bottom right, and both ends of a window are inclusive. A
query that sees no key has softmax_lse = -inf, where flash-attn 2 has +inf.
"""

from __future__ import annotations

from typing import Any

import torch

from flashattn.api import attention
from flashattn.integrations.arguments import (
    DENSE,
    PACKED,
    WindowSize,
    check_shapes,
    keywords,
    unpacked,
)
from flashattn.integrations.kvcache import flash_attn_with_kvcache
from flashattn.integrations.packed import Used, bounds_of_packed, heads_first, tokens_first
from flashattn.mask import UNBOUNDED, Mask
from flashattn.masks import of_bounds, rows

Bound = int | None
Returned = tuple[torch.Tensor, ...] | tuple[torch.Tensor, torch.Tensor, None] | torch.Tensor
Pair = tuple[torch.Tensor, torch.Tensor | None]
__all__ = (
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
)


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    learnable_sink: torch.Tensor | None = None,
    score_mod: Any = None,
    mask_mod: Any = None,
    block_sparse_tensors: Any = None,
    return_lse: bool = False,
) -> Returned:
    """Compute attention; the tensors are read in place, without a copy.

    Args:
        q: [batch, seqlen_q, nheads, headdim]; fp32, fp16 or bf16, and on a CPU also fp64.
        k: [batch, seqlen_k, nheads_k, headdim]; nheads_k divides nheads.
        v: [batch, seqlen_k, nheads_k, headdim_v]; headdim_v is also the last size of out.
        dropout_p: must be 0.0.
        softmax_scale: factor on the scores; None means headdim ** -0.5.
        causal: hide the keys after a query's own position, i + seqlen_k - seqlen_q.
        window_size: (left, right), the number of keys that a query sees before and after its own
            position; -1 or None means no bound. With ``causal``, right is 0.
        softcap: bound on the scores, see ``attention``; 0.0 means no bound.
        alibi_slopes: fp32 [nheads] or [batch, nheads], see ``attention``.
        deterministic: whether gradients must have the same bits every time.
        return_attn_probs: return (out, softmax_lse, S_dmask).
        learnable_sink: [nheads], one extra logit per head without a value; differentiable.
        score_mod: must be None.
        mask_mod: must be None.
        block_sparse_tensors: must be None.
        return_lse: return (out, softmax_lse), unless ``return_attn_probs`` asks for more.

    Returns:
        out [batch, seqlen_q, nheads, headdim], contiguous; softmax_lse [batch, nheads, seqlen_q] in
        fp32, differentiable; S_dmask is None: it would be the score matrix with its dropout, which
        is not supported. A query that sees no key has out = 0.

    Raises:
        NotImplementedError: an unsupported argument of flash-attn is set; the message names it.
        ValueError: an argument does not fit.
    """
    how = keywords(
        softmax_scale, causal, window_size, deterministic, return_attn_probs or return_lse,
        dropout_p=dropout_p, softcap=softcap, learnable_sink=learnable_sink, score_mod=score_mod,
        mask_mod=mask_mod, block_sparse_tensors=block_sparse_tensors,
    )  # fmt: skip
    check_shapes({"q": q, "k": k, "v": v}, DENSE)
    return _returned(_attend(q, k, v, alibi_slopes=alibi_slopes, **how), return_attn_probs)


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Returned:
    """Call ``flash_attn_func`` with k and v from kv [batch, seqlen_k, 2, nheads_k, headdim]."""
    k, v = unpacked("kv", kv, 2, DENSE)
    how = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    return flash_attn_func(q, k, v, *how, return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Returned:
    """Call ``flash_attn_func`` with q, k and v from qkv [batch, seqlen, 3, nheads, headdim]."""
    q, k, v = unpacked("qkv", qkv, 3, DENSE)
    how = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    return flash_attn_func(q, k, v, *how, return_attn_probs)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | torch.Tensor,
    max_seqlen_k: int | torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
    *,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    learnable_sink: torch.Tensor | None = None,
    score_mod: Any = None,
    mask_mod: Any = None,
    block_sparse_tensors: Any = None,
    return_lse: bool = False,
) -> Returned:
    """Compute attention within each of the packed documents.

    Document i has queries cu_seqlens_q[i] ... cu_seqlens_q[i + 1] - 1, and keys likewise; either
    may be empty. All documents are one launch. On a GPU the host neither waits for the lengths nor
    checks them (see ``resolve.check_documents``). Tokens in no document, and tokens that are not
    used, have out = 0 and softmax_lse = -inf, and pass no gradient.

    Args:
        q: [total_q, nheads, headdim].
        k: [total_k, nheads_k, headdim].
        v: [total_k, nheads_k, headdim_v].
        cu_seqlens_q: integers [documents + 1] from 0 to at most total_q that never decrease.
        cu_seqlens_k: likewise, up to total_k.
        max_seqlen_q: ignored.
        max_seqlen_k: ignored.
        dropout_p: see ``flash_attn_func``.
        softmax_scale: likewise.
        causal: likewise, within each document.
        window_size: likewise.
        softcap: likewise.
        alibi_slopes: must be None.
        deterministic: see ``flash_attn_func``.
        return_attn_probs: likewise.
        block_table: must be None.
        seqused_q: integers [documents], the number of queries that are used in each document, from
            its start; the last one is aligned with the last used key. None means all.
        seqused_k: likewise for the keys. Keys and values that are not used may be NaN.
        page_table: must be None.
        learnable_sink: see ``flash_attn_func``.
        score_mod: must be None.
        mask_mod: must be None.
        block_sparse_tensors: must be None.
        return_lse: see ``flash_attn_func``.

    Returns:
        out [total_q, nheads, headdim], contiguous; softmax_lse [nheads, total_q]; S_dmask is None.

    Raises:
        NotImplementedError: see ``flash_attn_func``.
        ValueError: likewise.
    """
    del max_seqlen_q, max_seqlen_k
    how = keywords(
        softmax_scale, causal, window_size, deterministic, return_attn_probs or return_lse,
        dropout_p=dropout_p, softcap=softcap, alibi_slopes=alibi_slopes, block_table=block_table,
        page_table=page_table, learnable_sink=learnable_sink, score_mod=score_mod,
        mask_mod=mask_mod, block_sparse_tensors=block_sparse_tensors,
    )  # fmt: skip
    check_shapes({"q": q, "k": k, "v": v}, PACKED)
    lengths, used = (cu_seqlens_q, cu_seqlens_k), (seqused_q, seqused_k)
    pair = _attend_packed(q, k, v, lengths, used, **how)
    return _returned(pair, return_attn_probs)


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | torch.Tensor,
    max_seqlen_k: int | torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Returned:
    """Call ``flash_attn_varlen_func`` with k and v from kv [total_k, 2, nheads_k, headdim]."""
    k, v = unpacked("kv", kv, 2, PACKED)
    how = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *how, return_attn_probs
    )


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int | torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Returned:
    """Call ``flash_attn_varlen_func`` with q, k and v from qkv [total, 3, nheads, headdim]."""
    q, k, v = unpacked("qkv", qkv, 3, PACKED)
    how = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *how, return_attn_probs
    )


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, left: Bound, right: Bound, **options: Any
) -> Pair:
    """Return out [B, T, H, D] and lse [B, H, T] or None; positions are aligned at the bottom right.

    ``attention`` aligns a window there only with ``causal``, so other windows are given as rows.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    queries, keys = q.shape[2], k.shape[2]
    if right == 0:
        options |= {"causal": "bottom_right", "window": (left, None)}
    elif queries == keys or (left, right) == UNBOUNDED:
        options |= {"window": (left, right)}
    else:
        t = torch.arange(queries, device=q.device)
        ends = Mask(left, right, "bottom_right").over(queries, keys).keys_of(t)
        options["mask"] = rows(*(x + torch.zeros_like(t) for x in ends))
    o, lse = _pair(attention(q, k, v, **options))
    return o.transpose(1, 2).contiguous(), lse  # no copy if o is laid out like q


def _attend_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: tuple[torch.Tensor, torch.Tensor],
    used: tuple[Used, Used],
    *,
    left: Bound,
    right: Bound,
    **options: Any,
) -> Pair:
    """Return out [total, H, D] and lse [H, total] or None."""
    q, k, v = map(heads_first, (q, k, v))
    bounds = bounds_of_packed(q, k, lengths, Mask(left, right, "bottom_right"), used)
    o, lse = _pair(attention(q, k, v, mask=of_bounds(bounds), **options))
    return tokens_first(o).contiguous(), None if lse is None else lse[0]


def _pair(result: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> Pair:
    return result if isinstance(result, tuple) else (result, None)


def _returned(pair: Pair, return_attn_probs: bool) -> Returned:
    o, lse = pair
    if lse is None:
        return o
    return (o, lse, None) if return_attn_probs else (o, lse)
