"""PyTorch's scaled_dot_product_attention, with its own choice of backend or with one by name.

Its logsumexp is not public. Windows, packed documents, and bottom-right masks that differ from
top-left ones are passed as a boolean mask, which only the math and the memory-efficient backends
take.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flashattn.bounds import Bounds
from flashattn.dispatch import no_forward_mode
from flashattn.mask import CORNERS, FULL, UNBOUNDED, Band, Causal, Mask, Window
from flashattn.problem import Problem
from flashattn.registry import WhyNot, register
from flashattn.score import Terms, is_relative

HALF = ("float16", "bfloat16")
BACKENDS = {
    "sdpa_math": SDPBackend.MATH,
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
}


def _mask(band: Band, device: torch.device) -> torch.Tensor:
    t, s = (torch.arange(n, device=device) for n in (band.seq_q, band.seq_kv))
    seen: torch.Tensor = band.sees(t[:, None], s)
    return seen


def _added(
    q: torch.Tensor, k: torch.Tensor, mask: Mask, bounds: Bounds | None, bias: torch.Tensor
) -> torch.Tensor:
    """Return what PyTorch adds to the scores [B, H, T, S]: the bias, and -inf on hidden keys."""
    sizes, whole = (*q.shape[:3], k.shape[2]), (slice(0, q.shape[2]), slice(0, k.shape[2]))
    if bounds is None and mask == FULL and bias.dtype == q.dtype and not is_relative(bias):
        # A bias that is the same for all keys is repeated: the memory-efficient backend reads rows.
        rows = bias.expand(*bias.shape[:-1], sizes[-1])
        return (rows.contiguous() if bias.shape[-1] == 1 else rows).expand(sizes)
    added = Terms.of(q, k, bias=bias).added(q.new_zeros(()).expand(sizes), *whole)
    if bounds is not None:
        return added.masked_fill(~bounds.seen[:, None], -torch.inf)
    band = mask.over(*sizes[2:])
    everything = band.left is None and band.right is None
    return added if everything else added.masked_fill(~_mask(band, q.device), -torch.inf)


def _seen(q: torch.Tensor, x: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """Return the keys or values that queries see; those behind a causal mask may be NaN."""
    return x[:, :, : q.shape[2]] if "is_causal" in options and q.shape[2] < x.shape[2] else x


def _sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: Causal,
    window: Window = UNBOUNDED,
    bounds: Bounds | None = None,
    bias: torch.Tensor | None = None,
    scale: float | None,
) -> torch.Tensor:
    if scale is not None and scale <= 0:
        # The CPU kernel multiplies its -inf mask by the scale: NaN at 0, +inf below 0
        # (PyTorch 2.13).
        q, scale = q * scale, 1.0
    # Branches, not expressions: with symbolic sizes torch.compile must decide each of these.
    options: dict[str, Any] = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    if bias is not None:
        options["attn_mask"] = _added(q, k, Mask.of(causal, window), bounds, bias)
    elif bounds is not None:
        options["attn_mask"] = bounds.seen[:, None]
    elif window == UNBOUNDED and CORNERS[causal] == "top_left":
        # "auto" on a CPU comes here at each call, and making a mask costs the host more.
        options["is_causal"] = True
    elif window != UNBOUNDED or CORNERS[causal]:
        band = Mask.of(causal, window).over(q.shape[2], k.shape[2])
        if band.left is None and band.right == 0:
            options["is_causal"] = True
        elif band.left is not None or band.right is not None:
            options["attn_mask"] = _mask(band, q.device)
    k, v = _seen(q, k, options), _seen(q, v, options)
    try:
        o = scaled_dot_product_attention(q, k, v, scale=scale, **options)
    except NotImplementedError as error:
        raise no_forward_mode("scaled_dot_product_attention", error) from None
    if o.is_cpu and not torch.compiler.is_compiling() and o.grad_fn is not None:
        o.grad_fn.register_hook(_once)
    return o


def _once(gradients: tuple[torch.Tensor | None, ...], _: object) -> None:
    """Raise our error, not PyTorch's, for a second derivative that PyTorch does not have."""
    for x in gradients:
        if x is not None and x.grad_fn is not None and x.grad_fn.name().endswith("NotImplemented"):
            x.grad_fn.register_prehook(_refuse)


def _refuse(_: object) -> None:
    msg = 'scaled_dot_product_attention has no second derivative here; impl="reference" has'
    raise NotImplementedError(msg)


def _backend(backend: SDPBackend) -> Callable[..., torch.Tensor]:
    @wraps(_sdpa)
    def call(*inputs: Any, **options: Any) -> torch.Tensor:
        with sdpa_kernel(backend):
            return _sdpa(*inputs, **options)

    return call


def _limits(problem: Problem, device: torch.device, *, backend: str = "sdpa") -> str | None:
    band = problem.band
    own_mask = band.left is not None or band.right not in (None, 0)
    grouped = problem.heads != problem.kv_heads
    fused = backend not in ("sdpa", "sdpa_math")
    on_cuda = device.type == "cuda"
    reasons = {
        "does not say what an empty problem gives": problem.is_empty,
        "runs on CUDA only": not on_cuda and backend in ("sdpa_efficient", "sdpa_cudnn"),
        "takes fp16 and bf16 only": on_cuda
        and backend in ("sdpa_flash", "sdpa_cudnn")
        and problem.dtype not in HALF,
        "takes no fp64": on_cuda and backend == "sdpa_efficient" and problem.dtype == "float64",
        "takes no mask tensor, so no window, and no bottom-right mask when T != S": own_mask
        and backend in ("sdpa_flash", "sdpa_cudnn"),
        "takes no causal mask when T != S": on_cuda
        and backend == "sdpa_flash"
        and band.right == 0
        and problem.seq_q != problem.seq_kv,
        "takes no single key": backend == "sdpa_cudnn" and problem.seq_kv == 1,
        "takes no grouped heads": grouped and backend == "sdpa_efficient",
        "takes head dimensions up to 256 in multiples of 8": on_cuda
        and fused
        and (problem.head_dim > 256 or problem.head_dim % 8 != 0),  # noqa: PLR2004
        "takes narrow values on a CPU only where it holds all scores": problem.value_dim is not None
        and not on_cuda
        and backend == "sdpa",
        "takes values in multiples of 8 columns": backend == "sdpa_cudnn" and problem.dv % 8 != 0,
        "does not promise zeros for a query that sees no key": problem.fully_masked_rows > 0,
    }
    return next((f"{backend} {reason}" for reason, holds in reasons.items() if holds), None)


def _fastest(problem: Problem, device: torch.device) -> dict[str, Any] | None:
    """On a CPU, leave problems that need a mask tensor to others: SDPA computes all scores."""
    masked = problem.window != UNBOUNDED or problem.by_rows or problem.bias != ""
    return None if device.type == "cpu" and masked else {}


register(
    "sdpa",
    why_not=_limits,
    fastest=_fastest,
    narrow_values=True,
    windows=True,
    intervals=True,
    bias=True,
    strict=False,
)(_sdpa)
for _name, _kind in BACKENDS.items():
    _why_not: WhyNot = partial(_limits, backend=_name)
    _masks = _kind in (SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION)
    register(
        _name,
        why_not=_why_not,
        windows=True,
        intervals=_masks,
        bias=_masks,
        narrow_values=_kind != SDPBackend.FLASH_ATTENTION,
        strict=False,
    )(_backend(_kind))
