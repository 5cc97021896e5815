"""The backward's two deterministic passes: algorithm 2 of FlashAttention-2 (Dao, 2023), split.

``flashattn_bwd_dkdv`` owns a tile of keys and loops over queries; ``flashattn_bwd_dq`` owns a tile
of queries and loops over keys; where both together are few programs, ``flashattn_bwd`` is both,
side by side, and where there is next to nothing to do it needs no preprocessing either. Each output
element is written by one program, in one order: no atomics. Arguments are those of ``gradients``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashattn.kernels.constants import SIZES
from flashattn.kernels.portable.gradients import compute_dkdv, compute_dq


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
    """Compute dk and dv; a program owns a tile of keys of one head and sums its query heads."""
    band = left, right, bounds[0], bounds[1]
    compute_dkdv(
        tl.program_id(0), tl.num_programs(0), q, k, v, grad_o, stats, grads[0], grads[1], scored,
        lies, layout, heads, group, seq_q, seq_kv, band, batches, split_len, scale, False, CONFIG,
    )  # fmt: skip


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
    band = left, right, bounds[0], bounds[1]
    compute_dq(
        tl.program_id(0), tl.num_programs(0), q, k, v, grad_o, stats, grads[0], scored, lies,
        layout, heads, group, seq_q, seq_kv, band, batches, split_len, scale, False, CONFIG,
    )  # fmt: skip


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
    band = left, right, bounds[0], bounds[1]
    if program < dkdv_programs:
        compute_dkdv(
            program, dkdv_programs, q, k, v, grad_o, stats, grads[0], grads[1], scored, lies,
            layout, heads, group, seq_q, seq_kv, band, batches, split_len, scale, True, CONFIG,
        )  # fmt: skip
    else:
        compute_dq(
            program - dkdv_programs, tl.num_programs(0) - dkdv_programs, q, k, v, grad_o, stats,
            grads[2], scored, lies, layout, heads, group, seq_q, seq_kv, band, batches,
            split_len_kv, scale, True, CONFIG,
        )  # fmt: skip
