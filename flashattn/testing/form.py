"""The form of results: dtype, shape, device and memory, whatever their values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

NOTHING: Mapping[str, torch.Tensor] = {}


class FormError(AssertionError):
    """A result has a wrong form, whatever its values."""


def check_form(
    inputs: Sequence[torch.Tensor],
    outputs: Mapping[str, Any],
    *,
    grad: bool = False,
    scored: Mapping[str, torch.Tensor] = NOTHING,
) -> None:
    """Check that o and the gradients are tensors like q, k and v, and lse [B, H, T] in fp32.

    o has as many columns as v.

    Each result must own its memory: it shares none with an input, and no two of its elements share
    an address, so that writing to a result changes nothing else. With ``grad`` each result must
    require a gradient. ``scored`` has ALiBi slopes, bias and sinks by name; the gradient of each
    must have the same form.

    Raises:
        FormError: a result has a wrong form; the message says what it is and what was wanted.
    """
    q, k, v = inputs
    wide = torch.promote_types(q.dtype, torch.float32)
    wanted = {
        "o": q.narrow(-1, 0, v.shape[-1]),
        "lse": q[..., 0].to("meta", wide),
        "dq": q,
        "dk": k,
        "dv": v,
    }
    wanted |= {f"d{name}": x for name, x in scored.items()}
    found = [said for name, x in outputs.items() for said in _faults(name, x, wanted[name], inputs)]
    if grad and not found:
        found = [f"{name}: has no gradient" for name, x in outputs.items() if not x.requires_grad]
    if found:
        raise FormError("; ".join(found))


def _faults(
    name: str, x: object, like: torch.Tensor, inputs: Sequence[torch.Tensor]
) -> Iterator[str]:
    if not isinstance(x, torch.Tensor):
        yield f"{name}: {type(x).__name__}, wanted a tensor"
        return
    facts = {
        "shape": (list(x.shape), list(like.shape)),
        "dtype": (x.dtype, like.dtype),
        "device": (x.device, inputs[0].device),
        "layout": (x.layout, torch.strided),
    }
    wrong = {fact: pair for fact, pair in facts.items() if pair[0] != pair[1]}
    yield from (f"{name}: {fact} {got}, wanted {want}" for fact, (got, want) in wrong.items())
    if wrong or x.numel() == 0:
        return
    if any(n > 1 and stride == 0 for n, stride in zip(x.shape, x.stride(), strict=True)):
        yield f"{name}: several elements share a place in memory, strides {list(x.stride())}"
    place = x.untyped_storage().data_ptr()
    if any(place == y.untyped_storage().data_ptr() for y in inputs):
        yield f"{name}: lies in the memory of an input"
