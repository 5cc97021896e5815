"""One kernel of the backward by itself: as searches time it, counts count it, and tests ask it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch

from flashattn.kernels import launch
from flashattn.kernels.launch import PLANS, Launch, facts
from flashattn.kernels.portable import backward, preprocess
from flashattn.kernels.portable.passes import Passes
from flashattn.kernels.tiles import Kernel, Tile


@dataclass(frozen=True, kw_only=True)
class Recomputation:
    """What each kernel finds P and dS from.

    q, k, v, grad_o and o have dense rows. A pass is split into ``num_splits`` at most; None lets
    ``splitting.split`` say.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad_o: torch.Tensor
    grad_lse: torch.Tensor | None
    o: torch.Tensor
    lse: torch.Tensor
    diagonal: int | None
    scale: float
    precision: str = "auto"
    num_splits: int | None = None

    @cached_property
    def row_terms(self) -> tuple[torch.Tensor, torch.Tensor]:
        """lse_log2 and delta."""
        return preprocess.row_terms(self.grad_o, self.grad_lse, self.o, self.lse)

    def gradients(self, kernel: Kernel, tile: Tile | None = None) -> tuple[torch.Tensor, ...]:
        """Launch a kernel with the table's tile or another.

        Args:
            kernel: one of ``backward.KERNELS``.
            tile: instead of the table's.

        Returns:
            dk and dv, dq, or all three.
        """
        inputs = self.q, self.k, self.v, self.grad_o
        of = {"bwd_dkdv": (self.k, self.v), "bwd_dq": (self.q,)}
        grads = tuple(map(torch.empty_like, of.get(kernel, (self.k, self.v, self.q))))
        strides = tuple(x.stride() for x in grads)
        precision = launch.input_precision(self.precision, self.q.dtype)
        how = self.diagonal, self.scale, precision, tile, self.num_splits
        step = _prepared(kernel, facts(*inputs, self.o), strides, *how)
        if isinstance(step, Launch):
            step(*inputs, (self.lse, self.grad_lse, self.o), grads)
        else:
            step(inputs, self.row_terms, grads)
        return grads


@lru_cache(PLANS)
def _prepared(kernel: Kernel, *given: Any) -> Passes | Launch:
    """Return the pass that is prepared; for "bwd_whole" the launch, which is all."""
    step = backward.prepare(kernel, *given)
    return step.run if kernel == "bwd_whole" else Passes(step)
