"""Pass: how a backward kernel that owns tiles and walks over others is launched, split or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton

from flashattn.kernels import splitting
from flashattn.kernels.launch import Launch, Like
from flashattn.kernels.primitives import LOG2E
from flashattn.kernels.tiles import Kernel

ROW_PADDING = 256  # rows of lse2 and delta are padded to whole tiles, whatever the tile


def pitch(seq_q: int) -> int:
    """Return how many numbers of lse2 and delta a head has."""
    return triton.cdiv(seq_q, ROW_PADDING) * ROW_PADDING


@dataclass(frozen=True)
class Pass:
    """A launch of flashattn_bwd_dkdv or flashattn_bwd_dq, and the sum of the parts it computes.

    Args:
        fold: the launch.
        cut: whether it takes q, k, v and grad_o cut.
        parts: that programs walk over, each for itself.
        sums: for each gradient, if there are parts to add up.
    """

    fold: Launch
    cut: bool
    parts: int
    sums: tuple[Launch, ...]

    def __call__(self, given: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> None:
        """Fill grads; given are q, k, v, grad_o, lse2 and delta."""
        if not self.sums:
            self.fold(*given, *grads)
            return
        terms = [
            torch.empty((self.parts * len(x), *x.shape[1:]), dtype=torch.float32, device=x.device)
            for x in grads
        ]
        self.fold(*given, *terms)
        for add, x, of in zip(self.sums, grads, terms, strict=True):
            add(of, x)


class Walk(NamedTuple):
    """How a pass is launched.

    Args:
        programs: in all.
        parts: of what a program would walk over.
        chunk: rows of a part.
        strides: of what it writes, gradients or their parts.
        sums: what adds up the parts of each.
    """

    programs: int
    parts: int
    chunk: int
    strides: Sequence[tuple[int, ...]]
    sums: tuple[Launch, ...]


def walk(
    kernel: Kernel,
    q: Like,
    k: Like,
    blocks: tuple[int, int],
    strides: Sequence[tuple[int, ...]],
    most: int | None = None,
) -> Walk:
    """Return how a pass is launched that owns tiles of keys, or of queries, and walks over others.

    Args:
        kernel: "bwd_dkdv" or "bwd_dq".
        q: [B, H, T, D].
        k: [B, G, S, D].
        blocks: queries of a tile, and keys.
        strides: of the gradients.
        most: parts, instead of what fills the GPU.
    """
    owner, walked = (k, q) if kernel == "bwd_dkdv" else (q, k)
    own, step = reversed(blocks) if kernel == "bwd_dkdv" else blocks
    batch, heads, rows, _ = owner.shape
    programs = triton.cdiv(rows, own) * batch * heads
    parts, chunk = splitting.split(kernel, programs, walked.shape[2], step, q.device, most)
    if parts == 1:
        return Walk(programs, parts, chunk, strides, ())
    sums = tuple(splitting.adding(parts, owner.shape, of) for of in strides)
    dense = torch.empty(owner.shape, device="meta").stride()
    return Walk(programs * parts, parts, chunk, (dense,) * len(sums), sums)


def numbers(q: Like, k: Like, way: Walk, diagonal: int | None, scale: float) -> tuple[object, ...]:
    """Return what kernels of a pass take, from ``heads`` to ``scale_log2``."""
    batch, heads, seq_q, _ = q.shape
    kv_heads, seq_kv = k.shape[1:3]
    group, last = heads // kv_heads, diagonal or 0
    sizes = heads, group, seq_q, seq_kv, pitch(seq_q), last, batch, way.chunk
    return *sizes, scale, scale * LOG2E.value
