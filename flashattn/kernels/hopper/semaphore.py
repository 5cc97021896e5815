"""The dQ semaphore, which orders the additions of CTAs to the dq accumulator of a query tile."""

# Gluon's aggregates need evaluated annotations: no `from __future__ import annotations` here.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashattn.kernels.hopper.compat import aggregate

POLL = gl.constexpr(
    "ld.acquire.gpu.global.b32 $0, [$1]; shfl.sync.idx.b32 $0, $0, 0, 31, 0xffffffff;"
)
ACQUIRED = gl.constexpr("bar.warp.sync 0xffffffff; fence.proxy.async; mov.b32 $0, 0;")
# Not wait_group.read, which waits only until shared memory has been read.
ARRIVE_INC = gl.constexpr("""{
    .reg .pred first;
    .reg .b32 lane;
    cp.async.bulk.wait_group 0;
    fence.proxy.async;
    bar.warp.sync 0xffffffff;
    mov.u32 lane, %laneid;
    setp.eq.u32 first, lane, 0;
    @first red.release.gpu.global.add.s32 [$1], 1;
    mov.b32 $0, 0;
}""")


@gluon.jit
def wait_eq(counter, value):
    """Wait, as one warp, until a counter equals a value."""
    seen = gl.inline_asm_elementwise(POLL, "=r,l,~{memory}", [counter], gl.int32, False, 1)
    while seen != value:
        seen = gl.inline_asm_elementwise(POLL, "=r,l,~{memory}", [counter], gl.int32, False, 1)


@gluon.jit
def fence_acquire():
    """Order the later TMA stores after the writes whose completion this warp has acquired."""
    gl.inline_asm_elementwise(ACQUIRED, "=r,~{memory}", [], gl.int32, False, 1)


@gluon.jit
def arrive_inc(counter):
    """Wait, as one warp, until all of its TMA stores are in memory, then increment a counter."""
    gl.inline_asm_elementwise(ARRIVE_INC, "=r,l,~{memory}", [counter], gl.int32, False, 1)


@aggregate
class DqSemaphore:
    """For each accumulator, counters of the key tiles that have added to a query tile's dq.

    The first ``ordered`` key tiles of an accumulator add in order; the others add after these.
    """

    counters: gl.tensor
    accums: gl.tensor
    ordered: gl.tensor

    @gluon.constexpr_function
    def __init__(self, counters, accums, ordered):
        """Store the fields."""
        self.counters = counters
        self.accums = accums
        self.ordered = ordered

    @gluon.jit
    def value(self, schedule, i, end, block, first):
        """Return the count at which a key tile adds to query tile i; at most ``ordered``.

        Under a mask key tiles add in the order of the keys, beginning with key tile ``first``.
        Without a mask they add in the order of their visits.
        """
        if schedule.masked:
            value = (block - first) // self.accums
        else:
            value = schedule.visits_before(i, end)
        return gl.minimum(value, self.ordered)

    @gluon.jit
    def accum_batch(self, block, batch, scheduler):
        """Return a batch's index among the batches of all accumulators, for a key tile."""
        return block % self.accums * scheduler.batches() + batch

    @gluon.jit
    def counter(self, head, end, i):
        """Return the counter of query tile i of a head that has ``end`` query tiles."""
        return self.counters + head * end + i
