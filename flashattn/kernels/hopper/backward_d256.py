"""flashattn_hopper_wide_dkdv and flashattn_hopper_wide_dq: gradients of heads of 129 to 256.

Two passes, seven products of which one pass would need five: at 256 numbers a pass that adds dq to
memory would own 64 keys at most, as dk and dv of 128 fill all registers there are, and so add as
many bytes to the L2 cache, 64 KiB for 64 queries, as it loads. Each output element is written by
one program, in one order, so gradients are the same bits in each run.

**dk and dv.** A program owns 64 keys; 64 x 256 sums in fp32 are half of what a warpgroup has in
registers. So one warpgroup computes P and sums dv, and the other takes P from it, computes dS and
sums dk: P and dS stay in the registers that computed them, and no product is done twice. While the
exponentials of one run, the tensor cores have two products of the other. The scores are transposed,
[keys, queries]. P is handed over in fp16, times 2^14, which keeps 11 bits of all that counts.

**dq.** A program owns 128 queries, 64 for each of two warpgroups, and walks over keys as the
forward does.

In clocks of a multiprocessor, for 64 x 64 scores: a product needs the tensor cores for 512. Shared
memory gives 128 bytes a clock: a product of two operands from there takes 512, too, one whose left
operand is in registers 256; a tile that comes takes 256. The first kernel so needs 2048 for its
products and about 2200 for shared memory, the second 1536 and 1536. At three quarters of that, what
the forward reaches, both take 5000 clocks, 10.5 MFLOP of the five products: about 460 TFLOP/s.
One pass would need 2560 and 3650, and 64 KiB of additions in memory. Measured on an H200, N = 4096
without a mask: 460 and 495 in two runs; each alone makes 626 and 669 of its own products.

Sources: Shah et al., 2024, "FlashAttention-3", for the roles; Triton's Gluon.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)

from flashattn.kernels.hopper.compat import store_tile
from flashattn.kernels.hopper.config import WideConfig, columns
from flashattn.kernels.hopper.gqa import Shares, key_head, share, store_share
from flashattn.kernels.hopper.mask import hide, visited
from flashattn.kernels.hopper.mma import acc_wait, mma_pv, mma_qk, mma_wait, store_acc, zero_acc
from flashattn.kernels.hopper.pipeline import new_pipeline
from flashattn.kernels.hopper.registers import opaque, pack, unpack
from flashattn.kernels.hopper.scheduler import place
from flashattn.kernels.hopper.tma import WARPS, Numbers, Tiles
from flashattn.kernels.launch import Launch, Like
from flashattn.kernels.primitives import LOG2E

BLOCK = gl.constexpr(64)  # keys of a tile; queries of a tile, or of a warpgroup
BLOCK_D = gl.constexpr(256)
PAIR = gl.constexpr(128)  # queries of both warpgroups
STAGES = gl.constexpr(2)
LIFT = gl.constexpr(14.0)  # P is handed over times 2^14: small ones are normal numbers in fp16, too
LOWER = gl.constexpr(2.0**-14)


@gluon.jit
def seeing(start_kv, seq_q, diagonal, CAUSAL: gl.constexpr):
    """Return (first, full, end) tiles of queries; those from full on see all keys; first < end."""
    end = gl.cdiv(seq_q, BLOCK)
    first, full = 0, 0
    if CAUSAL:
        first = gl.minimum(gl.maximum(start_kv - diagonal, 0) // BLOCK, end - 1)
        full = gl.cdiv(gl.maximum(start_kv + BLOCK - 1 - diagonal, 0), BLOCK)
    return first, gl.minimum(gl.maximum(full, first), end), end


@gluon.jit
def owned(tile, tiles, blocks, heads, band, CAUSAL: gl.constexpr):
    """Return (block, batch, head) of a tile of keys; under a mask those most seen come first."""
    block, batch, head = place(tile, tiles, blocks, heads, band, CAUSAL)
    if CAUSAL:
        block = blocks - 1 - block
    return block, batch, head


@gluon.jit
def load_seeing(
    x, x_numbers, own, ring, owns, tiles, blocks, owners, shares, band, group, seq_q, diagonal,
    CAUSAL: gl.constexpr,
):  # fmt: skip
    """Be a warp that loads: k and the queries, or v and dO, the first first.

    Each has its own: a tile of queries is in use for longer than one of dO, and a warp that waited
    for the slot of the one would let the slot of the other lie empty.
    """
    n = 0
    block, batch, owner = owned(gl.program_id(0), tiles, blocks, owners, band, CAUSAL)
    first, _, end = seeing(block * BLOCK, seq_q, diagonal, CAUSAL)
    for head in range(owner * group, owner * group + group):
        for i in range(first, end):
            row = batch * (owners * group) + head
            ring.load(n, x, batch, head, i * BLOCK, x_numbers, row)
            n += 1
            if i == first and head == owner * group:
                owns.load(0, own, batch, key_head(owner, shares), block * BLOCK)


@gluon.jit
def hide_keys(p, start_q, start_kv, diagonal):
    """Put 0 where a query does not see a key."""
    layout: gl.constexpr = p.type.layout
    queries = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, layout))
    keys = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, layout))
    seen_from = keys + (start_kv - diagonal - start_q)
    return gl.where(queries[None, :] >= seen_from[:, None], p, 0.0)


@gluon.jit
def weights(
    s, lse2, handed, there, n, start_q, start_kv, diagonal, scale_log2, MASKED: gl.constexpr,
    DTYPE: gl.constexpr,
):  # fmt: skip
    """Return 2^14 P of the n-th tile of queries, packed, and hand it over."""
    rows = lse2.load(gl.SliceLayout(0, s.type.layout)) - LIFT
    p = gl.exp2(s * scale_log2 - rows[None, :])
    if MASKED:
        p = hide_keys(p, start_q, start_kv, diagonal)
    # P of two tiles before has been read: the n-th queries lie where those did, which were in use
    # until dk had them, and that was after.
    handed.index(n % STAGES).store(p.to(gl.float16))
    mbarrier.arrive(there.index(n % STAGES), count=1)
    return pack(p, DTYPE)


@gluon.jit
def dv_step(
    state, k, queries, grads, handed, there, n, start_q, start_kv, diagonal, scale_log2,
    D_LO: gl.constexpr, D_HI: gl.constexpr, MASKED: gl.constexpr, LAYOUT: gl.constexpr,
    OPERAND: gl.constexpr,
):  # fmt: skip
    """Fold the tile of queries before the n-th into dv, and compute P of the n-th."""
    dv, p = state
    do = grads.consumer_wait(n - 1)
    dv = mma_pv(unpack(p, do.dtype, OPERAND), do, dv, D_LO, D_HI)
    q, lse2 = queries.consumer_wait(n), queries.stats(n)
    s = mma_qk(k, q, D_LO, D_HI, LAYOUT)
    dv = acc_wait(dv, 1, D_HI)
    grads.consumer_release(n - 1)
    s = mma_wait(s, 0, D_HI)
    p = weights(
        s, lse2, handed, there, n, start_q, start_kv, diagonal, scale_log2, MASKED, do.dtype
    )
    return dv, p


@gluon.jit
def sum_dv(
    dv, keys, queries, grads, handed, there, tiles, blocks, owners, shares, head_dim, strides, band,
    group, seq_q, seq_kv, diagonal, scale_log2, D_LO: gl.constexpr, D_HI: gl.constexpr,
    CAUSAL: gl.constexpr,
):  # fmt: skip
    """Be the warpgroup that computes P, and dv; the keys are its own."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    DV: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D_LO, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, DV, 2)
    n = 0
    block, batch, owner = owned(gl.program_id(0), tiles, blocks, owners, band, CAUSAL)
    start_kv = block * BLOCK
    first, full, end = seeing(start_kv, seq_q, diagonal, CAUSAL)
    k = keys.consumer_wait(0)
    q, lse2 = queries.consumer_wait(n), queries.stats(n)
    s = mma_wait(mma_qk(k, q, D_LO, D_HI, S), 0, D_HI)
    p = weights(
        s, lse2, handed, there, n, first * BLOCK, start_kv, diagonal, scale_log2, CAUSAL, k.dtype,
    )  # fmt: skip
    n += 1
    acc = zero_acc(D_LO, D_HI)
    for h in range(group):
        begin = first + 1 - gl.minimum(h, 1)
        if CAUSAL:
            for i in range(begin, full):
                acc, p = dv_step(
                    (acc, p), k, queries, grads, handed, there, n, i * BLOCK, start_kv, diagonal,
                    scale_log2, D_LO, D_HI, True, S, P,
                )  # fmt: skip
                n += 1
        for i in range(gl.maximum(begin, full), end):
            acc, p = dv_step(
                (acc, p), k, queries, grads, handed, there, n, i * BLOCK, start_kv, diagonal,
                scale_log2, D_LO, D_HI, False, S, P,
            )  # fmt: skip
            n += 1
    do = grads.consumer_wait(n - 1)
    acc = acc_wait(mma_pv(unpack(p, do.dtype, P), do, acc, D_LO, D_HI), 0, D_HI)
    if shares is None:
        store_acc(acc, LOWER, k, D_LO, D_HI)  # nobody else reads the keys
        fence_async_shared()
        store_tile(dv, [batch, owner, start_kv, 0], keys.tiles.index(0))
        tma.store_wait(0)
    else:
        batches = tiles // (blocks * owners)
        store_share(
            acc, LOWER, dv, strides, owner, batch, batches, shares, start_kv, seq_kv, head_dim,
            D_LO, D_HI,
        )  # fmt: skip


