"""flashattn_hopper_fwd: one warp loads, two or three warpgroups attend, each to 64 queries.

While the tensor cores multiply P of one tile of keys with V, the other units compute the softmax of
the next: that is what a warpgroup does in a step. Keys are visited from the last to the first, so
that the tiles that a mask cuts come first, and the loop over whole tiles has no mask in it. The
next queries come while these are attended to.

Sources: Shah et al., 2024, "FlashAttention-3", for the roles and the two overlaps; Triton's Gluon.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
)

from flashattn.kernels import launch
from flashattn.kernels.forward import SMALLEST_SCALE, Outputs, Plan
from flashattn.kernels.forward import forward as portable
from flashattn.kernels.hopper import forward_fp32
from flashattn.kernels.hopper.compat import store_tile
from flashattn.kernels.hopper.config import Config, columns, pick
from flashattn.kernels.hopper.mask import hide, visited
from flashattn.kernels.hopper.mma import (
    ROWS,
    acc_wait,
    mma_pv,
    mma_qk,
    mma_wait,
    scale_acc,
    store_acc,
    zero_acc,
)
from flashattn.kernels.hopper.pipeline import new_pipeline, new_scalar_pipeline
from flashattn.kernels.hopper.registers import compiler_barrier, pack, unpack
from flashattn.kernels.hopper.scheduler import place
from flashattn.kernels.hopper.tma import WARPS, Tiles
from flashattn.kernels.launch import PLANS, Facts, Launch, Like, dense, facts
from flashattn.kernels.primitives import LN2, LOG2E

# Columns beyond which a loop stays that is empty without a mask, when only the last tile of keys
# may need one. On an H200 forward takes 3 to 5% more time without that loop at D = 256, from N =
# 4096 on, why is not known, and 2 to 6% less at 64 to 128.
WIDE = gl.constexpr(128)
KEPT = 24 << 20  # bytes of keys and values of a band of heads: half of the L2 cache


@gluon.jit
def load(
    q, k, v, queries, keys, values, queue, counter, tiles, blocks, heads, band, group, seq_q,
    seq_kv, diagonal, BLOCK_Q: gl.constexpr, BLOCK_KV: gl.constexpr, GROUPS: gl.constexpr,
    CAUSAL: gl.constexpr, DRAWN: gl.constexpr,
):  # fmt: skip
    """Be the warp that loads: queries of each tile, then its keys and values, the last first.

    Keys and the values of the step before are freed together, when ``keys`` says so: freeing
    makes the threads of a warpgroup wait for each other.
    """
    n = 0
    turn = 0
    tile = gl.program_id(0)
    while tile < tiles:
        block, batch, head = place(tile, tiles, blocks, heads, band, CAUSAL)
        kv_head = head // group
        _, end = visited(block * BLOCK_Q, seq_q, seq_kv, diagonal, BLOCK_Q, BLOCK_KV, CAUSAL)
        for w in gl.static_range(GROUPS):
            queries.load(turn * GROUPS + w, q, batch, head, block * BLOCK_Q + w * ROWS)
        keys.producer_commit(n, k, batch, kv_head, (end - 1) * BLOCK_KV)
        if DRAWN:
            tile = gl.num_programs(0) + gl.atomic_add(counter, 1)
            queue.write(turn, tile)
        else:
            tile += gl.num_programs(0)
        for i in range(1, end):
            keys.producer_acquire(n + 1)
            keys.producer_commit(n + 1, k, batch, kv_head, (end - 1 - i) * BLOCK_KV)
            values.producer_commit(n, v, batch, kv_head, (end - i) * BLOCK_KV)
            n += 1
        keys.producer_acquire(n + 1)
        values.producer_commit(n, v, batch, kv_head, 0)
        n += 1
        turn += 1


@gluon.jit
def part_sums(p, BLOCK_KV: gl.constexpr):
    """Return [ROWS, 4]: the sums over the elements that one thread has, without a shuffle."""
    return gl.sum(gl.sum(gl.reshape(p, [ROWS, BLOCK_KV // 8, 4, 2]), 3), 1)


@gluon.jit
def first_weights(s, scale_log2, BLOCK_KV: gl.constexpr, DTYPE: gl.constexpr):
    """Return P of the first tile of keys, the greatest scores, and the sums."""
    m = gl.max(s, 1) * scale_log2
    finite = gl.where(m == float("-inf"), 0.0, m)
    weights = gl.exp2(s * scale_log2 - finite[:, None])
    return pack(weights, DTYPE), m, part_sums(weights, BLOCK_KV)


@gluon.jit
def step(
    state, q, keys, values, n, start_q, start_kv, seq_kv, diagonal, scale_log2,
    BLOCK_KV: gl.constexpr, D_LO: gl.constexpr, D_HI: gl.constexpr, CAUSAL: gl.constexpr,
    MASKED: gl.constexpr, PINNED: gl.constexpr, DTYPE: gl.constexpr, LAYOUT: gl.constexpr,
    OPERAND: gl.constexpr,
):  # fmt: skip
    """Fold the n-th tile of values, and under that product compute P of the next tile of keys."""
    accs, p, m, l = state
    s = mma_qk(q, keys.consumer_wait(n + 1), D_LO, D_HI, LAYOUT)
    accs = mma_pv(unpack(p, DTYPE, OPERAND), values.consumer_wait(n), accs, D_LO, D_HI)
    s = mma_wait(s, 1, D_HI)
    if MASKED:
        s = hide(s, start_q, start_kv, seq_kv, diagonal, BLOCK_KV, CAUSAL)
    m_new = gl.maximum(m, gl.max(s, 1) * scale_log2)
    finite = m_new
    if MASKED:
        finite = gl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = gl.exp2(m - finite)
    weights = gl.exp2(s * scale_log2 - finite[:, None])
    parts = part_sums(weights, BLOCK_KV)
    rows: gl.constexpr = gl.SliceLayout(1, parts.type.layout)
    l = l * gl.convert_layout(alpha, rows, assert_trivial=True)[:, None] + parts
    p = pack(weights, DTYPE)
    if PINNED:
        compiler_barrier(p)
    accs = acc_wait(accs, 0, D_HI)
    keys.consumer_release(n + 1)
    return scale_acc(accs, alpha, D_HI), p, m_new, l


@gluon.jit
def attend(
    WARPGROUP: gl.constexpr, o, lse, queries, keys, values, staging, queue, tiles, blocks, heads,
    band, seq_q, seq_kv, diagonal, scale_log2, BLOCK_Q: gl.constexpr, BLOCK_KV: gl.constexpr,
    D_LO: gl.constexpr, D_HI: gl.constexpr, GROUPS: gl.constexpr, CAUSAL: gl.constexpr,
    DRAWN: gl.constexpr, STAGED: gl.constexpr, PINNED: gl.constexpr,
):  # fmt: skip
    """Be a warpgroup that attends to ROWS queries of every tile."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_KV, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D_LO, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    n = 0
    asked = WARPGROUP
    turn = 0
    tile = gl.program_id(0)
    while tile < tiles:
        block, batch, head = place(tile, tiles, blocks, heads, band, CAUSAL)
        start_q = block * BLOCK_Q + WARPGROUP * ROWS
        full, end = visited(block * BLOCK_Q, seq_q, seq_kv, diagonal, BLOCK_Q, BLOCK_KV, CAUSAL)
        q = queries.consumer_wait(asked)
        s = mma_wait(mma_qk(q, keys.consumer_wait(n), D_LO, D_HI, S), 0, D_HI)
        keys.consumer_release(n)
        if CAUSAL or full < end:
            s = hide(s, start_q, (end - 1) * BLOCK_KV, seq_kv, diagonal, BLOCK_KV, CAUSAL)
        p, m, l = first_weights(s, scale_log2, BLOCK_KV, o.dtype)
        accs = zero_acc(D_LO, D_HI)
        masked = gl.minimum(full, end - 1)
        if CAUSAL or D_LO > WIDE:
            for i in range(end - 2, masked - 1, -1):
                accs, p, m, l = step(
                    (accs, p, m, l), q, keys, values, n, start_q, i * BLOCK_KV, seq_kv, diagonal,
                    scale_log2, BLOCK_KV, D_LO, D_HI, CAUSAL, True, PINNED, o.dtype, S, P,
                )  # fmt: skip
                n += 1
        for i in range(masked - 1, -1, -1):
            accs, p, m, l = step(
                (accs, p, m, l), q, keys, values, n, start_q, i * BLOCK_KV, seq_kv, diagonal,
                scale_log2, BLOCK_KV, D_LO, D_HI, CAUSAL, False, PINNED, o.dtype, S, P,
            )  # fmt: skip
            n += 1
        if DRAWN:
            tile = queue.read(turn)
            turn += 1
        else:
            tile += gl.num_programs(0)
        accs = mma_pv(unpack(p, o.dtype, P), values.consumer_wait(n), accs, D_LO, D_HI)
        n += 1
        if STAGED:
            queries.consumer_release(asked)
            staged = staging.index(WARPGROUP)
        else:
            staged = queries.tiles.index(asked % GROUPS)
        accs = acc_wait(accs, 0, D_HI)
        write(accs, m, l, o, lse, staged, batch, head, heads, start_q, seq_q, D_LO, D_HI, S)
        if not STAGED:
            tma.store_wait(0)
            queries.consumer_release(asked)
        asked += GROUPS
    tma.store_wait(0)


