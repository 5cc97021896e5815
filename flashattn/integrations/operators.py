"""PyTorch's attention operators on our kernels, declared as in its native_functions.yaml.

PyTorch's fake kernels promise how results lie, and compiled code asserts it: each operator returns
its results as its fake kernel does. What our kernels cannot solve raises ``UnsupportedError``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flashattn import gpus, ops
from flashattn.bounds import Bounds
from flashattn.integrations.packed import bounds_of_packed, heads_first, tokens_first
from flashattn.mask import CAUSAL, FULL, Mask
from flashattn.plan.spec import Extras, Signature, TensorSpec, signature
from flashattn.problem import Problem, check_scale
from flashattn.score import check_bias

LOWER_RIGHT = Mask(right=0, corner="bottom_right")  # FlashAttention's causal mask
ONE_BATCH = Bounds(*(torch.empty(1, 0, 2, dtype=torch.int32, device="meta") for _ in range(2)))
BIAS_ALIGNMENT = 16  # and those of a bias's gradient
LSE_ALIGNMENT = 32  # the memory-efficient kernel pads rows of its lse to a multiple of it


class UnsupportedError(Exception):
    """Our kernels cannot solve it; PyTorch's own may."""


def _leave(*reasons: object) -> None:
    if any(reasons):
        raise UnsupportedError


@lru_cache(1024)
def _bind(
    given: tuple[Signature, ...],
    mask: Mask | None,
    scale: float | None,
    fp32_precision: object,
) -> ops.Prepared | None:
    """Return our kernels for tensors with these signatures, or None where ours cannot.

    Args:
        given: signatures of q [B, H, T, D], k and v [B, G, S, D], and of a bias that broadcasts to
            [B, H, T, S], if there is one.
        mask: which keys a query sees; None is bounds of rows, for one batch.
        scale: factor on the scores; None is D ** -0.5.
        fp32_precision: torch's setting, on which the kernels of fp32 depend.
    """
    del fp32_precision
    q, k, v, *rest = (TensorSpec(*x) for x in given)
    given, bias = given[:3], rest[0] if rest else None
    if len(q.shape) != len("BHTD") or not q.device == k.device == v.device:
        return None
    asked: dict[str, Any] = {"documents": "unknown"}
    if mask is not None:
        asked = {"causal": mask.causal, "window": mask.window}
    try:
        problem = Problem.of(q.meta, k.meta, v.meta, **asked)
        if bias is not None:
            sizes = problem.batch, problem.heads, problem.seq_q, problem.seq_kv
            check_bias(bias.meta, sizes, q.meta)
        scale = check_scale(scale, problem.head_dim)
    except ValueError:
        return None
    family = gpus.fastest_family(problem, q.device)
    if family is None:
        return None
    how = scale, None, "auto", family, True
    if mask is None:
        return ops.bind(given, None, None, 0, *how, extras=Extras(*ONE_BATCH))
    band = mask.over(problem.seq_q, problem.seq_kv)
    return ops.bind(given, band.left, band.right, 0, *how, bias=bias)


def _prepared(
    tensors: tuple[Tensor, ...], mask: Mask | Bounds, scale: float | None
) -> ops.Prepared:
    """Return our kernels for q, k, v and perhaps a bias."""
    tf32 = tensors[0].dtype is torch.float32 and torch.backends.cuda.matmul.fp32_precision
    prepared = _bind(signature(*tensors), mask if isinstance(mask, Mask) else None, scale, tf32)
    if prepared is None:
        raise UnsupportedError
    return prepared


def _extras(mask: Mask | Bounds, bias: Tensor | None = None) -> Sequence[Tensor | None]:
    """Return what kernels take besides q, k and v: bounds of rows, or a bias, or nothing."""
    if not isinstance(mask, Mask):
        return Extras(*mask)
    return () if bias is None else Extras(bias=bias)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | Bounds,
    scale: float | None,
    bias: Tensor | None = None,
) -> ops.Outputs:
    """Return o, laid out like q, and lse [B, H, T]."""
    given = (q, k, v) if bias is None else (q, k, v, bias)
    o, lse = _prepared(given, mask, scale).attend(q, k, v, *_extras(mask, bias))
    return _like(o, q), lse


def _differentiate(
    grad_o: Tensor,
    saved: tuple[Tensor, ...],
    mask: Mask | Bounds,
    scale: float | None,
    bias: Tensor | None = None,
    *,
    bias_grad: bool = False,
) -> ops.Gradients:
    """Return the gradients of q, k and v, laid out like these, and that of the bias if wanted.

    ``saved`` is q, k, v, o, lse.
    """
    q, k, v, o, lse = saved
    given = (q, k, v) if bias is None else (q, k, v, bias)
    prepared, saved = _prepared(given, mask, scale), (q, k, v, o, lse.contiguous())
    dq, dk, dv, *dbias = prepared.backward(
        (grad_o, None), saved, _extras(mask, bias), bias_grad=bias_grad
    )
    return _like(dq, q), _like(dk, k), _like(dv, v), *dbias


def _like(x: Tensor, pattern: Tensor) -> Tensor:
    """Return x laid out as ``torch.empty_like(pattern)``, as our kernels do if rows are dense."""
    return x if pattern.stride(-1) == 1 else torch.empty_like(pattern).copy_(x)


