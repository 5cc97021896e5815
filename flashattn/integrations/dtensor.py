"""Sharding rules: after ``register()`` the Triton and Hopper kernels attend to DTensors.

Batches and heads are problems of their own, so q, k and v that are sharded over dimension 0 or 1
stay where they are, and so do their gradients: tensor parallelism needs no communication here.
Grouped heads are sharded where the mesh divides both the heads of q and those of k and v. What is
placed otherwise, over the sequence for example, DTensor redistributes first. ``attention`` takes
DTensors by ``impl="triton"`` and ``"hopper"``, and on GPUs by "auto".
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

import flashattn.ops  # noqa: F401 - defines the operators

Placements = list[Placement | None]
Rule = list[tuple[Placements, Placements]]
BATCH, HEADS = Shard(0), Shard(1)


def register() -> None:
    """Tell DTensor how the operators of ``flashattn`` are sharded."""
    register_sharding(torch.ops.flashattn.forward.default)(_forward)
    register_sharding(torch.ops.flashattn.backward.default)(_backward)
    register_sharding(torch.ops.flashattn.document_bounds.default)(_document_bounds)


def _forward(q: Any, k: Any, v: Any, *options: Any) -> Rule:
    return _rule((q, k, v), options, outputs=2, grouped=(q, k))


def _backward(
    grad_o: Any, grad_lse: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, *options: Any
) -> Rule:
    return _rule((grad_o, grad_lse, q, k, v, o, lse), options, outputs=3, grouped=(q, k))


def _document_bounds(*given: Any) -> Rule:
    lengths: Placements = [Replicate() if hasattr(x, "placements") else None for x in given]
    return [([Replicate()] * 2, lengths)]


def _rule(
    inputs: tuple[Any, ...], options: tuple[Any, ...], *, outputs: int, grouped: tuple[Any, Any]
) -> Rule:
    """Return how outputs are placed when inputs are, for each dimension of the mesh by itself.

    Args:
        inputs: what DTensor knows of each tensor, or None where there is none.
        options: further arguments of the operator.
        outputs: how many there are.
        grouped: those of the inputs that must keep their heads together.
    """
    placed = [x.placements for x in inputs if x is not None]
    mesh = grouped[0].mesh
    # A mesh dimension along which all inputs are alike keeps them so; each other may get the heads.
    unlike = [i for i, kinds in enumerate(zip(*placed, strict=True)) if not _stays(kinds)]
    ways = math.prod(mesh.size(i) for i in unlike)
    divisible = all(x.shape[1] % ways == 0 for x in grouped)
    kinds: list[Placement] = [Replicate(), BATCH, *([HEADS] if divisible else [])]
    return [
        (
            [kind] * outputs,
            [None if x is None else kind for x in inputs] + [_of_rows(x, kind) for x in options],
        )
        for kind in kinds
    ]


def _of_rows(x: Any, kind: Placement) -> Placement | None:
    """Return how bounds of rows are placed, which are those of all heads, of one batch or each."""
    if not hasattr(x, "placements"):
        return None
    return kind if kind == BATCH and x.shape[0] > 1 else Replicate()


def _stays(kinds: tuple[Any, ...]) -> bool:
    """Return whether inputs placed so need no other placement."""
    return set(kinds) in ({Replicate()}, {BATCH})