@gluon.jit
def write(
    accs, m, l, o, lse, staged, batch, head, heads, start_q, seq_q, D_LO: gl.constexpr,
    D_HI: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Store o through shared memory, and lse; a row that sees no key has o = 0 and lse = -inf."""
    total = gl.convert_layout(gl.sum(l, 1), gl.SliceLayout(1, LAYOUT))
    rows = start_q + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    value = gl.where(total == 0.0, float("-inf"), (m + gl.log2(total)) * LN2)
    row = (batch * heads + head).to(gl.int64) * seq_q
    gl.store(lse + row + rows, value, mask=rows < seq_q)
    inverse = gl.where(total == 0.0, 0.0, 1.0 / total)
    accs = scale_acc(accs, inverse, D_HI)
    tma.store_wait(0)  # o of the tile before has left
    store_acc(accs, 1.0, staged.reshape([staged.shape[2], staged.shape[3]]), D_LO, D_HI)
    fence_async_shared()
    store_tile(o, [batch, head, start_q, 0], staged)


@gluon.jit(
    do_not_specialize=["tiles", "blocks", "heads", "band", "group", "seq_q", "seq_kv", "diagonal"]
)
def flashattn_hopper_fwd(
    q, k, v, o, lse, counter, tiles, blocks, heads, band, group, seq_q, seq_kv, diagonal,
    scale_log2, BLOCK_KV: gl.constexpr, D_LO: gl.constexpr, D_HI: gl.constexpr,
    GROUPS: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, DRAWN: gl.constexpr,
    STAGED: gl.constexpr, REGISTERS: gl.constexpr, PINNED: gl.constexpr,
):  # fmt: skip
    """Compute o and lse; q, k, v and o are descriptors of [B, H, T, D]."""
    BLOCK_Q: gl.constexpr = GROUPS * ROWS
    queries = new_pipeline(q, 2 * GROUPS if STAGED else GROUPS, 1)
    keys = new_pipeline(k, STAGES, GROUPS)
    values = new_pipeline(v, STAGES, GROUPS)
    queue = new_scalar_pipeline(GROUPS)
    staging = queries.tiles
    if STAGED:
        staging = gl.allocate_shared_memory(o.dtype, [GROUPS] + o.block_shape, o.layout)
    fence_async_shared()
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (attend, (0, o, lse, queries, keys, values, staging, queue, tiles, blocks, heads,
                          band, seq_q, seq_kv, diagonal, scale_log2, BLOCK_Q, BLOCK_KV, D_LO, D_HI,
                          GROUPS, CAUSAL, DRAWN, STAGED, PINNED)),
                (attend, (1, o, lse, queries, keys, values, staging, queue, tiles, blocks, heads,
                          band, seq_q, seq_kv, diagonal, scale_log2, BLOCK_Q, BLOCK_KV, D_LO, D_HI,
                          GROUPS, CAUSAL, DRAWN, STAGED, PINNED)),
                (load, (q, k, v, queries, keys, values, queue, counter, tiles, blocks, heads, band,
                        group, seq_q, seq_kv, diagonal, BLOCK_Q, BLOCK_KV, GROUPS, CAUSAL, DRAWN)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (attend, (0, o, lse, queries, keys, values, staging, queue, tiles, blocks, heads,
                          band, seq_q, seq_kv, diagonal, scale_log2, BLOCK_Q, BLOCK_KV, D_LO, D_HI,
                          GROUPS, CAUSAL, DRAWN, STAGED, PINNED)),
                (attend, (1, o, lse, queries, keys, values, staging, queue, tiles, blocks, heads,
                          band, seq_q, seq_kv, diagonal, scale_log2, BLOCK_Q, BLOCK_KV, D_LO, D_HI,
                          GROUPS, CAUSAL, DRAWN, STAGED, PINNED)),
                (attend, (2, o, lse, queries, keys, values, staging, queue, tiles, blocks, heads,
                          band, seq_q, seq_kv, diagonal, scale_log2, BLOCK_Q, BLOCK_KV, D_LO, D_HI,
                          GROUPS, CAUSAL, DRAWN, STAGED, PINNED)),
                (load, (q, k, v, queries, keys, values, queue, counter, tiles, blocks, heads, band,
                        group, seq_q, seq_kv, diagonal, BLOCK_Q, BLOCK_KV, GROUPS, CAUSAL, DRAWN)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )  # fmt: skip


def constants(config: Config, head_dim: int, *, causal: bool, drawn: bool) -> dict[str, Any]:
    """Return the values of the kernel's constexpr arguments."""
    first, rest = columns(head_dim)
    return {
        "BLOCK_KV": config.block_kv,
        "D_LO": first,
        "D_HI": rest,
        "GROUPS": config.groups,
        "STAGES": config.slots,
        "CAUSAL": causal,
        "DRAWN": drawn,
        "STAGED": config.staged,
        "REGISTERS": config.registers,
        "PINNED": config.pinned,
    }


def takes(*inputs: Like, scale: float) -> bool:
    """Return whether the kernel can be launched on these; the others are the portable kernel's."""
    return scale >= SMALLEST_SCALE and all(x.describable and 0 not in x.shape for x in inputs)


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **how: Any) -> Outputs:
    """Launch what ``plan`` returns for the same arguments.

    Returns:
        o [B, H, T, D] in q's dtype, and lse [B, H, T] in fp32.
    """
    return plan(q, k, v, **how)(q, k, v)


