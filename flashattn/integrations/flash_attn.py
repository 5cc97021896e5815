"""flash-attn's functions on our kernels: its names, argument order, defaults, layouts and results.

``from flashattn.integrations.flash_attn import flash_attn_func`` takes the place of ``from
flash_attn import flash_attn_func``. Positional arguments are those of flash-attn 2.8;
``flash_attn_func`` and ``flash_attn_varlen_func`` take keywords of FlashAttention-4, too. Every
argument that would change the result and that we lack raises NotImplementedError.

Causal masks and windows are aligned at the bottom right, and both ends of a window are inclusive. A
query that sees no key has softmax_lse = -inf, where flash-attn 2 has +inf.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import pad

from flashattn.api import attention
from flashattn.problem import check_among

WindowSize = tuple[int | None, int | None]
Returned = tuple[torch.Tensor, ...] | tuple[torch.Tensor, torch.Tensor, None] | torch.Tensor
Pair = tuple[torch.Tensor, torch.Tensor | None]
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

DENSE = ("batch", "seqlen", "nheads", "headdim")
PACKED = ("total", "nheads", "headdim")
UNSUPPORTED = {
    "dropout_p": "there is no dropout",
    "alibi_slopes": "scores have no bias",
    "block_table": "keys and values are not read from pages",
    "page_table": "keys and values are not read from pages",
    "seqused_q": "documents are used whole",
    "seqused_k": "documents are used whole",
    "score_mod": "scores are not modified",
    "mask_mod": "the only masks are causal and window_size",
    "block_sparse_tensors": "the only masks are causal and window_size",
}


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
    """Attend; tensors are read where they are, without a copy.

    Args:
        q: [batch, seqlen_q, nheads, headdim]; fp32, fp16, bf16, on a CPU fp64, too.
        k: [batch, seqlen_k, nheads_k, headdim]; nheads_k divides nheads.
        v: [batch, seqlen_k, nheads_k, headdim_v], which is out's last size, too.
        dropout_p: 0.0.
        softmax_scale: factor on the scores; None is headdim ** -0.5.
        causal: hide the keys after a query's own position, i + seqlen_k - seqlen_q.
        window_size: (left, right), how many keys before and after its own position a query sees;
            -1 or None is no bound. With ``causal``, right is 0.
        softcap: bound on the scores, see ``attention``; 0.0 is none.
        alibi_slopes: None.
        deterministic: whether gradients shall have the same bits every time.
        return_attn_probs: return (out, softmax_lse, S_dmask).
        learnable_sink: [nheads], a logit of each head without a value; differentiable.
        score_mod: None.
        mask_mod: None.
        block_sparse_tensors: None.
        return_lse: return (out, softmax_lse), unless ``return_attn_probs`` asks for more.

    Returns:
        out [batch, seqlen_q, nheads, headdim], contiguous; softmax_lse [batch, nheads, seqlen_q] in
        fp32, differentiable; S_dmask None, as it would be the score matrix, to show a dropout that
        does not exist. A query that sees no key has out = 0.

    Raises:
        NotImplementedError: an argument of flash-attn's that we lack; the message names it.
        ValueError: an argument that does not fit.
    """
    how = _keywords(
        softmax_scale, causal, window_size, deterministic, return_attn_probs or return_lse,
        dropout_p=dropout_p, softcap=softcap, alibi_slopes=alibi_slopes,
        learnable_sink=learnable_sink, score_mod=score_mod, mask_mod=mask_mod,
        block_sparse_tensors=block_sparse_tensors,
    )  # fmt: skip
    _check_shapes(q, k, v, DENSE)
    return _returned(_attend(q, k, v, **how), return_attn_probs)


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
    """Attend as ``flash_attn_func`` to kv [batch, seqlen_k, 2, nheads_k, headdim]."""
    k, v = _unpacked("kv", kv, 2, DENSE)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


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
    """Attend as ``flash_attn_func`` to qkv [batch, seqlen, 3, nheads, headdim]."""
    q, k, v = _unpacked("qkv", qkv, 3, DENSE)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


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
    """Attend within each of the documents that lie one behind the other.

    Document i has the queries cu_seqlens_q[i] ... cu_seqlens_q[i + 1] - 1 and likewise the keys;
    any may be empty. This reads both cu_seqlens on the host, which waits for the GPU, and launches
    once for each document. Tokens behind the last document have out = 0, softmax_lse = -inf, and
    pass no gradient.

    Args:
        q: [total_q, nheads, headdim].
        k: [total_k, nheads_k, headdim].
        v: [total_k, nheads_k, headdim_v].
        cu_seqlens_q: integers [documents + 1], from 0, never falling, up to total_q at most.
        cu_seqlens_k: likewise, up to total_k.
        max_seqlen_q: ignored.
        max_seqlen_k: ignored.
        dropout_p: see ``flash_attn_func``.
        softmax_scale: likewise.
        causal: likewise, in each document by itself.
        window_size: likewise.
        softcap: likewise.
        alibi_slopes: likewise.
        deterministic: likewise.
        return_attn_probs: likewise.
        block_table: None.
        seqused_q: None.
        seqused_k: None.
        page_table: None.
        learnable_sink: see ``flash_attn_func``.
        score_mod: None.
        mask_mod: None.
        block_sparse_tensors: None.
        return_lse: see ``flash_attn_func``.

    Returns:
        out [total_q, nheads, headdim], contiguous; softmax_lse [nheads, total_q]; S_dmask None.

    Raises:
        NotImplementedError: see ``flash_attn_func``.
        ValueError: likewise.
    """
    del max_seqlen_q, max_seqlen_k
    how = _keywords(
        softmax_scale, causal, window_size, deterministic, return_attn_probs or return_lse,
        dropout_p=dropout_p, softcap=softcap, alibi_slopes=alibi_slopes, block_table=block_table,
        seqused_q=seqused_q, seqused_k=seqused_k, page_table=page_table,
        learnable_sink=learnable_sink, score_mod=score_mod, mask_mod=mask_mod,
        block_sparse_tensors=block_sparse_tensors,
    )  # fmt: skip
    _check_shapes(q, k, v, PACKED)
    pair = _attend_documents(q, k, v, cu_seqlens_q, cu_seqlens_k, **how)
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
    """Attend as ``flash_attn_varlen_func`` to kv [total_k, 2, nheads_k, headdim]."""
    k, v = _unpacked("kv", kv, 2, PACKED)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
        causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


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
    """Attend as ``flash_attn_varlen_func`` to qkv [total, 3, nheads, headdim]."""
    q, k, v = _unpacked("qkv", qkv, 3, PACKED)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale,
        causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def _keywords(
    scale: float | None,
    causal: bool,
    window_size: WindowSize,
    deterministic: bool,
    return_lse: bool,
    **features: Any,
) -> dict[str, Any]:
    """Check what is no tensor; return the keywords of ``_attend``."""
    on = {name: x for name, x in features.items() if x is not None and not _is_zero(x)}
    for name in on:
        if name in UNSUPPORTED:
            raise NotImplementedError(f"{name}: {UNSUPPORTED[name]}")
    check_among("causal", causal, (False, True))
    bounds = list(window_size) if isinstance(window_size, (tuple, list)) else []
    if list(map(_is_bound, bounds)) != [True, True]:
        wanted = "wanted (left, right), each an int from 0 on, or -1 or None for no bound"
        raise ValueError(f"window_size: {wanted}, got {window_size!r}")
    left, right = (None if x == -1 else x for x in bounds)
    on["sink"] = on.pop("learnable_sink", None)
    options = {"scale": scale, "deterministic": deterministic, "return_lse": return_lse, **on}
    return {"left": left, "right": 0 if causal else right, **options}


def _is_bound(x: object) -> bool:
    return x is None or (isinstance(x, int) and not isinstance(x, bool) and x >= -1)


def _is_zero(x: object) -> bool:
    return isinstance(x, (int, float)) and x == 0


def _check_shapes(q: object, k: object, v: object, layout: tuple[str, ...]) -> None:
    """Check here what ``attention`` would describe in its own order of dimensions."""
    tensors = []
    for name, x in {"q": q, "k": k, "v": v}.items():
        if not isinstance(x, torch.Tensor) or x.ndim != len(layout):
            raise ValueError(f"{name}: wanted a tensor [{', '.join(layout)}], got {_shown(x)}")
        tensors.append(x)
    *batch, _, _, headdim = tensors[0].shape
    wanted = [*batch, *tensors[1].shape[-3:-1], headdim]
    for name, x in zip("kv", tensors[1:], strict=True):
        wanted[-1] = headdim if name == "k" else x.shape[-1]  # values may have a width of their own
        if list(x.shape) != wanted:
            raise ValueError(f"{name}: wanted shape {wanted}, got {_shown(x)}")


def _unpacked(name: str, x: object, count: int, layout: tuple[str, ...]) -> tuple[Any, ...]:
    """Return the tensors that are stacked before the last two dimensions, as views."""
    if isinstance(x, torch.Tensor) and x.ndim == len(layout) + 1 and x.shape[-3] == count:
        return x.unbind(-3)
    wanted = ", ".join((*layout[:-2], str(count), *layout[-2:]))
    raise ValueError(f"{name}: wanted a tensor [{wanted}], got {_shown(x)}")


def _shown(x: object) -> str:
    return str(list(x.shape)) if isinstance(x, torch.Tensor) else type(x).__name__


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    left: int | None,
    right: int | None,
    sink: torch.Tensor | None,
    **options: Any,
) -> Pair:
    """Return out [B, T, H, D] and lse [B, H, T] or None; positions are aligned at the bottom right.

    Without ``causal``, ``attention`` aligns a window at the top left, S - T keys earlier. A bound
    there cannot be negative: keys before every query's window, or else queries that see no key, are
    cut off, which leaves a window of 0 on that side.
    """
    dead = 0
    if right == 0:
        options |= {"causal": "bottom_right", "window": (left, None)}
    else:
        shift = k.shape[1] - q.shape[1]
        dead = 0 if right is None else max(0, -shift - right)
        hidden = 0 if left is None else max(0, shift - left)
        q, k, v = q[:, dead:], k[:, hidden:], v[:, hidden:]
        shift += dead - hidden
        window = (None if left is None else left - shift, None if right is None else right + shift)
        options |= {"window": window}
    result = attention(*(x.transpose(1, 2) for x in (q, k, v)), sink=sink, **options)
    o, lse = result if isinstance(result, tuple) else (result, None)
    o = o.transpose(1, 2).contiguous()  # as it is where o lies as q does
    if dead:
        o = pad(o, (0, 0, 0, 0, dead, 0))
        lse = None if lse is None else pad(lse, (dead, 0), value=-torch.inf)
        if lse is not None and sink is not None:
            lse = torch.where(lse == -torch.inf, sink.to(lse.dtype)[:, None], lse)
    return o, lse


def _attend_documents(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    **how: Any,
) -> Pair:
    """Return out [total, H, D] and lse [H, total] or None: one document after the other."""
    queries = _lengths("cu_seqlens_q", cu_seqlens_q, len(q))
    keys = _lengths("cu_seqlens_k", cu_seqlens_k, len(k))
    if len(keys) != len(queries):
        got = f"{len(queries)} and {len(keys)}"
        raise ValueError(f"cu_seqlens_k: wanted as many numbers as cu_seqlens_q has, got {got}")
    *documents, (behind, _, _) = zip(q.split(queries), k.split(keys), v.split(keys), strict=True)
    pairs = [_attend(*(x[None] for x in document), **how) for document in documents]
    o = torch.cat([*(o[0] for o, _ in pairs), behind.new_zeros((*behind.shape[:-1], v.shape[-1]))])
    lse = [x[0] for _, x in pairs if x is not None]
    if not how["return_lse"]:
        return o, None
    no_lse = torch.full(behind.shape[1::-1], -torch.inf, device=q.device)
    return o, torch.cat([*lse, no_lse], dim=1)


def _lengths(name: str, cu_seqlens: torch.Tensor, total: int) -> list[int]:
    """Return the lengths of all documents, and of what is behind the last, on the host."""
    ends = cu_seqlens.tolist()
    wanted = f"wanted a list of integers that begins with 0 and never falls, up to {total}"
    if not (isinstance(ends, list) and ends and all(isinstance(x, int) for x in ends)):
        raise ValueError(f"{name}: {wanted}, got {ends!r}")
    lengths = [after - before for before, after in pairwise([*ends, total])]
    if ends[0] != 0 or min(lengths) < 0:
        raise ValueError(f"{name}: {wanted}, got {ends}")
    return lengths


def _returned(pair: Pair, return_attn_probs: bool) -> Returned:
    o, lse = pair
    if lse is None:
        return o
    return (o, lse, None) if return_attn_probs else (o, lse)
