"""The backward's two deterministic passes: algorithm 2 of FlashAttention-2 (Dao, 2023), split.

A program of ``flashattn_bwd_dkdv`` owns a tile of keys and loops over queries; one of
``flashattn_bwd_dq`` owns a tile of queries and loops over keys. If both have few programs,
``flashattn_bwd`` runs them side by side, and for tiny problems it needs no preprocess either. One
program writes each output element, in a fixed order: no atomics. Arguments are as in ``gradients``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashattn.kernels.constants import SIZES
from flashattn.kernels.portable.gradients import Inputs, compute_dkdv, compute_dq
from flashattn.kernels.portable.score import Score


@triton.jit(do_not_specialize=SIZES)
def flashattn_bwd_dkdv(
    q,
    k,
    v,
    grad_o,
    stats,
    grads,
    bounds,
    scored,
    lies,
    layout,
    heads,
    group,
    seq_q,
    seq_kv,
    left,
    right,
    batches,
    split_len,
    scale,
    CONFIG: tl.constexpr,
):
    """Compute dk and dv; a program owns a tile of keys of a head and sums over its query heads."""
    inputs = Inputs(q, k, v, grad_o, stats, layout)
    score = Score(scale, scored[0], scored[1], scored[2])
    gqa, sizes, split = (heads, group), (seq_q, seq_kv), (batches, split_len)
    band = left, right, bounds[0], bounds[1]
    grid = tl.program_id(0), tl.num_programs(0)
    compute_dkdv(grid, inputs, grads, gqa, sizes, band, split, score, lies, False, CONFIG)


@triton.jit(do_not_specialize=SIZES)
def flashattn_bwd_dq(
    q,
    k,
    v,
    grad_o,
    stats,
    grads,
    bounds,
    scored,
    lies,
    layout,
    heads,
    group,
    seq_q,
    seq_kv,
    left,
    right,
    batches,
    split_len,
    scale,
    CONFIG: tl.constexpr,
):
    """Compute dq; a program owns a tile of queries of one head."""
    inputs = Inputs(q, k, v, grad_o, stats, layout)
    score = Score(scale, scored[0], scored[1], scored[2])
    gqa, sizes, split = (heads, group), (seq_q, seq_kv), (batches, split_len)
    band = left, right, bounds[0], bounds[1]
    grid = tl.program_id(0), tl.num_programs(0)
    compute_dq(grid, inputs, grads[0], gqa, sizes, band, split, score, lies, False, CONFIG)


@triton.jit(do_not_specialize=SIZES)
def flashattn_bwd(
    q,
    k,
    v,
    grad_o,
    stats,
    grads,
    bounds,
    scored,
    lies,
    layout,
    heads,
    group,
    seq_q,
    seq_kv,
    left,
    right,
    batches,
    split_len,
    split_len_kv,
    dkdv_programs,
    scale,
    CONFIG: tl.constexpr,
):
    """Compute dk, dv and dq: the first ``dkdv_programs`` own tiles of keys, the others of queries.

    The former loop over ``split_len`` queries, the latter over ``split_len_kv`` keys.
    """
    program = tl.program_id(0)
    grid = program, dkdv_programs
    inputs = Inputs(q, k, v, grad_o, stats, layout)
    score = Score(scale, scored[0], scored[1], scored[2])
    band, gqa, sizes = (left, right, bounds[0], bounds[1]), (heads, group), (seq_q, seq_kv)
    split, split_kv = (batches, split_len), (batches, split_len_kv)
    if program < dkdv_programs:
        compute_dkdv(grid, inputs, grads, gqa, sizes, band, split, score, lies, True, CONFIG)
    else:
        dq_place = program - dkdv_programs, tl.num_programs(0) - dkdv_programs
        compute_dq(
            dq_place, inputs, grads[2], gqa, sizes, band, split_kv, score, lies, True, CONFIG
        )
