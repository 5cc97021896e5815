"""The vmap rule of our operators."""

from __future__ import annotations

from typing import Any

import torch

from flashattn.plan.spec import Extras


def rule_of(op: Any, *, q: int, tensors: int) -> Any:
    """Return the vmap rule of ``op``, which folds the mapped dimension of its tensors into B.

    Args:
        op: the operator.
        q: the index of q among its arguments.
        tensors: the number of tensors that it takes, extras last.
    """

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, tuple[Any, ...]]:
        size, batch = info.batch_size, args[q].shape[0 if in_dims[q] != 0 else 1]
        bias, sink = args[tensors - 2 : tensors]

        def fold(x: torch.Tensor | None, dim: int | None, name: str) -> torch.Tensor | None:
            # In the backward, bias and sink have a gradient for each example.
            learned = q > 0 and name in ("bias", "sink")
            if x is None or (name and dim is None and x.shape[0] == 1 and not learned):
                return x  # one for all batches
            x = x[None] if dim is None else x.movedim(dim, 0)
            x = x.expand(size, batch, *x.shape[2:]).flatten(0, 1)
            return x if name in ("", "bias") else x.contiguous()

        def unfold(x: torch.Tensor, like: torch.Tensor | None, dim: int | None) -> Any:
            if like is None or x.numel() == 0:
                return x, None
            x, own = x.unflatten(0, (size, -1)), like.shape[0 if dim != 0 else 1]
            return x.sum(1, keepdim=True) if own == 1 < batch else x, 0

        names = ("",) * (tensors - len(Extras._fields)) + Extras._fields
        given = zip(args, in_dims, names, strict=False)
        results = op(*(fold(*x) for x in given), *args[tensors:])
        plain = tuple(x.unflatten(0, (size, -1)) for x in results[:3])
        if q == 0:  # forward has no gradients
            return plain, (0, 0)
        learned = zip(results[3:], (bias, sink), in_dims[tensors - 2 : tensors], strict=True)
        others, dims = zip(*(unfold(*x) for x in learned), strict=True)
        return (*plain, *others), (0, 0, 0, *dims)

    return rule
