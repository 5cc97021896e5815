"""FlashAttention 2, 3 and 4 of the flash-attn project, if they are installed.

Their tensors are [B, T, H, D], or [total, H, D] for packed documents. Their causal masks and
windows are aligned at the bottom right.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from flashattn.mask import FULL, UNBOUNDED, Causal, Mask, Window
from flashattn.problem import Lengths, Problem
from flashattn.registry import WhyNot, register
from flashattn.resolve import cumulative

MODULES = {
    "flash_attn_2": "flash_attn",
    "flash_attn_3": "flash_attn_interface",
    "flash_attn_4": "flash_attn.cute",
}
NO_BOUND = {"flash_attn": -1, "flash_attn_interface": -1, "flash_attn.cute": None}
HOPPER = (9, 0)


@cache
def _installed(module: str) -> bool:
    try:
        spec = find_spec(module)
    except ModuleNotFoundError:  # a submodule of a package that is not installed
        return False
    return spec is not None and spec.origin is not None  # FA-4 alone makes flash_attn a namespace


def _attending(module: str) -> Callable[..., torch.Tensor]:
    def attend(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        causal: Causal,
        window: Window = UNBOUNDED,
        documents: Lengths | None = None,
        softcap: float | None = None,
        alibi_slopes: torch.Tensor | None = None,
        sink: torch.Tensor | None = None,
        scale: float,
    ) -> torch.Tensor:
        options: dict[str, Any] = {"softmax_scale": scale, "causal": bool(causal)}
        if softcap is not None:
            options["softcap"] = softcap
        if alibi_slopes is not None:
            shared = alibi_slopes.shape[0] == 1
            options["alibi_slopes"] = alibi_slopes[0] if shared else alibi_slopes
        if window != UNBOUNDED:
            mask = Mask.of(causal, window)
            bounds = (NO_BOUND[module] if x is None else x for x in (mask.left, mask.right))
            options["window_size"] = tuple(bounds)
        if sink is not None:
            options["learnable_sink"] = sink[0]
        flash, inputs = import_module(module), [x.transpose(1, 2) for x in (q, k, v)]
        if documents is None:
            result = flash.flash_attn_func(*inputs, **options)
        else:
            options |= _packed(documents, q.device)
            result = flash.flash_attn_varlen_func(*(x[0] for x in inputs), **options)
        o = result[0] if isinstance(result, tuple) else result
        return (o if documents is None else o[None]).transpose(1, 2)

    return attend


@lru_cache(maxsize=4)  # shared by calls of one problem, such as the layers of a model
@torch.inference_mode(mode=False)  # a later call may save them for its backward
def _packed(documents: Lengths, device: torch.device) -> dict[str, Any]:
    cu_q, cu_k = cumulative(documents, device)
    longest = (max(rows) for rows in zip(*documents, strict=True))
    lengths = zip(("max_seqlen_q", "max_seqlen_k"), longest, strict=True)
    return {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, **dict(lengths)}


def _limits(problem: Problem, device: torch.device, *, name: str) -> str | None:
    if not _installed(MODULES[name]):
        return f"{name} is not installed (module {MODULES[name]})"
    if device.type != "cuda":
        return f"{name} runs on CUDA only"
    reasons = {
        "takes fp16 and bf16 only": problem.dtype not in ("float16", "bfloat16"),
        "takes head dimensions up to 256 in multiples of 8": problem.head_dim
        not in range(8, 257, 8),
        "takes narrow values beside 192 columns of keys only, of 128": problem.value_dim is not None
        and (problem.head_dim, problem.dv) != (192, 128),
        "aligns masks at the bottom right only": problem.mask != FULL
        and problem.mask.corner == "top_left"
        and any(band.seq_q != band.seq_kv for band in problem.bands),
        "takes windows and documents of known lengths": problem.documents == "unknown"
        or problem.prefix is not None,
        "packs documents into one batch": problem.documents is not None and problem.batch != 1,
        "is not asked for empty problems": problem.is_empty,
        "does not test its gradients where a query sees no key": problem.fully_masked_rows > 0,
        "needs a Hopper GPU": name != "flash_attn_2"
        and torch.cuda.get_device_capability(device) < HOPPER,
    }
    return next((f"{name} {reason}" for reason, holds in reasons.items() if holds), None)


for _name, _module in MODULES.items():
    _why_not: WhyNot = partial(_limits, name=_name)
    _own: dict[str, Any] = dict.fromkeys(("sink", "narrow_values"), _name == "flash_attn_4")
    _own["alibi"] = _name == "flash_attn_2"
    register(
        _name, why_not=_why_not, windows=True, intervals=True, softcap=True, strict=False, **_own
    )(_attending(_module))
