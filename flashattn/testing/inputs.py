"""Inputs for a Problem: values and memory layouts by name, the same from the same seed."""

from __future__ import annotations

from collections.abc import Callable

import torch

from flashattn.problem import Problem

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator, device=generator.device)


def _extreme(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
    return q * 8, k * 8, v


def _negative(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
    # Every score far below zero: a maximum that starts at 0 instead of -inf underflows the row.
    return q.abs() + 3, -k.abs() - 3, v


def _ties(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
    return q.sign(), k.sign(), v.round()


def _constant(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
    return q[..., :1].expand_as(q), k[..., :1].expand_as(k), v


def _zeros(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
    return q * 0, k, v


def _huge_v(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
    return q, k, v * 1e3


def _tiny(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
    return q, k, v * 1e-5


VALUES: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Tensors]] = {
    "normal": lambda q, k, v: (q, k, v),
    "extreme": _extreme,  # logits of +-60 standard deviations: one key takes all
    "negative": _negative,
    "ties": _ties,
    "constant": _constant,
    "zeros": _zeros,  # a uniform softmax
    "huge_v": _huge_v,
    "tiny": _tiny,  # denormal in fp16
}


def _contiguous(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous()


def _sequence_first(x: torch.Tensor) -> torch.Tensor:
    """[B, T, H, D] in memory: how a projection leaves it."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _packed(x: torch.Tensor) -> torch.Tensor:
    """Every third row of a larger buffer: how a fused qkv projection leaves it."""
    buffer = x.new_full((*x.shape[:3], 3, x.shape[3]), torch.nan)
    buffer[..., 1, :] = x
    return buffer[..., 1, :]


def _misaligned(x: torch.Tensor) -> torch.Tensor:
    """One element past an aligned address, rows of odd length: no descriptor can address it."""
    buffer = x.new_full((*x.shape[:3], x.shape[3] + 1), torch.nan)
    buffer[..., 1:] = x
    return buffer[..., 1:]


def _strided(x: torch.Tensor) -> torch.Tensor:
    """The head dimension with stride 2: not dense."""
    buffer = x.new_full((*x.shape, 2), torch.nan)
    buffer[..., 0] = x
    return buffer[..., 0]


def _expanded(x: torch.Tensor) -> torch.Tensor:
    """One head read by all of them through stride 0 (changes the values)."""
    return x[:, :1].expand_as(x) if x.shape[1] else x


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": _contiguous,
    "sequence_first": _sequence_first,
    "packed": _packed,
    "misaligned": _misaligned,
    "strided": _strided,
    "expanded": _expanded,
}


def make_inputs(
    problem: Problem,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    values: str = "normal",
    layout: str = "contiguous",
) -> Tensors:
    """Make q [B, H, T, D], k and v [B, G, S, D] in the problem's dtype.

    Args:
        problem: shapes and dtype.
        seed: of the generator, which lives on ``device``.
        device: where.
        values: a key of ``VALUES``.
        layout: a key of ``LAYOUTS``.
    """
    generator = torch.Generator(device).manual_seed(seed)
    queries = (problem.batch, problem.heads, problem.seq_q, problem.head_dim)
    keys = (problem.batch, problem.kv_heads, problem.seq_kv, problem.head_dim)
    drawn = (_normal(shape, generator) for shape in (queries, keys, keys))
    q, k, v = (LAYOUTS[layout](x.to(problem.torch_dtype)) for x in VALUES[values](*drawn))
    return q, k, v


def make_grads(
    problem: Problem, *, seed: int = 0, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Make gradients of o [B, H, T, D] (in the problem's dtype) and lse [B, H, T] (fp32)."""
    generator = torch.Generator(device).manual_seed(seed + 1_000_003)
    shape = (problem.batch, problem.heads, problem.seq_q, problem.head_dim)
    return _normal(shape, generator).to(problem.torch_dtype), _normal(shape[:3], generator)
