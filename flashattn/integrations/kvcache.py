"""flash-attn's attention to a key/value cache, in which each sequence has its own length."""

from __future__ import annotations

import torch
from torch import Tensor

from flashattn.api import attention
from flashattn.integrations.arguments import DENSE, WindowSize, check_shapes, keywords, shown
from flashattn.masks import RowMask, rows
from flashattn.resolve import kept


@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Write new keys and values into a cache, in place, and then attend to the cache.

    Query i of a sequence is aligned with key i + length - seqlen_q, where the length includes the
    new keys. There are no gradients. Lengths stay on the device, and the host does not wait for
    them.

    Args:
        q: [batch, seqlen_q, nheads, headdim].
        k_cache: [batch_cache, seqlen_cache, nheads_k, headdim]; keys past a length may be NaN.
        v_cache: likewise.
        k: [batch, seqlen_new, nheads_k, headdim], written after ``cache_seqlens`` keys; or None.
        v: likewise.
        rotary_cos: must be None.
        rotary_sin: must be None.
        cache_seqlens: the number of keys of each sequence before the new ones, an int or integers
            [batch]; None means the whole cache.
        cache_batch_idx: integers [batch], the index of each sequence in the cache; sequences are
            then copied. None means 0 ... batch - 1.
        cache_leftpad: integers [batch], the first key of each sequence; None means 0.
        block_table: must be None.
        softmax_scale: see ``flash_attn_func``.
        causal: likewise.
        window_size: likewise.
        softcap: likewise.
        rotary_interleaved: ignored, as nothing is rotated.
        alibi_slopes: must be None.
        num_splits: ignored; the number of splits of the keys is chosen automatically.
        return_softmax_lse: return (out, softmax_lse).

    Returns:
        out [batch, seqlen_q, nheads, headdim]; softmax_lse [batch, nheads, seqlen_q] in fp32.

    Raises:
        NotImplementedError: see ``flash_attn_func``.
        ValueError: likewise.
    """
    del rotary_interleaved, num_splits
    how = keywords(
        softmax_scale, causal, window_size, False, True, softcap=softcap,
        alibi_slopes=alibi_slopes, block_table=block_table, rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
    )  # fmt: skip
    one = {"q": q, "k_cache": k_cache, "v_cache": v_cache}  # the caches may have more sequences
    check_shapes({name: x[: min(len(q), 1)] for name, x in one.items()}, DENSE)
    if cache_batch_idx is None and len(k_cache) < len(q):
        raise ValueError(f"k_cache: wanted {len(q)} sequences, got {len(k_cache)}")
    ends, new = _placed(q, k_cache, v_cache, k, v, cache_seqlens, cache_batch_idx)
    sequences = slice(len(q)) if cache_batch_idx is None else cache_batch_idx
    queries, keys, values = (x.transpose(1, 2) for x in (q, k_cache[sequences], v_cache[sequences]))
    window = how.pop("left"), how.pop("right")
    single, heads = q.shape[1] == 1 and q.shape[2] % keys.shape[1] == 0, queries.shape[1]
    if single:  # GQA packing: heads that share keys are queries of one tile
        queries = queries.reshape(len(q), keys.shape[1], heads // keys.shape[1], q.shape[3])
    sizes = q.shape[1], queries.shape[2] if single else 1, keys.shape[2]

    def make() -> RowMask:
        return _rows(ends + new, cache_leftpad, window, *sizes)

    tensors = ends, *(() if cache_leftpad is None else (cache_leftpad,))
    mask = kept(q, ends, tensors, ("kvcache", window, new, sizes), make)
    o, lse = attention(queries, keys, values, mask=mask, **how)
    if single:
        o, lse = (x.reshape(len(q), heads, 1, *x.shape[3:]) for x in (o, lse))
    o = o.transpose(1, 2).contiguous()
    return (o, lse) if return_softmax_lse else o


def _placed(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    lengths: int | Tensor | None,
    sequences: Tensor | None,
) -> tuple[Tensor, int]:
    """Write k and v after the cached keys; return the old lengths [batch] and how many are new."""
    if (k is None) != (v is None):
        raise ValueError("v: wanted new values where there are new keys, and none where not")
    if k is not None and lengths is None:
        raise ValueError("cache_seqlens: wanted where the new keys go, got None")
    if not isinstance(lengths, Tensor):
        whole = k_cache.shape[1] if lengths is None else lengths
        lengths = torch.full((len(q),), whole, dtype=torch.int32, device=q.device)
    if k is None or v is None:
        return lengths, 0
    for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
        wanted = [len(q), k.shape[1], *cache.shape[2:]]
        if list(x.shape) != wanted:
            raise ValueError(f"{name}: wanted shape {wanted}, got {shown(x)}")
    if sequences is None:
        sequences = torch.arange(len(q), device=q.device)
    at = lengths[:, None].long() + torch.arange(k.shape[1], device=q.device)
    places = sequences[:, None].long(), at
    k_cache[places], v_cache[places] = k, v
    return lengths, k.shape[1]


def _rows(
    ends: Tensor,
    starts: Tensor | None,
    window: tuple[int | None, int | None],
    queries: int,
    times: int,
    keys: int,
) -> RowMask:
    """Return the mask of queries of which the last is aligned with the last key.

    Args:
        ends: [batch], one past the last key of each sequence.
        starts: [batch], the first key; None means 0.
        window: (left, right), the keys that a query sees before and after its own position.
        queries: the number of queries of each sequence.
        times: how often each query is repeated; 1 if there is more than one.
        keys: the number of keys of the cache.
    """
    ends = ends.clamp(0, keys)[:, None]
    low = torch.zeros_like(ends) if starts is None else starts[:, None].to(ends.dtype)
    at = ends + torch.arange(-queries, 0, dtype=ends.dtype, device=ends.device)
    at = at.expand(-1, queries * times)
    left, right = window
    low = low.expand_as(at) if left is None else torch.maximum(low, at - left)
    high = ends.expand_as(at) if right is None else torch.minimum(ends, at + right + 1)
    return rows(torch.minimum(low, ends), torch.maximum(high, torch.zeros_like(high)))
