"""dq of flashattn_hopper_bwd: its product, the accumulator, and the order of the additions.

Each consumer warpgroup computes its part of a dq tile from all 128 keys of the CTA: half, or for
D = 65 to 96, 64 or 32 of the 96 columns. Two warps take turns adding dq tiles to an fp32
accumulator, which flashattn_hopper_bwd_postprocess converts.

The first CTA that adds to a dq tile stores instead, so the accumulator need not be cleared.
For determinism a semaphore per tile orders the additions, and a warp of its own waits for it.
A CTA waits only for CTAs that have started, so there is no deadlock:

* Under a causal mask the order is that of the keys, and a lower id starts earlier. A long head
  uses several accumulators in rotation, which shortens the queue.
* Without a mask the order is that of the visits in the shift schedule. The launch is cooperative,
  so the CTAs of a wave run at once.

Source: Shah et al., 2024, "FlashAttention-3", for dq's halves.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
)

from flashattn.kernels.descriptor import Tiled
from flashattn.kernels.hopper.backward_tile import first_key_tile, visited_tiles
from flashattn.kernels.hopper.compat import add_tile, store_tile
from flashattn.kernels.hopper.config import SIZES
from flashattn.kernels.hopper.mask import keys_of_tl
from flashattn.kernels.hopper.named import (
    WARPGROUP_AND_WARP,
    WARPGROUPS_AND_WARP,
    barrier_arrive,
    barrier_wait,
)
from flashattn.kernels.hopper.registers import acc_layout
from flashattn.kernels.hopper.scheduler import shift_schedule
from flashattn.kernels.hopper.semaphore import arrive_inc, fence_acquire, wait_eq
from flashattn.kernels.hopper.tma import swizzled

QUERIES = gl.constexpr(64)  # of a warpgroup's part of a dq tile
LINE = gl.constexpr(64)  # numbers in a row of the dq accumulator
# Named barriers: one DQ_FULL per dq_store warp, one DQ_EMPTY per consumer warpgroup.
DQ_FULL, DQ_EMPTY = gl.constexpr(8), gl.constexpr(10)


@gluon.jit
def dq_semaphore_wait(semaphore, arrivals, scheduler, wave, shape, t):
    """Wait for the dq semaphores, and send their values to the dq_store warps."""
    n = 0
    for tile in range(gl.program_id(0), scheduler.tiles, gl.num_programs(0)):
        block, batch, split_head = scheduler.tile_coord(tile)
        mask = shape.mask_of(batch)
        schedule = shift_schedule(scheduler, tile, wave, mask.masked)
        first, _, _, end = visited_tiles(block, mask, t)
        accum_batch = semaphore.accum_batch(block, batch, scheduler)
        heads, tiles = scheduler.heads * shape.group, gl.cdiv(mask.seq_q, t.block_q)
        for head in range(split_head * shape.group, split_head * shape.group + shape.group):
            for visit in range(end - first):
                i = schedule.query_tile(visit, end)
                value = semaphore.value(schedule, i, end, block, first_key_tile(i, mask, t))
                wait_eq(semaphore.counter(accum_batch * heads + head, tiles, i), value)
                arrivals.write(n, value)
                n += 1


@gluon.jit
def reduce_add_dq(dq, sdQ, accum_batch, head, row, first, LINES: gl.constexpr):
    """Add a dq tile, which has LINES lines, to the accumulator; store it if it is the first."""
    BOX: gl.constexpr = dq.block_shape[2]
    for i in gl.static_range(0, LINES, BOX):
        box = sdQ.index(i // LINE).slice(i % LINE, BOX, dim=2)
        if first:
            store_tile(dq, [accum_batch, head, row + i, 0], box)
        else:
            add_tile(dq, [accum_batch, head, row + i, 0], box)


@gluon.jit
def release_sdq():
    """Signal both warpgroups that they may write the next dq tile."""
    for w in gl.static_range(2):  # a barrier each: neither waits for the other
        barrier_arrive(DQ_EMPTY + w, WARPGROUP_AND_WARP)


@gluon.jit
def dq_store(WARP: gl.constexpr, dq, sdQ, semaphore, arrivals, scheduler, wave, shape, t):
    """Add every other dq tile of a CTA to the accumulator: the even ones, or the odd ones.

    The other warp stores the next tile while this one waits until its writes are in memory.
    """
    if WARP == 0:
        release_sdq()
    n = 0
    for tile in range(gl.program_id(0), scheduler.tiles, gl.num_programs(0)):
        block, batch, split_head = scheduler.tile_coord(tile)
        mask = shape.mask_of(batch)
        schedule = shift_schedule(scheduler, tile, wave, mask.masked)
        first, _, _, end = visited_tiles(block, mask, t)
        accum_batch = semaphore.accum_batch(block, batch, scheduler)
        heads, tiles = scheduler.heads * shape.group, gl.cdiv(mask.seq_q, t.block_q)
        visits = gl.maximum(end - first, 0)
        for head in range(split_head * shape.group, split_head * shape.group + shape.group):
            for visit in range((n + WARP) % 2, visits, 2):
                i = schedule.query_tile(visit, end)
                value = arrivals.read(n + visit)
                if mask.masked and not mask.rows:  # cheaper to recompute than to keep
                    value = semaphore.value(schedule, i, end, block, first_key_tile(i, mask, t))
                fence_acquire()
                barrier_wait(DQ_FULL + WARP, WARPGROUPS_AND_WARP)
                reduce_add_dq(dq, sdQ, accum_batch, head, i * t.lines, value == 0, t.lines)
                tma.store_wait(0)
                release_sdq()
                if value < semaphore.ordered:
                    arrive_inc(semaphore.counter(accum_batch * heads + head, tiles, i))
            n += visits


@gluon.jit
def mma_dq(WARPGROUP: gl.constexpr, ds, k, t):
    """Start this warpgroup's part of dq, 64 queries by COLUMNS columns, over all keys."""
    COLUMNS: gl.constexpr = t.lines - LINE if WARPGROUP == 1 else LINE
    if t.block_q == QUERIES:
        k = k.slice(WARPGROUP * LINE, COLUMNS, dim=1)
    else:
        ds = ds.slice(WARPGROUP * QUERIES, QUERIES, dim=0)
    dq = gl.zeros([QUERIES, COLUMNS], gl.float32, acc_layout(COLUMNS))
    return warpgroup_mma(ds, k, dq, use_acc=False, is_async=True)


