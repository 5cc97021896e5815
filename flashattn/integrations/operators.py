"""PyTorch's attention operators on our kernels, declared as in its native_functions.yaml.

PyTorch's fake kernels promise the layout of results, and compiled code asserts it, so each operator
returns results in the layout of its fake kernel. Calls that our kernels cannot solve raise
``UnsupportedError``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from flashattn.bounds import Bounds
from flashattn.integrations.binding import UnsupportedError, attend, differentiate, leave
from flashattn.integrations.packed import bounds_of_packed, heads_first, tokens_first
from flashattn.mask import CAUSAL, FULL, Mask
from flashattn.ops import Gradients, Outputs

LOWER_RIGHT = Mask(right=0, corner="bottom_right")  # FlashAttention's causal mask
# The memory-efficient kernel pads rows of a bias's gradient, and of its lse, to multiples of these.
BIAS_ALIGNMENT, LSE_ALIGNMENT = 16, 32


def _rows_outside(x: Tensor) -> Tensor:
    """Return x [B, H, T, ...] laid out as a dense [B, T, H, ...]."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _other_width(query: Tensor, value: Tensor) -> bool:
    """Return whether Dv is not D; FlashAttention's fake kernels promise an o of D columns."""
    return query.shape[-1] != value.shape[-1]


@cache
def _pattern(dtype: torch.dtype, device: torch.device, shape: tuple[int, ...]) -> Tensor:
    """Return a cached tensor: ``empty_like`` of it takes half the time of ``empty``."""
    return torch.empty(shape, dtype=dtype, device=device)


def _unread(x: Tensor, dtype: torch.dtype, *shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Return the state of a random generator, never read because there is no dropout."""
    return tuple([torch.empty_like(_pattern(dtype, x.device, shape)) for shape in shapes])


def _scaled_dot_product_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    leave(dropout_p, return_debug_mask, _other_width(query, value))
    o, lse = attend(query, key, value, LOWER_RIGHT if is_causal else FULL, scale)
    return o, lse, None, None, query.shape[2], key.shape[2], *_flash_rest(query)


def _flash_rest(query: Tensor) -> tuple[Tensor, ...]:
    """Return rng_state, unused and debug_attn_mask."""
    return *_unread(query, torch.uint64, (2,), ()), query.new_empty(0)


def _scaled_dot_product_flash_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> Gradients:
    leave(dropout_p)
    saved = query, key, value, out, logsumexp
    return differentiate(grad_out, saved, LOWER_RIGHT if is_causal else FULL, scale)


def _scaled_dot_product_cudnn_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    leave(dropout_p, return_debug_mask, attn_bias is not None)
    leave(_other_width(query, value) and 0 in query.stride())  # then o is promised in another order
    o, lse = attend(query, key, value, CAUSAL if is_causal else FULL, scale)
    seed, offset = _unread(query, torch.int64, (), ())
    return o, lse.unsqueeze(3), None, None, query.shape[2], key.shape[2], seed, offset, None


def _scaled_dot_product_cudnn_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    attn_bias: Tensor | None,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
) -> Gradients:
    leave(dropout_p, attn_bias is not None)
    saved = query, key, value, out, logsumexp.squeeze(3)
    return differentiate(grad_out, saved, CAUSAL if is_causal else FULL, scale)


def _grouped(query: Tensor, key: Tensor) -> bool:
    """Return whether heads share keys, which memory-efficient attention's fake kernel rejects."""
    return query.shape[1] != key.shape[1]


def _scaled_dot_product_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    leave(dropout_p, _grouped(query, key))
    o, lse = attend(query, key, value, CAUSAL if is_causal else FULL, scale, attn_bias)
    if compute_log_sumexp:
        padding = -lse.shape[2] % LSE_ALIGNMENT
        lse = torch.nn.functional.pad(lse, (0, padding), value=torch.inf) if padding else lse
    else:
        lse = lse.new_empty((*lse.shape[:2], 0))
    return _rows_outside(o), lse, *_unread(query, torch.int64, (), ())


def _scaled_dot_product_efficient_attention_backward(
    grad_out_: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    dropout_p: float,
    grad_input_mask: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor | None, ...]:
    leave(dropout_p, _grouped(query, key))
    saved = query, key, value, out, logsumexp[..., : query.shape[2]]
    wanted = attn_bias is not None and grad_input_mask[3]
    dq, dk, dv, *dbias = differentiate(
        grad_out_, saved, CAUSAL if is_causal else FULL, scale, attn_bias, bias_grad=wanted
    )
    return *map(_rows_outside, (dq, dk, dv)), _aligned(dbias[0]) if dbias else None


def _aligned(x: Tensor) -> Tensor:
    """Return x laid out as the memory-efficient kernel's bias gradient: rows padded to 16."""
    padding = -x.shape[-1] % BIAS_ALIGNMENT
    return torch.nn.functional.pad(x, (0, padding))[..., : x.shape[-1]] if padding else x


def _flash_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, ...]:
    """Attend within packed documents, or without documents to [B, T, H, D].

    ``max_q``, ``max_k`` and ``num_splits`` are ignored, except that 1 split asks for the same bits
    whatever the other documents are. Our tiles span documents, so that is left to PyTorch.
    """
    leave(dropout_p, return_debug_mask, alibi_slopes is not None, block_table is not None)
    leave(cum_seq_q is None and seqused_k is not None, cum_seq_q is not None and num_splits == 1)
    leave(_other_width(query, value))
    mask = _window(is_causal, window_size_left, window_size_right)
    if cum_seq_q is None:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        o, lse = attend(q, k, v, mask, scale)
        return o.transpose(1, 2), lse, *_flash_rest(query)
    q, k, v = map(heads_first, (query, key, value))
    bounds = _bounds(q, k, cum_seq_q, cum_seq_k, mask, seqused_k)
    o, lse = attend(q, k, v, bounds, scale)
    return tokens_first(o), lse[0], *_flash_rest(query)


