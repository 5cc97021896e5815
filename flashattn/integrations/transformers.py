"""``attn_implementation="fattn"`` for the models of Hugging Face transformers.

A model asks twice: once per forward pass for a mask, then in each layer for attention. Our mask is
a ``KeyRanges``, a tensor without storage. It holds causal masks, windows and full attention as a
``Call``, the keywords of one call of ``attention``, and all others as the bounds of
``attention(mask=...)``. If transformers' mask function is known, the host reads neither. Where some
query sees more than one run of keys, the mask is a boolean tensor, like transformers' own for
PyTorch's SDPA, and becomes a bias.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch.nn.functional import pad
from torch.utils._pytree import tree_map_only
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, sdpa_mask
from transformers.utils.import_utils import is_tracing
from typing_extensions import Self

from flashattn.api import attention
from flashattn.bounds import Bounds, of_rows
from flashattn.integrations.runs import meet, parts_of, shown_by, window_of
from flashattn.mask import UNBOUNDED, Causal, Mask, Window
from flashattn.masks import monotone, of_bounds, readable, runs_of

MOST_PAIRS = 1 << 26  # query-key pairs whose mask is evaluated at once: 64 MiB
HOLES = "attention_mask hides keys between others: register(holes=True) takes such masks"
# Keywords of a few models that change the result, and why they are refused.
REFUSED = {
    "block_indices": "block-sparse attention is not supported",
    "cache": "continuous batching (a paged cache) is not supported",
    "indices": "attention to selected keys is not supported",
    "output_attentions": "attention weights are never stored",
    "sinks": "a sink for each query is not supported, only one for each head (s_aux)",
}


def register(name: str = "fattn", *, impl: str = "auto", holes: bool = False) -> None:
    """Make ``attn_implementation=name`` compute with ``flashattn.attention``.

    Args:
        name: the ``attn_implementation`` of models. Registering a name again replaces it.
        impl: as in ``attention``.
        holes: whether an ``attention_mask`` may hide tokens between others. If so, the host waits
            for each mask on a GPU. If not, such a mask fails an assertion on the GPU, which stops
            the program.

    Raises:
        ValueError: the name contains "flash"; transformers looks up such names on its Hub.
    """
    if "flash" in name:
        raise ValueError(f'name: wanted one without "flash", got {name!r}')
    AttentionInterface.register(name, partial(_attend, impl=impl))
    AttentionMaskInterface.register(name, partial(_make_mask, holes=holes))


class Call(NamedTuple):
    """A mask as a call of ``attention``: ``causal`` and ``window`` over the first ``keys`` keys.

    ``keys=None`` means all keys: torch.compile compiles again for each other number.
    """

    causal: Causal
    window: Window
    keys: int | None


class KeyRanges(torch.Tensor):
    """A boolean mask [B, 1, T, S] under which each query sees one run of keys.

    Operators that are applied to it get the dense boolean tensor.

    Args:
        key_bounds: int32 [B or 1, T, 2], the first key that a query sees, and one past the last.
        rest: the same mask as a ``Call``, or the other half of its ``Bounds``, that of the keys.
        size: (B, 1, T, S).
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # noqa: SLF001

    key_bounds: torch.Tensor
    query_bounds: torch.Tensor | None
    call: Call | None

    def __new__(
        cls, key_bounds: torch.Tensor, rest: Call | torch.Tensor, size: tuple[int, ...]
    ) -> Self:
        """Make a tensor of that size, without storage."""
        made: Self = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]  # noqa: SLF001
            cls, size, dtype=torch.bool, device=key_bounds.device
        )
        made.key_bounds, made.query_bounds, made.call = key_bounds, None, None
        if isinstance(rest, torch.Tensor):
            made.query_bounds = rest
        else:
            made.call = rest
        return made

    @classmethod
    def of(cls, call: Call, size: tuple[int, ...], device: torch.device | str) -> KeyRanges:
        """Return the mask of a call."""
        queries = torch.arange(size[2], device=device, dtype=torch.int32)[None]
        keys = size[3] if call.keys is None else call.keys
        bounds = Mask.of(call.causal, call.window).over(size[2], keys).keys_of(queries)
        return cls(torch.stack([torch.zeros_like(queries) + x for x in bounds], -1), call, size)

    def __repr__(self) -> str:  # type: ignore[override]
        """Say what the mask is without computing it: torch.compile logs its inputs."""
        return f"KeyRanges(size={tuple(self.shape)}, call={self.call})"

    def dense(self) -> torch.Tensor:
        """Return the boolean tensor, True where a query sees a key."""
        keys = torch.arange(self.shape[3], device=self.key_bounds.device)
        seen = (self.key_bounds[..., :1] <= keys) & (keys < self.key_bounds[..., 1:])
        return seen[:, None].expand(self.shape)

    def __tensor_flatten__(self) -> tuple[list[str], Call | None]:
        """Tell torch.compile what the mask is made of."""
        return ["key_bounds", "query_bounds"][: 2 - (self.call is not None)], self.call

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, torch.Tensor],
        call: Call | None,
        size: tuple[int, ...],
        stride: tuple[int, ...],
    ) -> KeyRanges:
        """Rebuild the mask from these."""
        del stride
        return KeyRanges(inner["key_bounds"], call or inner["query_bounds"], size)

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
    use_vmap: bool = False,  # noqa: FBT001, FBT002 - transformers' signature
    device: torch.device | str = "cpu",
    *,
    holes: bool = False,
    **_: Any,
) -> torch.Tensor:
    """Return the mask of queries at ``q_offset`` + t and keys at ``kv_offset`` + s.

    An unknown mask function is evaluated, and the host waits for the runs of keys. It does not wait
    while traced, or for a single query whose offset is on the device, so that steps of a static
    cache may share a graph: these get the boolean tensor.
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

    size, tracing = (batch_size, 1, q_length, kv_length), is_tracing(attention_mask)
    on_device = isinstance(q_offset, torch.Tensor)
    aligned = not on_device and (q_length, q_offset, kv_offset) == (kv_length, 0, 0)
    parts = None if use_vmap else parts_of(mask_function, aligned=aligned)
    if parts and attention_mask is None and not on_device:
        call = _call_of(window_of(parts), q_length, kv_length, int(q_offset) - kv_offset)
        if call is not None:
            return KeyRanges.of(call, size, device)
    if parts and not (holes and attention_mask is not None and tracing):
        at = torch.arange(q_length, device=device)[None]
        runs = [part.rows(at + q_offset, kv_offset) for part in parts]
        if attention_mask is None or _take(attention_mask, kv_offset, kv_length, runs, holes=holes):
            return _of_rows(*meet(runs, at, kv_length), size)
    if tracing or (on_device and q_length == 1):
        return evaluate()
    try:
        return _of_rows(*_evaluated(evaluate, size), size)
    except ValueError:  # a query's keys are not one run, or runs go back
        return evaluate()


def _of_rows(low: torch.Tensor, high: torch.Tensor, size: tuple[int, ...]) -> KeyRanges:
    keys, queries = of_rows(low, high, size[3])
    return KeyRanges(keys, queries, size)


def _take(
    attention_mask: torch.Tensor, kv_offset: int, keys: int, runs: list[Any], *, holes: bool
) -> bool:
    """Add the keys that a 2-D mask shows to ``runs``; return whether they have no holes."""
    shown = attention_mask[:, kv_offset : kv_offset + keys]
    run, intact = shown_by(pad(shown, (0, keys - shown.shape[1])))
    runs.append(run)
    if holes or readable(intact):
        return bool(intact)
    torch._assert_async(intact, HOLES)  # noqa: SLF001 - it has no other name
    return True


def _call_of(window: Window | None, q_length: int, kv_length: int, shift: int) -> Call | None:
    """Return the call for a window, or None; query t is aligned with key t + shift."""
    if window is None:
        return None
    left, right = window
    if right == 0 and 0 < q_length + shift <= kv_length:
        keys = None if q_length + shift == kv_length else q_length + shift
        return Call("bottom_right", (left, None), keys)
    if shift == 0 or window == UNBOUNDED:
        return Call(False, window, None)  # noqa: FBT003
    return None


def _evaluated(
    evaluate: Callable[[int, int], torch.Tensor], size: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (low, high) [B, T]: each query sees the keys low ... high - 1.

    Raises:
        ValueError: the keys of a query are not one run (see ``masks.of``).
    """
    batch, _, q_length, kv_length = size
    step = max(1, MOST_PAIRS // max(1, batch * kv_length))
    parts = [
        runs_of(evaluate(start, min(step, q_length - start))[:, 0], start)
        for start in range(0, q_length, step)
    ]
    low, high = (torch.cat(x, dim=1) for x in zip(*parts, strict=True))
    return monotone(low, high)


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
    cu_seq_lens_k: torch.Tensor | None = None,
    *,
    impl: str = "auto",
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention as transformers' models call it.

    Args:
        module: the layer; its ``is_causal`` is used if there is neither mask nor ``is_causal``.
        query: [B, H, T, D]; a batch of 1 is broadcast, as in SDPA.
        key: [B, G, S, D], likewise.
        value: [B, G, S, Dv], likewise.
        attention_mask: the result of ``_make_mask``; or a model's own [B or 1, H or 1, T, S],
            boolean or added to the scores; or None.
        dropout: must be 0.
        scaling: factor on the scores; None means D ** -0.5.
        is_causal: see ``module``; aligned at the top left, and without effect for a single query.
        sliding_window: w; if there is no mask, a window like flash-attn's (w - 1, w - 1).
        softcap: bound on the scores.
        s_aux: [H], one extra logit per head that takes part in the softmax and has no value.
        position_bias: [B or 1, H or 1, T, S], added to the scores.
        cu_seq_lens_q: integers [N + 1], cumulative lengths of documents packed in a batch of 1; a
            query sees no other document, whatever the mask.
        cu_seq_lens_k: likewise for the keys; None means ``cu_seq_lens_q``.
        impl: as in ``attention``.
        options: those in ``REFUSED`` must not be set; all others are ignored.

    Returns:
        o [B, T, H, Dv], and None in place of the attention weights.

    Raises:
        NotImplementedError: a keyword that is not supported.
    """
    _refuse(dropout, options)
    if query.shape[0] != key.shape[0]:  # learned queries of a batch of 1
        batch = max(query.shape[0], key.shape[0])
        query, key, value = (
            x.expand(batch if len(x) == 1 else -1, -1, -1, -1) for x in (query, key, value)
        )
    documents = _documents(cu_seq_lens_q, cu_seq_lens_k, len(query))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    mask, bias = attention_mask, position_bias
    call: Call | Bounds = Call(False, UNBOUNDED, None)  # noqa: FBT003
    if isinstance(mask, KeyRanges):
        call = _asked(mask)
    elif mask is not None:
        bias = _added(mask, bias, query.dtype)
    else:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        call = _call_without_mask(query.shape[2], causal=causal, sliding_window=sliding_window)
    corner, window, keys = call if isinstance(call, Call) else (False, UNBOUNDED, None)
    rows = None if isinstance(call, Call) else of_bounds(call)
    how: dict[str, Any] = {"window": window, "mask": rows, "documents": documents, "impl": impl}
    how |= {"bias": None if bias is None else bias[..., :keys], "sink": s_aux, "softcap": softcap}
    k, v = key[:, :, :keys], value[:, :, :keys]
    o: Any = attention(query, k, v, causal=corner, scale=scale, **how)
    return o.transpose(1, 2).contiguous(), None


def _added(mask: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Return one bias in place of a mask tensor and a bias."""
    if mask.dtype == torch.bool:
        mask = torch.zeros((), dtype=dtype, device=mask.device).where(mask, -torch.inf)
    return mask if bias is None else mask + bias


def _asked(mask: KeyRanges) -> Call | Bounds:
    """Return the mask as ``attention`` takes it; torch.compile would see only a method's result."""
    if mask.query_bounds is not None:
        return Bounds(mask.key_bounds, mask.query_bounds)
    return cast("Call", mask.call)


def _refuse(dropout: float, options: Mapping[str, object]) -> None:
    """Refuse keywords that would change the result."""
    for name in REFUSED.keys() & options.keys():
        if options[name] is not None and options[name] is not False:
            raise NotImplementedError(f"{name}: {REFUSED[name]}")
    if dropout:
        raise NotImplementedError(
            f"dropout: attention has none, got {dropout}; set attention_dropout=0 in the config"
        )


def _documents(
    cu_q: torch.Tensor | None, cu_k: torch.Tensor | None, batch: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    if cu_q is None:
        return None
    if batch != 1:
        msg = f"cu_seq_lens_q: documents are packed in a batch of 1, got {batch}"
        raise NotImplementedError(msg)
    return cu_q, cu_q if cu_k is None else cu_k


def _call_without_mask(q_length: int, *, causal: bool, sliding_window: int | None) -> Call:
    """Return the call for a layer that gets no mask, as transformers' own implementations do."""
    corner: Causal = "bottom_right" if q_length == 1 else "top_left"
    side = None if sliding_window is None else sliding_window - 1
    return Call(causal and corner, (side, None if causal else side), None)