@gluon.jit
def to_accum_layout(dq):
    """Return a warpgroup's part of dq in the accumulator's order, as rows of 64 numbers.

    Rows of dq are (warp, half, lane // 4), columns (block, lane % 4, pair). In memory a thread's
    four numbers of a block are adjacent, then come threads, then blocks: no bank conflicts.
    """
    COLUMNS: gl.constexpr = dq.shape[1]
    dq = gl.permute(gl.reshape(dq, [4, 2, 8, COLUMNS // 8, 4, 2]), (3, 0, 2, 4, 1, 5))
    return gl.reshape(dq, [COLUMNS, LINE])


@gluon.jit
def store_sdq(WARPGROUP: gl.constexpr, dq, sdQ, n):
    """Write this warpgroup's part of the n-th dq tile to shared memory."""
    barrier_wait(DQ_EMPTY + WARPGROUP, WARPGROUP_AND_WARP)
    part = sdQ.index(WARPGROUP).reshape([LINE, LINE]).slice(0, dq.shape[1], dim=0)
    part.store(to_accum_layout(dq))
    fence_async_shared()
    barrier_arrive(DQ_FULL + n % 2, WARPGROUPS_AND_WARP)


@triton.jit(do_not_specialize=SIZES)
def flashattn_hopper_bwd_postprocess(
    dq_accum,
    dq,
    key_bounds,
    dq_strides,
    blocks,
    heads,
    num_accums,
    seq_q,
    seq_kv,
    left,
    right,
    keys_stride,
    scale,
    head_dim: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write dq = scale * the sum of the accumulators, in order, and 0 to fully masked rows.

    A head has ``blocks`` blocks of 64 queries; 32 columns of a block are 32 rows of 64 numbers. An
    accumulator that no key tile has added to is uninitialized.
    """
    block = tl.program_id(0)
    row = (block // blocks).to(tl.int64)
    queries = block % blocks * 64 + tl.arange(0, 64)
    keys = None
    if key_bounds is not None:
        keys = key_bounds + row // heads * keys_stride
    accums = num_accums
    if right is not None:
        tile = block % blocks * 64 // BLOCK_Q
        if tile < tl.cdiv(seq_q, BLOCK_Q) - 1:  # all key tiles visit the last
            _, hi = keys_of_tl((tile + 1) * BLOCK_Q - 1, None, right, None, seq_q, seq_kv)
            accums = tl.minimum(num_accums, tl.cdiv(hi, 128))
    base = dq + row // heads * dq_strides[0] + row % heads * dq_strides[1]
    numbers = tl.arange(0, 32)[:, None] * 64 + tl.arange(0, 64)[None, :]
    accum_stride = tl.num_programs(0).to(tl.int64) * COLUMNS * 64
    for start in tl.static_range(0, COLUMNS, 32):
        at = dq_accum + (block.to(tl.int64) * COLUMNS + start) * 64
        x = tl.load(at + numbers)
        for i in tl.range(1, accums):
            x += tl.load(at + i * accum_stride + numbers)
        x = tl.permute(tl.reshape(x * scale, [4, 4, 8, 4, 2, 2]), (1, 4, 2, 0, 3, 5))
        x = tl.reshape(x, [64, 32])
        if left is not None or right is not None or key_bounds is not None:
            lo, hi = keys_of_tl(queries, left, right, keys, seq_q, seq_kv)
            x = tl.where((lo < hi)[:, None], x, 0.0)
        columns = start + tl.arange(0, 32)
        inside = (queries[:, None] < seq_q) & (columns[None, :] < head_dim)
        offsets = queries[:, None].to(tl.int64) * dq_strides[2] + columns[None, :]
        tl.store(base + offsets, x.to(dq.dtype.element_ty), mask=inside)


class DqAccumSpec(NamedTuple):
    """The dq accumulator [B, H, rows, 64] in fp32, of which [lines, 64] are stored at a time."""

    lines: int

    def tiles(self, x: torch.Tensor) -> Tiled:
        """Return the form, shape and strides of a descriptor of x."""
        return swizzled(x.dtype, (1, 1, self.lines, LINE.value), 0), x.shape, x.stride()
