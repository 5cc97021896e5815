"""Check the arguments that flash-attn's functions share, and rename them for ``attention``."""

from __future__ import annotations

from typing import Any

import torch

from flashattn.checks import check_among, check_scale
from flashattn.masks import integers
from flashattn.score import check_softcap

WindowSize = tuple[int | None, int | None]
DENSE = ("batch", "seqlen", "nheads", "headdim")
PACKED = ("total", "nheads", "headdim")

NO_PAGES = "keys and values are not read from pages"
NO_ROTATION = "queries and keys are not rotated"
NO_MASK = "the only masks are causal and window_size"
UNSUPPORTED = {
    "dropout_p": "there is no dropout",
    "alibi_slopes": "there is no ALiBi with packed documents or a cache",
    "block_table": NO_PAGES,
    "page_table": NO_PAGES,
    "rotary_cos": NO_ROTATION,
    "rotary_sin": NO_ROTATION,
    "score_mod": "scores are not modified",
    "mask_mod": NO_MASK,
    "block_sparse_tensors": NO_MASK,
}


def keywords(
    scale: float | None,
    causal: bool,
    window_size: WindowSize,
    deterministic: bool,
    return_lse: bool,
    **features: Any,
) -> dict[str, Any]:
    """Check the arguments that are not tensors; return the keywords of ``attention``.

    The mask is returned as ``left`` and ``right``.

    Raises:
        NotImplementedError: an unsupported feature is asked for.
        ValueError: an argument does not fit.
    """
    on = {name: x for name, x in features.items() if x is not None and not _is_zero(x)}
    for name in on:
        if name in UNSUPPORTED:
            raise NotImplementedError(f"{name}: {UNSUPPORTED[name]}")
    check_among("causal", causal, (False, True))
    bounds = list(window_size) if isinstance(window_size, (tuple, list)) else []
    if list(map(_is_bound, bounds)) != [True, True]:
        wanted = "wanted (left, right), each an int from 0 on, or -1 or None for no bound"
        raise ValueError(f"window_size: {wanted}, got {window_size!r}")
    check_scale(scale, 1, "softmax_scale")
    check_softcap(on.get("softcap"))
    left, right = (None if x == -1 else x for x in bounds)
    on["sink"] = on.pop("learnable_sink", None)
    options = {"scale": scale, "deterministic": deterministic, "return_lse": return_lse, **on}
    return {"left": left, "right": 0 if causal else right, **options}


def _is_bound(x: object) -> bool:
    return x is None or (isinstance(x, int) and not isinstance(x, bool) and x >= -1)


def _is_zero(x: object) -> bool:
    return isinstance(x, (int, float)) and x == 0


def check_shapes(tensors: dict[str, Any], layout: tuple[str, ...]) -> None:
    """Check shapes here, because ``attention`` would report them in its own order of dimensions.

    Args:
        tensors: q, k and v by name; the width of v may differ.
        layout: the names of q's dimensions.

    Raises:
        ValueError: a tensor does not fit.
    """
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor) or x.ndim != len(layout):
            raise ValueError(f"{name}: wanted a tensor [{', '.join(layout)}], got {shown(x)}")
    (_, q), *others = tensors.items()
    *batch, _, _, headdim = q.shape
    rows = others[0][1].shape[-3:-1]
    for i, (name, x) in enumerate(others):
        wanted = [*batch, *rows, x.shape[-1] if i else headdim]
        if list(x.shape) != wanted:
            raise ValueError(f"{name}: wanted shape {wanted}, got {shown(x)}")


def check_integers(name: str, x: object, count: int, device: torch.device) -> torch.Tensor:
    """Check that x is an int32 or int64 tensor [count] on the device, and return it.

    Raises:
        ValueError: x is not such a tensor.
    """
    found = integers(name, x, 1)
    if (len(found), found.device) != (count, device):
        got = f"{shown(found)} on {found.device}"
        raise ValueError(f"{name}: wanted integers [{count}] on {device}, got {got}")
    return found


def unpacked(name: str, x: object, count: int, layout: tuple[str, ...]) -> tuple[Any, ...]:
    """Return views of the ``count`` tensors that x stacks before its last two dimensions.

    Raises:
        ValueError: x is not such a tensor.
    """
    if isinstance(x, torch.Tensor) and x.ndim == len(layout) + 1 and x.shape[-3] == count:
        return x.unbind(-3)
    wanted = ", ".join((*layout[:-2], str(count), *layout[-2:]))
    raise ValueError(f"{name}: wanted a tensor [{wanted}], got {shown(x)}")


def shown(x: object) -> str:
    """Return how an error message describes an argument."""
    return str(list(x.shape)) if isinstance(x, torch.Tensor) else type(x).__name__