def plan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    diagonal: int | None,
    scale: float,
    precision: str = "auto",
    config: Config | None = None,
) -> Plan:
    """Return what launches flashattn_hopper_fwd, or where it cannot, the portable kernel.

    It does for q, k and v, and for all that are ``Like`` them.

    Args:
        q: [B, H, T, D], bf16 or fp16, copied once if the last dimension is not dense.
        k: [B, G, S, D], likewise.
        v: [B, G, S, D], likewise.
        diagonal: query t sees keys 0 ... t + diagonal; None lets it see all.
        scale: factor on the scores.
        precision: checked, as ``launch.input_precision`` does; of fp32 only.
        config: instead of the table's.
    """
    precision = launch.input_precision(precision, q.dtype)
    return _plan(*facts(q, k, v), diagonal, scale, precision, config)


@dataclass(frozen=True)
class _Forward:
    """Allocates o and lse, and launches what fills them.

    Args:
        kernel: flashattn_hopper_fwd.
        drawn: whether it counts the tiles that programs have taken.
    """

    kernel: Launch
    drawn: bool

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Outputs:
        """Return o and lse."""
        o, lse = torch.empty_like(q), torch.empty(q.shape[:3], device=q.device, dtype=torch.float32)
        with launch.on_device(q):
            counter = torch.zeros(1, device=q.device, dtype=torch.int32) if self.drawn else None
            self.kernel(q, k, v, o, lse, counter)
        return o, lse


