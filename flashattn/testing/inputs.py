"""Inputs for a Problem: values and memory layouts by name, reproducible from a seed.

The random number generator is on the device.
"""

from __future__ import annotations

import torch

from flashattn.problem import Problem
from flashattn.testing.layouts import GRAD_LAYOUTS, LAYOUTS
from flashattn.testing.values import VALUES, Tensors


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator, device=generator.device)


def make_inputs(
    problem: Problem,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    values: str = "normal",
    layout: str = "contiguous",
) -> Tensors:
    """Make q [B, H, T, D], k [B, G, S, D] and v [B, G, S, Dv] in the problem's dtype.

    ``values`` is a key of ``values.VALUES``, ``layout`` one of ``layouts.LAYOUTS``.
    """
    generator = torch.Generator(device).manual_seed(seed)
    queries = (problem.batch, problem.heads, problem.seq_q, problem.head_dim)
    keys = (problem.batch, problem.kv_heads, problem.seq_kv, problem.head_dim)
    values_of = (*keys[:3], problem.dv)
    drawn = (_normal(shape, generator) for shape in (queries, keys, values_of))
    q, k, v = (LAYOUTS[layout](x.to(problem.torch_dtype)) for x in VALUES[values](*drawn))
    return q, k, v


def make_grads(
    problem: Problem,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    layout: str = "contiguous",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Make gradients of o [B, H, T, Dv] (in the problem's dtype) and lse [B, H, T] (fp32).

    ``layout`` is a key of ``layouts.GRAD_LAYOUTS``.
    """
    generator = torch.Generator(device).manual_seed(seed + 1_000_003)
    shape = (problem.batch, problem.heads, problem.seq_q, problem.dv)
    grad_o, grad_lse = _normal(shape, generator), _normal((*shape[:3], 1), generator)
    lay = GRAD_LAYOUTS[layout]
    return lay(grad_o.to(problem.torch_dtype)), lay(grad_lse)[..., 0]


def make_scored(
    problem: Problem, *, seed: int = 0, device: torch.device | str = "cpu"
) -> dict[str, torch.Tensor]:
    """Make ALiBi slopes, bias and sinks, as far as the problem has them, by their names.

    Names are those of ``attention``. Slopes are those of Press et al. (2022), 2^(-8 (h + 1) / H).
    If seed + B is even, each batch has its own slopes, a tenth apart, and those of the first head
    are 0. If the seed is odd, a bias is transposed in memory. If seed // 2 + B is even, it is fp32
    whatever q is. Sinks range from far below the scores to above them.
    """
    made: dict[str, torch.Tensor] = {}
    generator = torch.Generator(device).manual_seed(seed + 2_000_003)
    if problem.alibi:
        heads = torch.arange(problem.heads, device=device, dtype=torch.float32)
        slopes = torch.exp2(-8 * (heads + 1) / max(problem.heads, 1))[None]
        if (seed + problem.batch) % 2 == 0:
            slopes = slopes * (1 + torch.arange(problem.batch, device=device)[:, None] / 10)
            slopes[:, :1] = 0
        made["alibi_slopes"] = slopes
    if problem.bias_shape is not None:
        bias = _normal(problem.bias_shape, generator)
        bias = bias.to(problem.torch_dtype) if (seed // 2 + problem.batch) % 2 else bias
        made["bias"] = bias.mT.contiguous().mT if seed % 2 else bias
    if problem.sink:
        made["sink"] = torch.linspace(-20, 3, problem.heads, device=device)[None]
    return made
