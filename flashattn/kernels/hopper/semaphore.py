"""The dQ semaphore: in which order programs add to the accumulator of a tile of queries."""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashattn.kernels import launch

QUEUE, MOST_SLABS = 16, 8  # programs of a head that may wait for one another; workspaces
QUEUE_WIDE = 33  # likewise of wider heads, whose workspaces cost more to add up
NARROW = 64  # head dimension, up to which they are narrow

POLL = gl.constexpr(
    "ld.acquire.gpu.global.b32 $0, [$1]; shfl.sync.idx.b32 $0, $0, 0, 31, 0xffffffff;"
)
ACQUIRED = gl.constexpr("bar.warp.sync 0xffffffff; fence.proxy.async; mov.b32 $0, 0;")
# Not of the kind .read, which waits until shared memory was read only.
PASS_ON = gl.constexpr("""{
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
def await_turn(counter, turn):
    """Wait, as one warp, until a counter has come to a number."""
    seen = gl.inline_asm_elementwise(POLL, "=r,l,~{memory}", [counter], gl.int32, False, 1)
    while seen != turn:
        seen = gl.inline_asm_elementwise(POLL, "=r,l,~{memory}", [counter], gl.int32, False, 1)


@gluon.jit
def order_after_turn():
    """Have what is stored from now on come after what this warp was told is in memory."""
    gl.inline_asm_elementwise(ACQUIRED, "=r,~{memory}", [], gl.int32, False, 1)


@gluon.jit
def pass_on(counter):
    """Wait, as one warp, until all that it stored is in memory, and count one on."""
    gl.inline_asm_elementwise(PASS_ON, "=r,l,~{memory}", [counter], gl.int32, False, 1)


@gluon.jit
def place_kv(tile, tiles, blocks, heads, band):
    """Return (block, batch, head) of a tile of keys: those that most queries see come first.

    So it is within ``band`` heads, then within the next; the tiles of a head are in their order.
    """
    start = tile // (band * blocks) * band
    width = gl.minimum(band, tiles // blocks - start)
    within = tile - start * blocks
    block, row = within // width, start + within % width
    return block, row // heads, row % heads


@gluon.jit
def round_of(tile, tiles, blocks, band, at_once):
    """Return (eldest, count, number): of a head's blocks that run at once, one of which a tile has.

    That is the first of them, how many they are, and which of them the tile's is. They are of the
    same ``at_once`` tiles: 1 leaves every block alone.
    """
    start = tile // (band * blocks) * band
    width = gl.minimum(band, tiles // blocks - start)
    within = tile - start * blocks
    begin = tile // at_once * at_once - start * blocks - within % width
    eldest = gl.maximum(gl.cdiv(begin, width), 0)
    end = gl.minimum(gl.cdiv(begin + at_once, width), blocks)
    return eldest, end - eldest, within // width - eldest


@gluon.jit
def nth(n, number, count, apart, end, CAUSAL: gl.constexpr):
    """Return the n-th tile of queries, of ``end``, that one of a round's blocks visits.

    The first of them begins with the last tile, and the others with ``apart - 1``, with as many
    more, and so on; after tile 0 comes the last. So all keep that distance, or less where there is
    no room for it, and nobody waits for another to begin. Under a mask all begin with the last.
    """
    if CAUSAL:
        i = end - 1 - n
    else:
        i = number * gl.minimum(apart * count, end) // count - 1 - n
        i = gl.where(i < 0, i + end, i)
    return i


@gluon.jit
def turn_at(
    i, block, eldest, number, count, apart, end, slabs, ordered, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Return after how many others a block adds to a tile of queries; ``ordered`` if any will do.

    Those of earlier rounds come before it, and of its own those that visit the tile earlier. Under
    a mask those with earlier keys do, in the same slab.
    """
    if CAUSAL:
        turn = block // slabs
    else:
        first = gl.minimum(gl.cdiv((i + 1) * count, gl.minimum(apart * count, end)), count)
        turn = eldest + number - first
        turn = gl.where(number < first, turn + count, turn)
    return gl.minimum(turn, ordered)


@gluon.jit
def slab(block, batch, tiles, blocks, owners, slabs):
    """Return where the workspace has a program's batch: every slab has all of them."""
    return block % slabs * (tiles // (blocks * owners)) + batch


@gluon.jit
def turn_of(turns, batch, head, owners, group, end, i):
    """Return the counter of a tile of queries; a head has ``end``."""
    return turns + ((batch * owners * group + head) * end + i)


def slabs_for(heads: int, blocks: int, device: torch.device, *, head_dim: int) -> int:
    """Return how many workspaces shall be added up under a mask, so that programs do not queue.

    All begin with the last queries, so of a head's that run at once each waits for all before it,
    for some 3 us each on an H200. That is nothing where many heads run at once, or where all
    programs do: the first ones, which never wait, have the most to do.

    Args:
        heads: that have keys of their own.
        blocks: tiles of keys of a head.
        device: of the launch.
        head_dim: D.
    """
    programs = launch.multiprocessors(device)
    if heads * blocks <= programs:
        return 1
    queue = QUEUE_WIDE if head_dim > NARROW else QUEUE
    return max(1, min(MOST_SLABS, min(blocks, programs // heads) // queue))
