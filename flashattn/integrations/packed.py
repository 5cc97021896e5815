"""Packed documents as flash-attn and PyTorch describe them: tokens [total, heads, D] and lengths.

They become one problem of batch 1 whose bounds are computed on the device, so that the host does
not wait and a CUDA graph may be replayed with other lengths.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashattn.bounds import Bounds
from flashattn.integrations.arguments import check_integers
from flashattn.mask import Mask
from flashattn.resolve import bounds_of, check_documents, kept

Used = Tensor | None
CU_SEQLENS = ("cu_seqlens_q", "cu_seqlens_k")


def heads_first(x: Tensor) -> Tensor:
    """Return tokens [total, heads, D] as [1, heads, total, D], a view."""
    return x[None].transpose(1, 2)


def tokens_first(x: Tensor) -> Tensor:
    """Return [1, heads, total, D] as tokens [total, heads, D], a view."""
    return x[0].transpose(0, 1)


def bounds_of_packed(
    q: Tensor,
    k: Tensor,
    lengths: tuple[Tensor, Tensor],
    mask: Mask,
    used: tuple[Used, Used] = (None, None),
    names: tuple[str, str] = CU_SEQLENS,
) -> Bounds:
    """Return the bounds of packed documents.

    Args:
        q: [1, H, T, D].
        k: [1, G, S, D].
        lengths: cu_seqlens of the queries and of the keys, [N + 1].
        mask: applies within each document, to its used queries and keys.
        used: how many queries and how many keys of each document are used, [N] each, from its
            start; None means all.
        names: the names of the lengths in error messages.

    Raises:
        ValueError: the lengths do not fit (see ``resolve.check_documents``).
    """
    if used[0] is not None or used[1] is not None:
        cu = check_documents(lengths, q, k, names)
        for name, x in zip(("seqused_q", "seqused_k"), used, strict=True):
            if x is not None:
                check_integers(name, x, len(cu[0]) - 1, q.device)
        tensors = *cu, *(x for x in used if x is not None)
        kinds = tuple(x is None for x in used)
        lengths = kept(q, cu[0], tensors, ("used", kinds), lambda: _in_parts(*cu, *used))
    return bounds_of(q, k, mask, check_documents(lengths, q, k, names), None)


def _in_parts(cu_q: Tensor, cu_k: Tensor, used_q: Used, used_k: Used) -> tuple[Tensor, Tensor]:
    """Split each document into three: its used part, its other queries, its other keys."""
    to_q, to_k = _ends(cu_q, used_q), _ends(cu_k, used_k)
    of_q = torch.stack((cu_q[:-1], to_q, cu_q[1:]), dim=1).flatten()
    of_k = torch.stack((cu_k[:-1], to_k, to_k), dim=1).flatten()
    return torch.cat((of_q, cu_q[-1:])), torch.cat((of_k, cu_k[-1:]))


def _ends(cu: Tensor, used: Used) -> Tensor:
    return cu[1:] if used is None else torch.minimum(cu[:-1] + used.to(cu.dtype), cu[1:])