@gluon.jit
def differences(dp, delta, grads, handed, there, n, DTYPE: gl.constexpr):
    """Take P of the n-th tile of queries, and return dS, packed."""
    # The same scaled differences serve fp16: 2^14 P (dP - delta) could be more than it can hold.
    rows = delta.load(gl.SliceLayout(0, dp.type.layout)) * LOWER
    mbarrier.wait(there.index(n % STAGES), (n // STAGES) & 1)
    p = handed.index(n % STAGES).load(dp.type.layout).to(gl.float32)
    grads.consumer_release(n)
    return pack(p * (dp * LOWER - rows[None, :]), DTYPE)


@gluon.jit
def dk_step(
    state, v, queries, grads, handed, there, n, D_LO: gl.constexpr, D_HI: gl.constexpr,
    LAYOUT: gl.constexpr, OPERAND: gl.constexpr,
):  # fmt: skip
    """Fold the tile of queries before the n-th into dk, and compute dS of the n-th."""
    dk, ds = state
    q = queries.consumer_wait(n - 1)
    dk = mma_pv(unpack(ds, q.dtype, OPERAND), q, dk, D_LO, D_HI)
    do, delta = grads.consumer_wait(n), grads.stats(n)
    dp = mma_qk(v, do, D_LO, D_HI, LAYOUT)
    dk = acc_wait(dk, 1, D_HI)
    queries.consumer_release(n - 1)
    dp = mma_wait(dp, 0, D_HI)
    return dk, differences(dp, delta, grads, handed, there, n, q.dtype)


@gluon.jit
def sum_dk(
    dk, values, queries, grads, handed, there, tiles, blocks, owners, shares, head_dim, strides,
    band, group, seq_q, seq_kv, diagonal, scale, D_LO: gl.constexpr, D_HI: gl.constexpr,
    CAUSAL: gl.constexpr,
):  # fmt: skip
    """Be the warpgroup that computes dS, and dk; the values are its own."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    DK: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D_LO, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, DK, 2)
    n = 0
    block, batch, owner = owned(gl.program_id(0), tiles, blocks, owners, band, CAUSAL)
    first, _, end = seeing(block * BLOCK, seq_q, diagonal, CAUSAL)
    v = values.consumer_wait(0)
    do, delta = grads.consumer_wait(n), grads.stats(n)
    dp = mma_wait(mma_qk(v, do, D_LO, D_HI, S), 0, D_HI)
    ds = differences(dp, delta, grads, handed, there, n, v.dtype)
    n += 1
    acc = zero_acc(D_LO, D_HI)
    for _ in range(1, group * (end - first)):
        acc, ds = dk_step(
            (acc, ds), v, queries, grads, handed, there, n, D_LO, D_HI, S, P,
        )  # fmt: skip
        n += 1
    q = queries.consumer_wait(n - 1)
    acc = acc_wait(mma_pv(unpack(ds, q.dtype, P), q, acc, D_LO, D_HI), 0, D_HI)
    if shares is None:
        store_acc(acc, scale, v, D_LO, D_HI)  # nobody else reads the values
        fence_async_shared()
        store_tile(dk, [batch, owner, block * BLOCK, 0], values.tiles.index(0))
        tma.store_wait(0)
    else:
        batches = tiles // (blocks * owners)
        store_share(
            acc, scale, dk, strides, owner, batch, batches, shares, block * BLOCK, seq_kv, head_dim,
            D_LO, D_HI,
        )  # fmt: skip


@gluon.jit(
    do_not_specialize=[
        "tiles",
        "blocks",
        "owners",
        "shares",
        "band",
        "group",
        "seq_q",
        "seq_kv",
        "diagonal",
    ]
)
def flashattn_hopper_wide_dkdv(
    q, k, v, grad_o, lse2, delta, dk, dv, tiles, blocks, owners, shares, head_dim, strides, band,
    group, seq_q, seq_kv, diagonal, scale, scale_log2, D_LO: gl.constexpr, D_HI: gl.constexpr,
    CAUSAL: gl.constexpr,
):  # fmt: skip
    """Compute dk and dv; all tensors are descriptors, but for these where heads have shares."""
    keys = new_pipeline(k, 1, 1)
    values = new_pipeline(v, 1, 1)
    queries = new_pipeline(
        q, STAGES, 1, row_stats=lse2
    )  # who has read q for dk has had P, whose scores
    grads = new_pipeline(grad_o, STAGES, 2, row_stats=delta)  # ... were computed from q before
    handed = gl.allocate_shared_memory(
        gl.float16, [STAGES, BLOCK, BLOCK], gl.NVMMASharedLayout(128, 16, 2)
    )
    there = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(there.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (sum_dv, (dv, keys, queries, grads, handed, there, tiles, blocks, owners, shares,
                      head_dim, strides, band, group, seq_q, seq_kv, diagonal, scale_log2, D_LO,
                      D_HI, CAUSAL)),
            (sum_dk, (dk, values, queries, grads, handed, there, tiles, blocks, owners, shares,
                      head_dim, strides, band, group, seq_q, seq_kv, diagonal, scale, D_LO, D_HI,
                      CAUSAL)),
            (load_seeing, (q, lse2, k, queries, keys, tiles, blocks, owners, shares, band, group,
                           seq_q, diagonal, CAUSAL)),
            (load_seeing, (grad_o, delta, v, grads, values, tiles, blocks, owners, shares, band,
                           group, seq_q, diagonal, CAUSAL)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )  # fmt: skip


@gluon.jit
def load_keys(
    q, k, v, grad_o, queries, grads, keys, values, tiles, blocks, heads, band, group, seq_q, seq_kv,
    diagonal, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Be the warp that loads queries and dO, and then keys and values, the last first."""
    n = 0
    block, batch, head = place(gl.program_id(0), tiles, blocks, heads, band, CAUSAL)
    kv_head = head // group
    _, end = visited(block * PAIR, seq_q, seq_kv, diagonal, PAIR, BLOCK, CAUSAL)
    for w in gl.static_range(2):
        queries.load(w, q, batch, head, block * PAIR + w * BLOCK)
    keys.load(n, k, batch, kv_head, (end - 1) * BLOCK)
    for w in gl.static_range(2):
        grads.load(w, grad_o, batch, head, block * PAIR + w * BLOCK)
    values.load(n, v, batch, kv_head, (end - 1) * BLOCK)
    n += 1
    for i in range(end - 2, -1, -1):
        keys.load(n, k, batch, kv_head, i * BLOCK)
        values.load(n, v, batch, kv_head, i * BLOCK)
        n += 1


@gluon.jit
def opaque_tile(pipeline, n):
    """Return the n-th tile, of a few that stay, at an address that the compiler cannot reuse.

    Otherwise it keeps the addresses of all 32 operands of a step's first two products in registers.
    """
    return pipeline.term(opaque(n))


@gluon.jit
def gradients(
    s, dp, values, n, lse2, delta, start_q, start_kv, seq_kv, diagonal, scale_log2,
    D_HI: gl.constexpr, CAUSAL: gl.constexpr, MASKED: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """Return dS of the n-th tile of keys, packed; its dP is under way, and its scores are."""
    s = mma_wait(s, 1, D_HI)
    if MASKED:
        s = hide(s, start_q, start_kv, seq_kv, diagonal, BLOCK, CAUSAL)
    p = gl.exp2(s * scale_log2 - lse2[:, None])
    dp = mma_wait(dp, 0, D_HI)
    values.consumer_release(n)
    return pack(p * (dp - delta[:, None]), DTYPE)


@gluon.jit
def dq_step(
    WARPGROUP: gl.constexpr, state, queries, grads, lse2, delta, keys, values, n, start_q, start_kv,
    seq_kv, diagonal, scale_log2, D_LO: gl.constexpr, D_HI: gl.constexpr, CAUSAL: gl.constexpr,
    MASKED: gl.constexpr, LAYOUT: gl.constexpr, OPERAND: gl.constexpr,
):  # fmt: skip
    """Fold the tile of keys before the n-th into dq, and compute dS of the n-th."""
    dq, ds = state
    k = keys.tile(n - 1)
    dq = mma_pv(unpack(ds, k.dtype, OPERAND), k, dq, D_LO, D_HI)
    s = mma_qk(opaque_tile(queries, WARPGROUP), keys.consumer_wait(n), D_LO, D_HI, LAYOUT)
    dp = mma_qk(opaque_tile(grads, WARPGROUP), values.consumer_wait(n), D_LO, D_HI, LAYOUT)
    dq = acc_wait(dq, 2, D_HI)
    keys.consumer_release(n - 1)
    ds = gradients(
        s, dp, values, n, lse2, delta, start_q, start_kv, seq_kv, diagonal, scale_log2, D_HI,
        CAUSAL, MASKED, k.dtype,
    )  # fmt: skip
    return dq, ds


@gluon.jit
def sum_dq(
    WARPGROUP: gl.constexpr, dq, lse2, delta, queries, grads, keys, values, tiles, blocks, heads,
    band, seq_q, seq_kv, pitch, diagonal, scale, scale_log2, D_LO: gl.constexpr, D_HI: gl.constexpr,
    CAUSAL: gl.constexpr,
):  # fmt: skip
    """Be a warpgroup that computes dq of 64 queries of every tile."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D_LO, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, DQ, 2)
    n = 0
    block, batch, head = place(gl.program_id(0), tiles, blocks, heads, band, CAUSAL)
    start_q = block * PAIR + WARPGROUP * BLOCK
    full, end = visited(block * PAIR, seq_q, seq_kv, diagonal, PAIR, BLOCK, CAUSAL)
    at = (batch * heads + head).to(gl.int64) * pitch + start_q
    rows = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, S))
    lse2_rows = gl.load(lse2 + at + rows)
    delta_rows = gl.load(delta + at + rows)
    queries.consumer_wait(WARPGROUP)
    q = opaque_tile(queries, WARPGROUP)
    s = mma_qk(q, keys.consumer_wait(n), D_LO, D_HI, S)
    grads.consumer_wait(WARPGROUP)
    do = opaque_tile(grads, WARPGROUP)
    dp = mma_qk(do, values.consumer_wait(n), D_LO, D_HI, S)
    ds = gradients(
        s, dp, values, n, lse2_rows, delta_rows, start_q, (end - 1) * BLOCK, seq_kv, diagonal,
        scale_log2, D_HI, CAUSAL, True, q.dtype,
    )  # fmt: skip
    n += 1
    acc = zero_acc(D_LO, D_HI)
    masked = gl.minimum(full, end - 1)
    if CAUSAL:  # else only the last tile of keys may need a mask
        for i in range(end - 2, masked - 1, -1):
            acc, ds = dq_step(
                WARPGROUP, (acc, ds), queries, grads, lse2_rows, delta_rows, keys, values, n,
                start_q, i * BLOCK, seq_kv, diagonal, scale_log2, D_LO, D_HI, CAUSAL, True, S, P,
            )  # fmt: skip
            n += 1
    for i in range(masked - 1, -1, -1):
        acc, ds = dq_step(
            WARPGROUP, (acc, ds), queries, grads, lse2_rows, delta_rows, keys, values, n, start_q,
            i * BLOCK, seq_kv, diagonal, scale_log2, D_LO, D_HI, CAUSAL, False, S, P,
        )  # fmt: skip
        n += 1
    k = keys.tile(n - 1)
    acc = acc_wait(mma_pv(unpack(ds, k.dtype, P), k, acc, D_LO, D_HI), 0, D_HI)
    store_acc(acc, scale, q, D_LO, D_HI)
    fence_async_shared()
    store_tile(dq, [batch, head, start_q, 0], queries.tiles.index(WARPGROUP))
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "tiles",
        "blocks",
        "heads",
        "band",
        "group",
        "seq_q",
        "seq_kv",
        "pitch",
        "diagonal",
    ]
)
def flashattn_hopper_wide_dq(
    q, k, v, grad_o, lse2, delta, dq, tiles, blocks, heads, band, group, seq_q, seq_kv, pitch,
    diagonal, scale, scale_log2, D_LO: gl.constexpr, D_HI: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Compute dq; all tensors but lse2 and delta are descriptors."""
    queries = new_pipeline(q, 2, 1)
    grads = new_pipeline(grad_o, 2, 1)
    keys = new_pipeline(k, 2, 2)
    values = new_pipeline(v, 1, 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (sum_dq, (0, dq, lse2, delta, queries, grads, keys, values, tiles, blocks, heads, band,
                      seq_q, seq_kv, pitch, diagonal, scale, scale_log2, D_LO, D_HI, CAUSAL)),
            (sum_dq, (1, dq, lse2, delta, queries, grads, keys, values, tiles, blocks, heads, band,
                      seq_q, seq_kv, pitch, diagonal, scale, scale_log2, D_LO, D_HI, CAUSAL)),
            (load_keys, (q, k, v, grad_o, queries, grads, keys, values, tiles, blocks, heads, band,
                         group, seq_q, seq_kv, diagonal, CAUSAL)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def constants(head_dim: int, *, causal: bool) -> dict[str, object]:
    """Return the values of both kernels' constexpr arguments."""
    first, rest = columns(head_dim)
    return {"D_LO": first, "D_HI": rest, "CAUSAL": causal}


@dataclass(frozen=True)
class _Plan:
    """What is launched: flashattn_hopper_wide_dkdv and flashattn_hopper_wide_dq."""

    dkdv: Launch
    shares: Shares
    dq: Launch

    def __call__(self, given: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> None:
        """Fill dq, dk and dv; given are q, k, v, dO, lse2 and delta."""
        dq, dk, dv = grads
        self.shares.fill(lambda x: self.dkdv(*given, *x), (dk, dv))
        self.dq(*given, dq)


def plan(
    q: Like,
    k: Like,
    v: Like,
    grad_o: Like,
    dq: Like,
    pitch: int,
    diagonal: int | None,
    scale: float,
    config: WideConfig,
) -> _Plan:
    """Choose the programs, and prepare the launches; dk and dv are as q, k and v determine.

    Args:
        q: [B, H, T, D], D from 129 to 256.
        k: [B, G, S, D].
        v: [B, G, S, D].
        grad_o: [B, H, T, D].
        dq: [B, H, T, D].
        pitch: numbers of lse2 and delta that a head has.
        diagonal: as in ``forward``.
        scale: as in ``forward``.
        config: of both kernels.
    """
    del grad_o, dq
    batch, heads, seq_q, head_dim = q.shape
    kv_heads, seq_kv = k.shape[1:3]
    group, block = heads // kv_heads, BLOCK.value
    causal, last = diagonal is not None, diagonal or 0
    options = constants(head_dim, causal=causal) | {"num_warps": WARPS}
    scales = scale, scale * LOG2E.value
    tile, numbers = Tiles(block), Numbers(block)
    blocks = triton.cdiv(seq_kv, block)
    tiles = blocks * batch * kv_heads
    shares = share(q, k, v, tiles, causal=causal)
    tiles, owners, walked = tiles * shares.count, kv_heads * shares.count, group // shares.count
    sizes = tiles, blocks, owners, *shares.numbers, config.band, walked, seq_q, seq_kv, last
    keys = Launch(
        flashattn_hopper_wide_dkdv,
        tiles,
        [*[tile] * 4, numbers, numbers, *[shares.operand(tile)] * 2],
        (*sizes, *scales),
        options,
    )
    blocks = triton.cdiv(seq_q, PAIR.value)
    tiles = blocks * batch * heads
    queries = Launch(
        flashattn_hopper_wide_dq,
        tiles,
        [*[tile] * 4, None, None, tile],
        (tiles, blocks, heads, config.band, group, seq_q, seq_kv, pitch, last, *scales),
        options,
    )
    return _Plan(keys, shares, queries)
