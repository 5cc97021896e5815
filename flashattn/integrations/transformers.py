"""``attn_implementation="fattn"`` for the models of Hugging Face transformers.

A model asks twice: once per forward pass for a mask, then in each layer for attention. Our mask is
a ``KeyRanges``, a tensor without storage: causal masks, windows and full attention are a ``Call``,
the keywords of one call of ``attention``; all others are the range of keys that each query sees.
What is no range is a boolean tensor, as transformers' own for PyTorch's SDPA.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils._pytree import tree_map_only
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    sdpa_mask,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)
from transformers.utils.import_utils import is_tracing
from typing_extensions import Self

from flashattn.api import attention
from flashattn.mask import UNBOUNDED, Causal, Mask, Window

MOST_PAIRS = 1 << 26  # of queries and keys, whose mask is evaluated at once: 64 MiB
# Keywords of a few models that change the answer, and why we do not take them.
REFUSED = {
    "block_indices": "block-sparse attention is not supported",
    "cache": "continuous batching (a paged cache) is not supported",
    "indices": "attention to selected keys is not supported",
    "output_attentions": "attention weights are never stored",
    "sinks": "a sink for each query is not supported, only one for each head (s_aux)",
}


def register(name: str = "fattn", *, impl: str = "auto") -> None:
    """Make ``attn_implementation=name`` compute with ``flashattn.attention``.

    Args:
        name: what models are loaded with. Registering a name again replaces it.
        impl: as in ``attention``.

    Raises:
        ValueError: the name contains "flash", which transformers takes for a kernel on its Hub.
    """
    if "flash" in name:
        raise ValueError(f'name: wanted one without "flash", got {name!r}')
    AttentionInterface.register(name, partial(_attend, impl=impl))
    AttentionMaskInterface.register(name, _make_mask)


class Call(NamedTuple):
    """A mask as a call of ``attention``: the first ``keys`` keys, ``causal`` and ``window``.

    ``keys=None`` is all: torch.compile compiles again for each other number.
    """

    keys: int | None
    causal: Causal
    window: Window


class KeyRanges(torch.Tensor):
    """A boolean mask [B, 1, T, S] that is kept as the keys low ... high - 1 of each query.

    Operators that are applied to it get the boolean tensor.

    Args:
        low: int32 [B or 1, T].
        high: likewise.
        size: (B, 1, T, S).
        call: the same mask as keywords of ``attention``, or None.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # noqa: SLF001

    low: torch.Tensor
    high: torch.Tensor
    call: Call | None

    def __new__(
        cls, low: torch.Tensor, high: torch.Tensor, size: tuple[int, ...], call: Call | None
    ) -> Self:
        """Make a tensor of that size, without storage."""
        made: Self = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]  # noqa: SLF001
            cls, size, dtype=torch.bool, device=low.device
        )
        made.low, made.high, made.call = low, high, call
        return made

    @classmethod
    def of(cls, call: Call, size: tuple[int, ...], device: torch.device | str) -> KeyRanges:
        """Return the mask of a call."""
        queries = torch.arange(size[2], device=device, dtype=torch.int32)[None]
        keys = size[3] if call.keys is None else call.keys
        bounds = Mask.of(call.causal, call.window).over(size[2], keys).keys_of(queries)
        low, high = (torch.zeros_like(queries) + x for x in bounds)
        return cls(low, high, size, call)

    def __repr__(self) -> str:  # type: ignore[override]
        """Say what the mask is without computing it: torch.compile logs its inputs."""
        return f"KeyRanges(size={tuple(self.shape)}, call={self.call})"

    def dense(self) -> torch.Tensor:
        """Return the boolean tensor, True where a query sees a key."""
        keys = torch.arange(self.shape[3], device=self.low.device)
        seen = (self.low[..., None] <= keys) & (keys < self.high[..., None])
        return seen[:, None].expand(self.shape)

    def __tensor_flatten__(self) -> tuple[list[str], Call | None]:
        """Tell torch.compile what the mask is made of."""
        return ["low", "high"], self.call

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, torch.Tensor],
        call: Call | None,
        size: tuple[int, ...],
        stride: tuple[int, ...],
    ) -> KeyRanges:
        """Make it of these again."""
        del stride
        return KeyRanges(inner["low"], inner["high"], size, call)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Apply an operator to the boolean tensor."""
        del types
        args, kwargs = tree_map_only(cls, cls.dense, (args, dict(kwargs or {})))
        return func(*args, **kwargs)


def _make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,  # noqa: FBT001, FBT002 - transformers' signature
    device: torch.device | str = "cpu",
    **_: Any,
) -> torch.Tensor:
    """Return the mask of queries at ``q_offset`` + t and keys at ``kv_offset`` + s.

    It reads values of device tensors, once a forward pass, unless it is traced, or the offset of a
    single query lies on the device: then steps of a static cache shall share a graph.
    """

    def evaluate(start: int = 0, count: int = q_length) -> torch.Tensor:
        seen: torch.Tensor = sdpa_mask(
            batch_size,
            count,
            kv_length,
            q_offset + start,
            kv_offset,
            mask_function,
            attention_mask,
            allow_is_causal_skip=False,
            use_vmap=use_vmap,
            device=device,
        )
        return seen

    tracing = is_tracing(attention_mask)
    if isinstance(q_offset, torch.Tensor) and (tracing or q_length == 1):
        return evaluate()
    size = batch_size, 1, q_length, kv_length
    call = _call_of(mask_function, local_size, q_length, kv_length, int(q_offset) - kv_offset)
    if call is not None:
        if attention_mask is None:
            return KeyRanges.of(call, size, device)
        keys = kv_length if call.keys is None else call.keys
        padding = attention_mask[:, kv_offset : kv_offset + keys]
        if not tracing and padding.shape[1] == keys and padding.all():
            return KeyRanges.of(call, size, device)
    ranges = None if tracing else _ranges_of(evaluate, size)
    return evaluate() if ranges is None else KeyRanges(*ranges, size, None)


def _call_of(
    mask_function: object, local_size: int | None, q_length: int, kv_length: int, shift: int
) -> Call | None:
    """Return the call for one of transformers' mask functions, query t standing at key t + shift.

    Source: ``sliding_window`` counts the query itself where it is causal, and does not otherwise.
    """
    known: list[tuple[object, Window]] = [
        (causal_mask_function, (None, 0)),
        (bidirectional_mask_function, UNBOUNDED),
    ]
    if local_size is not None:
        known += [
            (sliding_window_causal_mask_function(local_size), (local_size - 1, 0)),
            (sliding_window_bidirectional_mask_function(local_size), (local_size, local_size)),
        ]
    for function, (left, right) in known:
        if not _same_code(mask_function, function):
            continue
        if right == 0 and 0 < q_length + shift <= kv_length:
            keys = None if q_length + shift == kv_length else q_length + shift
            return Call(keys, "bottom_right", (left, None))
        if shift == 0 or (left, right) == UNBOUNDED:
            return Call(None, False, (left, right))  # noqa: FBT003
    return None


def _same_code(x: object, y: object) -> bool:
    """Return whether two functions have the same code, and so have those that they close over.

    torch.compile cannot read closures: traced windows are evaluated.
    """
    if x is y or torch.compiler.is_compiling():
        return x is y
    if isinstance(x, FunctionType) and isinstance(y, FunctionType):
        cells = (tuple(c.cell_contents for c in f.__closure__ or ()) for f in (x, y))
        return x.__code__ is y.__code__ and _same_code(*cells)
    if isinstance(x, tuple) and isinstance(y, tuple):
        return len(x) == len(y) and all(map(_same_code, x, y))
    return type(x) is type(y) is int and x == y


def _ranges_of(
    evaluate: Callable[[int, int], torch.Tensor], size: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return (low, high) [B, T] if each query sees the keys low ... high - 1, else None."""
    batch, _, q_length, kv_length = size
    step = max(1, MOST_PAIRS // max(1, batch * kv_length))
    lows, highs, contiguous = [], [], []
    for start in range(0, q_length, step):
        seen = evaluate(start, min(step, q_length - start))[:, 0].byte()
        count = seen.sum(-1)
        low, high = seen.argmax(-1), kv_length - seen.flip(-1).argmax(-1)
        high = torch.where(count > 0, high, low)
        lows.append(low.int())
        highs.append(high.int())
        contiguous.append((high - low == count).all())
    return (torch.cat(lows, 1), torch.cat(highs, 1)) if all(contiguous) else None


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,  # noqa: FBT001 - transformers' signature
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    *,
    impl: str = "auto",
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention as transformers' models call it.

    Args:
        module: the layer; its ``is_causal`` counts where there is neither mask nor ``is_causal``.
        query: [B, H, T, D].
        key: [B, G, S, D].
        value: [B, G, S, Dv].
        attention_mask: what ``_make_mask`` returned, a model's own [B or 1, H or 1, T, S], boolean
            or added to the scores, or None.
        dropout: must be 0.
        scaling: factor on the scores; None is D ** -0.5.
        is_causal: see ``module``; top-left, and of a single query without effect.
        sliding_window: where there is no mask, as flash-attn's (w - 1, w - 1).
        softcap: cap of the scores.
        s_aux: [H], a logit of each head that takes its share of the softmax and has no value.
        position_bias: [B or 1, H or 1, T, S], added to the scores.
        cu_seq_lens_q: must agree with the mask: more than one document needs ``position_ids``.
        impl: as in ``attention``.
        options: those of ``REFUSED`` must not be set; all others change nothing.

    Returns:
        o [B, T, H, Dv], and None in place of the attention weights.

    Raises:
        NotImplementedError: a keyword that is not supported.
    """
    for name in REFUSED.keys() & options.keys():
        if options[name] is not None and options[name] is not False:
            raise NotImplementedError(f"{name}: {REFUSED[name]}")
    if dropout:
        raise NotImplementedError(
            f"dropout: attention has none, got {dropout}; set attention_dropout=0 in the config"
        )
    mask, call = attention_mask, None
    if isinstance(mask, KeyRanges):
        call = mask.call
    elif mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        call = _call_without_mask(query.shape[2], causal=causal, sliding_window=sliding_window)
    if call is not None and cu_seq_lens_q is not None and len(cu_seq_lens_q) > 2:  # noqa: PLR2004
        raise NotImplementedError(
            "cu_seq_lens_q: documents are told apart by position_ids that begin anew in each"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if call is not None and position_bias is None:
        o: Any = attention(
            query, key[:, :, : call.keys], value[:, :, : call.keys], causal=call.causal,
            window=call.window, softcap=softcap, sink=s_aux, scale=scale, impl=impl,
        )  # fmt: skip
    else:
        if mask is None and call is not None:
            size = len(query), 1, query.shape[2], key.shape[2]
            mask = KeyRanges.of(call, size, query.device)
        seen = mask.dense() if isinstance(mask, KeyRanges) else mask
        o = _attend_masked(query, key, value, seen, scale, softcap, s_aux, position_bias)
    return o.transpose(1, 2).contiguous(), None


def _call_without_mask(q_length: int, *, causal: bool, sliding_window: int | None) -> Call:
    """Return the call of a layer that gets no mask, as transformers' own implementations do."""
    corner: Causal = "bottom_right" if q_length == 1 else "top_left"
    side = None if sliding_window is None else sliding_window - 1
    return Call(None, causal and corner, (side, None if causal else side))


def _attend_masked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    sink: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Compute what ``attention`` has no keyword for, by PyTorch's scaled_dot_product_attention.

    Scores that it has no keyword for either are its bias: capped ones, and those of a sink, which
    is one more key.
    """
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    if softcap is not None:
        capped = softcap * (q @ k.mT * (scale / softcap)).tanh()
        q, bias = torch.zeros_like(q), capped if bias is None else capped + bias
    if bias is not None and mask is not None:
        mask = bias.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else bias + mask
    elif bias is not None:
        mask = bias
    if sink is not None:
        # One more key, whose product with q is 0.
        size = (*q.shape[:3], k.shape[2])
        if mask is None or mask.dtype == torch.bool:
            zeros = q.new_zeros(())
            mask = zeros if mask is None else torch.where(mask, zeros, -torch.inf)
        column = sink.to(q.dtype)[:, None, None].expand(*size[:3], 1)
        mask = torch.cat([mask.expand(size), column], dim=-1)
        k, v = (pad(x, (0, 0, 0, 1)) for x in (k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
