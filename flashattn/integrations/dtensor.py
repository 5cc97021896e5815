"""Sharding rules: after ``register()`` the Triton and Hopper kernels accept DTensors.

Batches and heads are independent, so q, k and v that are sharded over dimension 0 or 1 stay where
they are, and so do their gradients: tensor parallelism needs no communication here. Grouped heads
are sharded if the mesh divides both the heads of q and those of k and v. Other placements, such as
shards of the sequence, are first redistributed by DTensor. ``attention`` takes DTensors with
``impl="triton"`` and ``"hopper"``, and on GPUs with "auto".
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

import flashattn.ops  # noqa: F401 - defines the operators
from flashattn.plan.spec import Extras

Placements = list[Placement | None]
Rule = list[tuple[Placements, Placements]]
BATCH, HEADS = Shard(0), Shard(1)
BOUNDS = ("key_bounds", "query_bounds")


def register() -> None:
    """Register the sharding rules of the ``flashattn`` operators with DTensor."""
    register_sharding(torch.ops.flashattn.forward.default)(_forward)
    register_sharding(torch.ops.flashattn.backward.default)(_backward)
    register_sharding(torch.ops.flashattn.document_bounds.default)(_document_bounds)


def _forward(q: Any, k: Any, v: Any, *rest: Any) -> Rule:
    return _rule((q, k, v), rest, outputs=2, grouped=(q, k), learned=())


def _backward(
    grad_o: Any, grad_lse: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, *rest: Any
) -> Rule:
    inputs, learned = (grad_o, grad_lse, q, k, v, o, lse), ("bias", "sink")
    return _rule(inputs, rest, outputs=3, grouped=(q, k), learned=learned)


def _document_bounds(*given: Any) -> Rule:
    lengths: Placements = [Replicate() if hasattr(x, "placements") else None for x in given]
    return [([Replicate()] * 2, lengths)]


def _rule(
    inputs: tuple[Any, ...],
    rest: tuple[Any, ...],
    *,
    outputs: int,
    grouped: tuple[Any, Any],
    learned: tuple[str, ...],
) -> Rule:
    """Return the possible placements of outputs and inputs along a single mesh dimension.

    Args:
        inputs: the DTensor spec of each tensor, or None where there is none.
        rest: likewise for ``Extras``, then the other arguments of the operator.
        outputs: the number of outputs that are placed like q.
        grouped: q and k; heads are sharded only if both numbers of heads are divisible.
        learned: the fields of ``Extras`` whose gradients come after the outputs.
    """
    placed = [x.placements for x in inputs if x is not None]
    mesh = grouped[0].mesh
    # Mesh dimensions along which all inputs are alike stay so; each of the others may shard heads.
    unlike = [i for i, kinds in enumerate(zip(*placed, strict=True)) if not _stays(kinds)]
    ways = math.prod(mesh.size(i) for i in unlike)
    divisible = all(x.shape[1] % ways == 0 for x in grouped)
    kinds: list[Placement] = [Replicate(), BATCH, *([HEADS] if divisible else [])]
    extras = dict(zip(Extras._fields, rest, strict=False))
    options: Placements = [None] * (len(rest) - len(extras))
    rule: Rule = []
    for kind in kinds:
        placed_as: Placements = [None if x is None else kind for x in inputs]
        parts = [None if x is None else _part(name, x, kind) for name, x in extras.items()]
        gradients = [_gradient(name, extras[name], kind) for name in learned]
        rule.append(([*[kind] * outputs, *gradients], [*placed_as, *parts, *options]))
    return rule


def _part(name: str, x: Any, kind: Placement) -> Placement:
    """Return the placement of one of ``Extras`` if q is placed as ``kind``."""
    whole = kind == HEADS and name in BOUNDS
    split = isinstance(kind, Shard) and not whole and x.shape[kind.dim] > 1
    return kind if split else Replicate()


def _gradient(name: str, x: Any, kind: Placement) -> Placement:
    """Return the placement of the gradient of one of ``Extras``: a sum if all shards share it.

    The same holds for a gradient that is not wanted and has no elements.
    """
    part = Replicate() if x is None else _part(name, x, kind)
    return Partial() if part != kind and x is not None else part


def _stays(kinds: tuple[Any, ...]) -> bool:
    """Return whether inputs with these placements may stay as they are."""
    return set(kinds) in ({Replicate()}, {BATCH})
