"""Passes: how backward kernels that own tiles and walk over others are launched, split or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton

from flashattn.kernels import splitting
from flashattn.kernels.constants import LOG2E
from flashattn.kernels.launch import Launch, Like
from flashattn.kernels.portable import combine
from flashattn.kernels.portable.bf16x3 import decompose_all
from flashattn.kernels.portable.combine import Written
from flashattn.kernels.portable.preprocess import rounded
from flashattn.kernels.tiles import Kernel


@dataclass(frozen=True)
class Pass:
    """A launch that fills gradients, or partial sums of them.

    Args:
        run: of q, k, v, grad_o, lse_log2, delta and what it fills.
        terms: bf16 terms that the first four are decomposed into before; 0: they are not.
        written: what it fills, of dk, dv and dq, in this order.
    """

    run: Launch
    terms: int
    written: tuple[Written, ...]


class Passes:
    """Passes one after the other, and at last the sum of the splits that they computed.

    Args:
        steps: the passes.
    """

    def __init__(self, *steps: Pass) -> None:
        """Prepare the sum, if there are splits to add up."""
        self.terms = max(step.terms for step in steps)
        self._steps: list[tuple[Launch, int, slice]] = []
        written: list[Written] = []
        for step in steps:
            filled = slice(len(written), len(written) + len(step.written))
            self._steps.append((step.run, step.terms, filled))
            written += step.written
        self._num_splits = [x.num_splits for x in written]
        self._sum = combine.adding(written) if max(self._num_splits) > 1 else None

    def __call__(
        self,
        inputs: Sequence[torch.Tensor],
        rows: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
    ) -> None:
        """Fill grads.

        Args:
            inputs: q, k, v, and grad_o.
            rows: lse_log2 and delta.
            grads: what the passes fill, in their order.
        """
        operands = decompose_all(*inputs, terms=self.terms) if self.terms else inputs
        filled = grads if self._sum is None else combine.room(grads, self._num_splits)
        for run, terms, which in self._steps:
            run(*(operands if terms else inputs), *rows, *filled[which])
        if self._sum is not None:
            self._sum(filled, grads)


@dataclass(frozen=True)
class Walk:
    """How programs own tiles of keys, or of queries, and walk over the others.

    Args:
        programs: in all.
        split_len: rows of a split of what a program would walk over.
        written: the gradients they fill, or partial sums of them.
        strides: of these.
    """

    programs: int
    split_len: int
    written: tuple[Written, ...]
    strides: tuple[tuple[int, ...], ...]

    @property
    def split(self) -> bool:
        """Whether a program has only a split of what it would walk over."""
        return self.written[0].num_splits > 1


def owners(kernel: Kernel, q: Like, k: Like, blocks: tuple[int, int]) -> int:
    """Return how many programs own a tile each; arguments as in ``walk``."""
    owner, own = (k, blocks[1]) if kernel == "bwd_dkdv" else (q, blocks[0])
    batch, heads, rows, _ = owner.shape
    return triton.cdiv(rows, own) * batch * heads


def walk(
    kernel: Kernel,
    q: Like,
    k: Like,
    blocks: tuple[int, int],
    strides: Sequence[tuple[int, ...]],
    most: int | None = None,
    together: int | None = None,
) -> Walk:
    """Return how programs own tiles and walk over others.

    Args:
        kernel: "bwd_dkdv", whose programs own keys, or "bwd_dq".
        q: [B, H, T, D].
        k: [B, G, S, D].
        blocks: queries of a tile, and keys.
        strides: of the gradients.
        most: splits, instead of what fills the GPU.
        together: programs of both passes, where they are launched side by side.
    """
    owner, walked = (k, q) if kernel == "bwd_dkdv" else (q, k)
    step = blocks[0] if kernel == "bwd_dkdv" else blocks[1]
    programs = owners(kernel, q, k, blocks)
    which, beside = (kernel, programs) if together is None else ("bwd", together)
    num_splits, split_len = splitting.split(which, beside, walked.shape[2], step, q.device, most)
    written = tuple(Written(num_splits, owner.shape, of) for of in strides)
    if num_splits > 1:
        strides = [torch.empty(owner.shape, device="meta").stride()] * len(written)
    return Walk(programs * num_splits, split_len, written, tuple(strides))


def numbers(
    q: Like, k: Like, split_lens: Sequence[int], diagonal: int | None, scale: float
) -> tuple[object, ...]:
    """Return what kernels of a pass take, from ``heads`` to ``scale_log2``."""
    batch, heads, seq_q, _ = q.shape
    kv_heads, seq_kv = k.shape[1:3]
    group, last = heads // kv_heads, diagonal or 0
    sizes = heads, group, seq_q, seq_kv, rounded(seq_q), last, batch, *split_lens
    return *sizes, scale, scale * LOG2E.value
