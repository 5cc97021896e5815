"""PyTorch's own: scaled_dot_product_attention as it chooses, and each of its backends by name.

The logsumexp is not public there. A bottom-right mask that is not also top-left is handed over as a
boolean mask, which only the math and the memory-efficient backends take.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flashattn.problem import Causal, Problem, diagonal
from flashattn.registry import WhyNot, register

if TYPE_CHECKING:
    from collections.abc import Callable

HALF = ("float16", "bfloat16")
BACKENDS = {
    "sdpa_math": SDPBackend.MATH,
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
}


def _mask(q: torch.Tensor, k: torch.Tensor, last: int) -> torch.Tensor:
    t = torch.arange(q.shape[2], device=q.device)[:, None]
    return torch.arange(k.shape[2], device=q.device)[None, :] <= t + last


def _sdpa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: Causal = False, scale: float | None = None
) -> torch.Tensor:
    last = diagonal(causal, q.shape[2], k.shape[2])
    return scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=_mask(q, k, last) if last else None,
        is_causal=last == 0,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )


def _backend(backend: SDPBackend) -> Callable[..., torch.Tensor]:
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: Causal, scale: float) -> torch.Tensor:
        with sdpa_kernel(backend):
            return _sdpa(q, k, v, causal=causal, scale=scale)

    return call


def _limits(problem: Problem, device: torch.device, *, backend: str = "sdpa") -> str | None:
    own_mask = problem.diagonal not in (None, 0)
    grouped = problem.heads != problem.kv_heads
    fused = backend not in ("sdpa", "sdpa_math")
    on_cuda = device.type == "cuda"
    empty = 0 in (problem.batch, problem.heads, problem.seq_q, problem.seq_kv)
    reasons = {
        "does not say what an empty problem gives": empty,
        "runs on CUDA only": not on_cuda and backend in ("sdpa_efficient", "sdpa_cudnn"),
        "takes fp16 and bf16 only": on_cuda and backend in ("sdpa_flash", "sdpa_cudnn") and problem.dtype not in HALF,
        "takes no fp64": on_cuda and backend == "sdpa_efficient" and problem.dtype == "float64",
        "takes no mask tensor, so no bottom-right mask when T != S": own_mask and backend in ("sdpa_flash", "sdpa_cudnn"),
        "takes no grouped heads": grouped and backend == "sdpa_efficient",
        "takes head dimensions up to 256 in multiples of 8": on_cuda
        and fused
        and (problem.head_dim > 256 or problem.head_dim % 8 != 0),  # noqa: PLR2004
        "does not promise zeros for a query that sees no key": problem.dead_rows > 0,
    }
    return next((f"{backend} {reason}" for reason, holds in reasons.items() if holds), None)


register("sdpa", why_not=_limits)(_sdpa)
for _name, _kind in BACKENDS.items():
    _why_not: WhyNot = partial(_limits, backend=_name)
    register(_name, why_not=_why_not)(_backend(_kind))