def _rows_outside(x: Tensor) -> Tensor:
    """Return x [B, H, T, ...] laid out as a dense [B, T, H, ...]."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _scalars(x: Tensor, dtype: torch.dtype, *shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Return the state of a random generator that nobody reads, as there is no dropout."""
    return tuple(torch.empty(shape, dtype=dtype, device=x.device) for shape in shapes)


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
    _leave(dropout_p, return_debug_mask)
    o, lse = _attend(query, key, value, LOWER_RIGHT if is_causal else FULL, scale)
    return o, lse, None, None, query.shape[2], key.shape[2], *_flash_rest(query)


def _flash_rest(query: Tensor) -> tuple[Tensor, ...]:
    """Return rng_state, unused and debug_attn_mask."""
    return *_scalars(query, torch.uint64, (2,), ()), query.new_empty(0)


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
) -> ops.Gradients:
    _leave(dropout_p)
    saved = query, key, value, out, logsumexp
    return _differentiate(grad_out, saved, LOWER_RIGHT if is_causal else FULL, scale)


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
    _leave(dropout_p, return_debug_mask, attn_bias is not None)
    o, lse = _attend(query, key, value, CAUSAL if is_causal else FULL, scale)
    seed, offset = _scalars(query, torch.int64, (), ())
    return o, lse[..., None], None, None, query.shape[2], key.shape[2], seed, offset, None


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
) -> ops.Gradients:
    _leave(dropout_p, attn_bias is not None)
    saved = query, key, value, out, logsumexp.reshape(query.shape[:3])
    return _differentiate(grad_out, saved, CAUSAL if is_causal else FULL, scale)


def _grouped(query: Tensor, key: Tensor) -> bool:
    """Return whether heads share keys; the fake kernel of memory-efficient attention says no."""
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
    _leave(dropout_p, _grouped(query, key))
    o, lse = _attend(query, key, value, CAUSAL if is_causal else FULL, scale, attn_bias)
    if compute_log_sumexp:
        padding = -lse.shape[2] % LSE_ALIGNMENT
        lse = torch.nn.functional.pad(lse, (0, padding), value=torch.inf) if padding else lse
    else:
        lse = lse.new_empty((*lse.shape[:2], 0))
    return _rows_outside(o), lse, *_scalars(query, torch.int64, (), ())


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
    _leave(dropout_p, _grouped(query, key))
    saved = query, key, value, out, logsumexp[..., : query.shape[2]]
    wanted = attn_bias is not None and grad_input_mask[3]
    dq, dk, dv, *dbias = _differentiate(
        grad_out_, saved, CAUSAL if is_causal else FULL, scale, attn_bias, bias_grad=wanted
    )
    return *map(_rows_outside, (dq, dk, dv)), _aligned(dbias[0]) if dbias else None


def _aligned(x: Tensor) -> Tensor:
    """Return x laid out as the memory-efficient kernel's gradient of a bias: rows of 16."""
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
    """Attend within documents, or with none to [B, T, H, D].

    ``max_q``, ``max_k`` and ``num_splits`` change nothing, but 1 split asks for the same bits
    whatever the other documents are, which tiles across documents do not give.
    """
    _leave(dropout_p, return_debug_mask, alibi_slopes is not None, block_table is not None)
    _leave(cum_seq_q is None and seqused_k is not None, cum_seq_q is not None and num_splits == 1)
    mask = _window(is_causal, window_size_left, window_size_right)
    if cum_seq_q is None:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        o, lse = _attend(q, k, v, mask, scale)
        return o.transpose(1, 2), lse, *_flash_rest(query)
    q, k, v = map(heads_first, (query, key, value))
    bounds = _bounds(q, k, cum_seq_q, cum_seq_k, mask, seqused_k)
    o, lse = _attend(q, k, v, bounds, scale)
    return tokens_first(o), lse[0], *_flash_rest(query)


def _flash_attention_forward_no_dropout_inplace(out: Tensor, *args: Any, **options: Any) -> Tensor:
    o, lse, *_ = _flash_attention_forward(*args, **options)
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
    _leave(dropout_p)
    mask = _window(is_causal, window_size_left, window_size_right)
    if cum_seq_q is None:
        grad_o, q, k, v, o = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
        gradients = _differentiate(grad_o, (q, k, v, o, logsumexp), mask, scale)
        return tuple(x.transpose(1, 2) for x in gradients)
    grad_o, q, k, v, o = map(heads_first, (grad_out, query, key, value, out))
    bounds = _bounds(q, k, cum_seq_q, cum_seq_k, mask)
    gradients = _differentiate(grad_o, (q, k, v, o, logsumexp[None]), bounds, scale)
    return tuple(map(tokens_first, gradients))


def _bounds(
    q: Tensor,
    k: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor | None,
    mask: Mask,
    seqused_k: Tensor | None = None,
) -> Bounds:
    """Return the bounds of packed documents, each with a mask of its own."""
    if cum_seq_k is None:
        raise UnsupportedError
    return bounds_of_packed(
        q, k, (cum_seq_q, cum_seq_k), mask, (None, seqused_k), ("cum_seq_q", "cum_seq_k")
    )


def _window(is_causal: bool, left: int | None, right: int | None) -> Mask:
    """Return the mask of FlashAttention's arguments, where a negative bound is none."""
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
) -> ops.Outputs:
    _leave(dropout_p)
    mask = CAUSAL if is_causal else FULL
    o, lse = _attend(query, key, value, mask, scale, _with_heads(attn_mask))
    return o, _rows_outside(lse)


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
    _leave(dropout_p)
    saved, bias = (query, key, value, out, logsumexp), _with_heads(attn_mask)
    gradients = _differentiate(grad_out, saved, CAUSAL if is_causal else FULL, scale, bias)
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
