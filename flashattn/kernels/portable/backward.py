"""The backward's launches: ``gradients`` has the kernels.

First the preprocessing, then, of inputs that may be decomposed before, dk and dv in one pass and dq
in another, or both side by side where they are few programs; of next to nothing all in one launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch

from flashattn.kernels import launch
from flashattn.kernels.constants import INTERPRETED, LOG2E
from flashattn.kernels.launch import PLANS, Facts, Launch, Like, dense, facts
from flashattn.kernels.portable.bf16x3 import decomposed_like
from flashattn.kernels.portable.config import BackwardLayout, Config
from flashattn.kernels.portable.gradients import (
    flashattn_bwd,
    flashattn_bwd_dkdv,
    flashattn_bwd_dq,
)
from flashattn.kernels.portable.passes import Pass, Passes, Walk, owners, walk
from flashattn.kernels.portable.preprocess import preprocess_launch, rounded, row_shape
from flashattn.kernels.tiles import JOINT, Kernel, Tile

KERNELS: dict[Kernel, Any] = {
    "bwd": flashattn_bwd,
    "bwd_whole": flashattn_bwd,
    "bwd_dkdv": flashattn_bwd_dkdv,
    "bwd_dq": flashattn_bwd_dq,
}
GRADS: dict[Kernel, tuple[str, ...]] = {  # what each writes, in the order of its arguments
    **dict.fromkeys(("bwd", "bwd_whole"), ("dk", "dv", "dq")),
    "bwd_dkdv": ("dk", "dv"),
    "bwd_dq": ("dq",),
}
# For each multiprocessor, of both passes together; and where fp32 comes cut, of 64 columns: then
# passes of their own, with larger tiles, are soon the faster. On an H200 one head of 8192 took 480
# us with 256 programs, and 490 by passes apart, one of 16 384 1901 and 1618, eight of 4096 1016 and
# 801.
FEW_PROGRAMS, FEW_WIDE_CUT = 8, 2
WIDE_CUT = 64  # columns
# Scores, as ``launch.scores`` counts them, up to which these programs find lse_log2 and delta
# themselves, each anew: a launch less, for the host and for the device. In the interpreter some
# problems are on either side.
WHOLE = 1 << 13 if INTERPRETED.value else launch.TINY


def prepare(
    kernel: Kernel,
    given: tuple[Facts, ...],
    strides: tuple[tuple[int, ...], ...],
    diagonal: int | None,
    scale: float,
    precision: str,
    tile: Tile | None = None,
    num_splits: int | None = None,
) -> Pass:
    """Prepare the launch of flashattn_bwd_dkdv, flashattn_bwd_dq, or flashattn_bwd, which is both.

    Args:
        kernel: one of ``KERNELS``.
        given: what is to be known of q, k, v, grad_o and o.
        strides: of the gradients that it writes, of dk, dv and dq.
        diagonal: as in ``forward``.
        scale: as in ``forward``.
        precision: as ``launch.input_precision`` returns it.
        tile: instead of the table's.
        num_splits: that a pass is split into at most; None lets ``splitting.split`` say.
    """
    *inputs, o = (Like(*x) for x in given)
    q, k = inputs[:2]
    tile = tile or launch.pick_tile(
        kernel, *inputs, causal=diagonal is not None, precision=precision
    )
    terms = launch.cuts(tile, q.dtype, precision)
    operands = [decomposed_like(x, terms) if terms else x for x in inputs]
    rows = (tile.block_q, tile.block_kv, tile.block_kv, tile.block_q)
    ways = _walks(kernel, q, k, tile, strides, num_splits)
    split_lens = [way.split_len if way.split else None for way in ways]
    one_launch = kernel == "bwd_whole"  # which takes o
    read = [like.strides[:3] for like in operands]
    written = [x[:3] for way in ways for x in way.strides]
    lies = dict(zip(GRADS[kernel], written, strict=True))
    batch, heads, seq_q, head_dim = q.shape
    kv_heads, seq_kv = k.shape[1:3]
    kind = Launch if one_launch else _Grouped
    run = kind(
        KERNELS[kernel],
        sum(way.programs for way in ways),
        [*(launch.loaded(tile, n) for n in rows), None, None],
        (
            BackwardLayout._make(
                (
                    *read,
                    *(lies.get(name) for name in GRADS["bwd"]),
                    *(o.strides[:3] if one_launch else None, head_dim, rounded(seq_q)),
                )
            ),
            *(heads, heads // kv_heads, seq_q, seq_kv, diagonal, batch, *split_lens),
            *([ways[0].programs] if kernel in JOINT else []),
            (scale, scale * LOG2E.value),
        ),
        {
            "CONFIG": Config.of(tile, head_dim, [*read, *written, o.strides[:3]], precision, terms),
            **tile.compiler_options(),
        },
    )
    filled = tuple(x for way in ways for x in way.written)
    return Pass(run, terms, filled)


class _Grouped(Launch):
    """Takes q, k, v, grad_o, lse_log2, delta and gradients, and groups them as the kernel does."""

    def __call__(self, *tensors: Any) -> None:
        """Launch it."""
        super().__call__(*tensors[:4], (*tensors[4:6], None), tensors[6:])


def _walks(
    kernel: Kernel,
    q: Like,
    k: Like,
    tile: Tile,
    strides: tuple[tuple[int, ...], ...],
    num_splits: int | None,
) -> list[Walk]:
    """Return how programs walk: those of a pass, or of both."""
    blocks = tile.block_q, tile.block_kv
    if kernel not in JOINT:
        return [walk(kernel, q, k, blocks, strides, num_splits)]
    together = _owners(q, k, tile)
    return [
        walk("bwd_dkdv", q, k, blocks, strides[:2], num_splits, together),
        walk("bwd_dq", q, k, blocks, strides[2:], num_splits, together),
    ]


def _owners(q: Like, k: Like, tile: Tile) -> int:
    """Return how many programs own keys or queries, of both passes together."""
    blocks = tile.block_q, tile.block_kv
    return owners("bwd_dkdv", q, k, blocks) + owners("bwd_dq", q, k, blocks)


def few(q: Like, k: Like, tile: Tile, precision: str) -> bool:
    """Return whether both passes together are so few programs that they are faster at once."""
    cut = launch.cuts(tile, q.dtype, precision)
    most = FEW_WIDE_CUT if cut and tile.block_d(q.shape[3]) >= WIDE_CUT else FEW_PROGRAMS
    return _owners(q, k, tile) <= most * launch.multiprocessors(q.device)


def passes(
    given: tuple[Facts, ...],
    strides: tuple[tuple[int, ...], ...],
    diagonal: int | None,
    scale: float,
    precision: str,
) -> Passes | Launch:
    """Prepare what fills dk, dv and dq: passes, or one launch, which takes more than passes do.

    That is "bwd_whole": of q, k, v, grad_o, (lse, its gradient or None, o) and (dk, dv, dq).

    Args:
        given: what is to be known of q, k, v, grad_o and o.
        strides: of dk, dv and dq.
        diagonal: as in ``forward``.
        scale: as in ``forward``.
        precision: as ``launch.input_precision`` returns it.
    """
    inputs = [Like(*x) for x in given[:4]]
    q, k = inputs[:2]
    options = diagonal, scale, precision
    how: dict[str, Any] = {"causal": diagonal is not None, "precision": precision}
    both = launch.find_tile("bwd", *inputs, **how)
    if both is None or not few(q, k, both, precision):
        return Passes(
            prepare("bwd_dkdv", given, strides[:2], *options),
            prepare("bwd_dq", given, strides[2:], *options),
        )
    tile = launch.find_tile("bwd_whole", *inputs, **how) if launch.scores(q, k) <= WHOLE else None
    if tile and not any(way.split for way in _walks("bwd_whole", q, k, tile, strides, None)):
        return prepare("bwd_whole", given, strides, *options).run
    return Passes(prepare("bwd", given, strides, *options))


Grads = tuple[torch.Tensor, torch.Tensor | None]
Saved = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Plan = Callable[[Grads, Saved], Gradients]
Prepare = Callable[..., Passes | Launch]


def backward(grads: Grads, saved: Saved, **how: Any) -> Gradients:
    """Launch what ``plan`` returns for the same arguments.

    Returns:
        The gradients of q, k and v, in their dtype.
    """
    return plan(grads, saved, **how)(grads, saved)


def plan(
    grads: Grads,
    saved: Saved,
    *,
    diagonal: int | None,
    scale: float,
    precision: str = "auto",
    deterministic: bool = True,
    passes: Prepare = passes,
) -> Plan:
    """Return what launches the kernels, for these and for all that are ``Like`` them.

    Args:
        grads: of o [B, H, T, D], copied once if the last dimension is not dense, and of lse
            [B, H, T], copied if not contiguous, or None.
        saved: q, k, v as ``forward`` took them, o and lse as it returned them, copied likewise.
        diagonal: as in ``forward.plan``.
        scale: as in ``forward.plan``.
        precision: as in ``forward.plan``.
        deterministic: it is, whatever is asked.
        passes: what prepares the passes.
    """
    del deterministic
    precision = launch.input_precision(precision, saved[0].dtype)
    return _plan(known(grads, saved), diagonal, scale, precision, passes)


def known(grads: Grads, saved: Saved) -> tuple[Facts, ...]:
    """Return the facts of q, k, v, grad_o, o, lse, and grad_lse where there is one."""
    (grad_o, grad_lse), (q, k, v, o, lse) = grads, saved
    given = q, k, v, grad_o, o, lse
    return facts(*given) if grad_lse is None else facts(*given, grad_lse)


@lru_cache(PLANS)
def _plan(
    given: tuple[Facts, ...],
    diagonal: int | None,
    scale: float,
    precision: str,
    passes: Prepare,
) -> Plan:
    """Choose what answers.

    Args:
        given: what is ``known``.
        diagonal: as in ``plan``.
        scale: as in ``plan``.
        precision: as ``launch.input_precision`` returns it.
        passes: as in ``plan``.
    """
    likes = [Like(*x) for x in given]
    q, k, v = likes[:3]
    launch.check_device(q.device)
    if 0 in q.shape or 0 in k.shape:
        return _no_gradients
    if not readable(likes[:5], likes[5:]):

        def copied(grads: Grads, saved: Saved) -> Gradients:
            grads, saved = copies(grads, saved)
            how: dict[str, Any] = {"diagonal": diagonal, "scale": scale, "precision": precision}
            return backward(grads, saved, **how, passes=passes)

        return copied
    strides = tuple(torch.empty_like(x.meta).stride() for x in (k, v, q))
    run = passes(given[:5], strides, diagonal, scale, precision)
    if isinstance(run, Launch):
        return partial(_one_launch, run)
    preprocess = preprocess_launch((given[4], given[3], *given[5:]))
    return _Backward(row_shape(q.shape), q.device, preprocess, run)


def readable(rows: Sequence[Like], numbers: Sequence[Like]) -> bool:
    """Return whether kernels can read tensors: rows of D, and one number a row."""
    return all(x.dense for x in rows) and all(x.meta.is_contiguous() for x in numbers)


def copies(grads: Grads, saved: Saved) -> tuple[Grads, Saved]:
    """Return copies of tensors that are not ``readable``, and the others."""
    (grad_o, grad_lse), (q, k, v, o, lse) = grads, saved
    grads = dense(grad_o), None if grad_lse is None else grad_lse.contiguous()
    return grads, (dense(q), dense(k), dense(v), dense(o), lse.contiguous())


def _no_gradients(grads: Grads, saved: Saved) -> Gradients:
    """Answer without a launch: there is no query, or no key."""
    del grads
    q, k, v = saved[:3]
    return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


def _one_launch(run: Launch, grads: Grads, saved: Saved) -> Gradients:
    """Allocate dq, dk and dv, and launch what fills them, once."""
    (grad_o, grad_lse), (q, k, v, o, lse) = grads, saved
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    with launch.on_device(q):
        run(q, k, v, grad_o, (lse, grad_lse, o), (dk, dv, dq))
    return dq, dk, dv


@dataclass(frozen=True)
class _Backward:
    """Allocates what a backward fills, and launches it.

    Args:
        rows: sizes of lse_log2 and delta.
        device: of all.
        preprocess: flashattn_bwd_preprocess.
        passes: what fills the gradients.
    """

    rows: tuple[int, int]
    device: torch.device
    preprocess: Launch
    passes: Passes

    def __call__(self, grads: Grads, saved: Saved) -> Gradients:
        """Return dq, dk and dv."""
        (grad_o, grad_lse), (q, k, v, o, lse) = grads, saved
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        lse_log2 = torch.empty(*self.rows, dtype=torch.float32, device=self.device)
        delta = torch.empty_like(lse_log2)
        with launch.on_device(q):
            self.preprocess(o, grad_o, lse, grad_lse, lse_log2, delta)
            self.passes((q, k, v, grad_o), (lse_log2, delta), (dk, dv, dq))
        return dq, dk, dv