@lru_cache(PLANS)
def _plan(
    q_facts: Facts,
    k_facts: Facts,
    v_facts: Facts,
    diagonal: int | None,
    scale: float,
    precision: str,
    config: Config | None,
) -> Plan:
    """Choose the kernel and its programs, and prepare the launch."""
    q, k, v = Like(*q_facts), Like(*k_facts), Like(*v_facts)
    if not (q.dense and k.dense and v.dense):
        how: dict[str, Any] = {"diagonal": diagonal, "scale": scale, "precision": precision}
        how["config"] = config
        return lambda *inputs: forward(*map(dense, inputs), **how)
    if q.dtype == torch.float32:
        return forward_fp32.plan(q, k, v, diagonal, scale, precision)
    causal = diagonal is not None
    multiprocessors = launch.multiprocessors(q.device)
    config = config or pick(
        q.shape[3],
        q.shape[2],
        causal=causal,
        heads=q.shape[0] * q.shape[1],
        multiprocessors=multiprocessors,
    )
    if config is None or not takes(q, k, v, scale=scale):
        return lambda q, k, v: portable(
            q, k, v, diagonal=diagonal, scale=scale, precision=precision
        )
    batch, heads, seq_q, head_dim = q.shape
    kv_heads, seq_kv = k.shape[1:3]
    blocks = triton.cdiv(seq_q, config.groups * ROWS.value)
    tiles = blocks * batch * heads
    programs = min(multiprocessors, tiles)
    drawn = causal and programs < tiles
    kept = 2 * seq_kv * head_dim * q.dtype.itemsize * kv_heads // heads  # bytes, of a query head
    kernel = Launch(
        flashattn_hopper_fwd,
        programs,
        [Tiles(ROWS.value), *[Tiles(config.block_kv)] * 2, Tiles(ROWS.value), None, None],
        (
            tiles,
            blocks,
            heads,
            max(1, KEPT // max(1, kept)),
            heads // kv_heads,
            seq_q,
            seq_kv,
            diagonal or 0,
            scale * LOG2E.value,
        ),
        constants(config, head_dim, causal=causal, drawn=drawn) | {"num_warps": WARPS},
    )
    return _Forward(kernel, drawn)