def _flash_attention_forward_no_dropout_inplace(out: Tensor, *args: Any, **options: Any) -> Tensor:
    o, lse, *_ = _flash_attention_forward(*args, **options)
    if (out.shape, out.dtype) != (o.shape, o.dtype):
        wanted, got = (f"{list(x.shape)}, {x.dtype}" for x in (o, out))
        raise ValueError(f"out: wanted {wanted}, got {got}")
    out.copy_(o)
    return lse


def _flash_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:
    leave(dropout_p)
    mask = _window(is_causal, window_size_left, window_size_right)
    if cum_seq_q is None:
        grad_o, q, k, v, o = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
        gradients = differentiate(grad_o, (q, k, v, o, logsumexp), mask, scale)
        return tuple(x.transpose(1, 2) for x in gradients)
    grad_o, q, k, v, o = map(heads_first, (grad_out, query, key, value, out))
    bounds = _bounds(q, k, cum_seq_q, cum_seq_k, mask)
    gradients = differentiate(grad_o, (q, k, v, o, logsumexp[None]), bounds, scale)
    return tuple(map(tokens_first, gradients))


def _bounds(
    q: Tensor,
    k: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor | None,
    mask: Mask,
    seqused_k: Tensor | None = None,
) -> Bounds:
    """Return the bounds of packed documents, with the mask applied within each."""
    if cum_seq_k is None:
        raise UnsupportedError
    return bounds_of_packed(
        q, k, (cum_seq_q, cum_seq_k), mask, (None, seqused_k), ("cum_seq_q", "cum_seq_k")
    )


def _window(is_causal: bool, left: int | None, right: int | None) -> Mask:
    """Return the mask of FlashAttention's arguments, where negative means no bound."""
    left, right = (None if x is None or x < 0 else x for x in (left, right))
    return Mask(left, 0 if is_causal else right, "bottom_right")


def _scaled_dot_product_flash_attention_for_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Outputs:
    leave(dropout_p, _other_width(query, value))
    mask = CAUSAL if is_causal else FULL
    o, lse = attend(query, key, value, mask, scale, _with_heads(attn_mask))
    # PyTorch's backward, which may follow, wants 0 for a row that sees no key.
    return o, _rows_outside(lse.masked_fill(lse == -torch.inf, 0))


def _with_heads(attn_mask: Tensor | None) -> Tensor | None:
    """Return a mask [T, S] or [B, H, T, S] with four dimensions; here a bool one is added, too."""
    if attn_mask is None:
        return None
    return attn_mask[(None,) * (len("BHTS") - attn_mask.ndim)]


def _scaled_dot_product_flash_attention_for_cpu_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    leave(dropout_p)
    saved, bias = (query, key, value, out, logsumexp), _with_heads(attn_mask)
    gradients = differentiate(grad_out, saved, CAUSAL if is_causal else FULL, scale, bias)
    return tuple(map(_rows_outside, gradients))


KERNELS: dict[str, Callable[..., Any]] = {
    kernel.__name__: kernel
    for kernel in (
        _scaled_dot_product_flash_attention,
        _scaled_dot_product_flash_attention_backward,
        _scaled_dot_product_cudnn_attention,
        _scaled_dot_product_cudnn_attention_backward,
        _scaled_dot_product_efficient_attention,
        _scaled_dot_product_efficient_attention_backward,
        _flash_attention_forward,
        _flash_attention_forward_no_dropout_inplace,
        _flash_attention_backward,
        _scaled_dot_product_flash_attention_for_cpu,
        _scaled_dot_product_flash_attention_for_cpu_backward,
    )
}
