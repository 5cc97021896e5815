"""flash-attn's attention to a key/value cache, in which each sequence has its own length."""

from __future__ import annotations

import torch
from torch import Tensor

from flashattn.api import attention
from flashattn.arguments import autocast_dtype
from flashattn.integrations.arguments import DENSE, WindowSize, check_integers, keywords, shown
from flashattn.masks import RowMask, readable, rows
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
    new keys. There are no gradients. Lengths and indices stay on the device: on a GPU the host
    neither waits for their values nor checks them. Nothing is written if an argument is refused.

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
    _check_tensors(q, k_cache, v_cache, k, v)
    new, room = 0 if k is None else k.shape[1], k_cache.shape[1]
    if cache_seqlens is None and k is None:
        cache_seqlens = room
    ends = _lengths(cache_seqlens, q, room - new)
    if cache_batch_idx is not None:
        _check_values("cache_batch_idx", cache_batch_idx, q, len(k_cache) - 1)
    elif len(k_cache) < len(q):
        raise ValueError(f"k_cache: wanted {len(q)} sequences, got {len(k_cache)}")
    if cache_leftpad is not None:
        _check_values("cache_leftpad", cache_leftpad, q, room)
    sequences = slice(len(q)) if cache_batch_idx is None else cache_batch_idx
    if k is not None and v is not None:
        each = torch.arange(len(k_cache), device=q.device)[sequences]
        at = each[:, None], ends[:, None].long() + torch.arange(new, device=q.device)
        k_cache[at], v_cache[at] = k, v
    queries, keys, values = (x.transpose(1, 2) for x in (q, k_cache[sequences], v_cache[sequences]))
    window = how.pop("left"), how.pop("right")
    single, heads = q.shape[1] == 1, queries.shape[1]
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


def _check_tensors(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None, v: Tensor | None
) -> None:
    """Check the shapes, dtypes and devices of tensors; under autocast q may have another dtype.

    Raises:
        ValueError: a tensor does not fit.
    """
    if (k is None) != (v is None):
        raise ValueError("v: wanted new values where there are new keys, and none where not")
    given = {"q": q, "k_cache": k_cache, "v_cache": v_cache}
    given |= {} if k is None or v is None else {"k": k, "v": v}
    for name, x in given.items():
        if not isinstance(x, Tensor) or x.ndim != len(DENSE):
            raise ValueError(f"{name}: wanted a tensor [{', '.join(DENSE)}], got {shown(x)}")
    *cached, heads, _ = k_cache.shape
    if not heads or q.shape[2] % heads:
        raise ValueError(f"k_cache: wanted a divisor of {q.shape[2]} heads, got {heads} heads")
    if q.dtype != k_cache.dtype and autocast_dtype(q) is None:
        raise ValueError(f"k_cache: wanted q's dtype, {q.dtype}, got {k_cache.dtype}")
    for name, x in list(given.items())[1:]:
        rows = cached if "cache" in name else [len(q), given["k"].shape[1]]
        width = q.shape[3] if name[0] == "k" else v_cache.shape[3]
        if list(x.shape) != [*rows, heads, width]:
            raise ValueError(f"{name}: wanted shape {[*rows, heads, width]}, got {shown(x)}")
        if (x.dtype, x.device) != (k_cache.dtype, q.device):
            wanted = f"{k_cache.dtype} on {q.device}"
            raise ValueError(f"{name}: wanted {wanted}, got {x.dtype} on {x.device}")


def _check_values(name: str, x: object, q: Tensor, most: int) -> Tensor:
    """Return integers [batch], checked to be 0 ... ``most`` if the host can read them.

    Raises:
        ValueError: x is something else.
    """
    x = check_integers(name, x, len(q), q.device)
    if readable(x) and ((x < 0) | (x > most)).any():
        raise ValueError(f"{name}: wanted 0 ... {most}, got {x.tolist()}")
    return x


def _lengths(lengths: int | Tensor | None, q: Tensor, most: int) -> Tensor:
    """Return the lengths [batch] before anything is written, at most ``most``.

    Raises:
        ValueError: they do not fit, or there are none although there are new keys.
    """
    if lengths is None:
        raise ValueError("cache_seqlens: wanted where the new keys go, got None")
    if isinstance(lengths, int) and not isinstance(lengths, bool):
        if not 0 <= lengths <= most:
            raise ValueError(f"cache_seqlens: wanted 0 ... {most}, got {lengths}")
        return torch.full((len(q),), lengths, dtype=torch.int32, device=q.device)
    return _check_values("cache_seqlens", lengths, q, most)


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
