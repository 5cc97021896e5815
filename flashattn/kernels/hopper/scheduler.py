"""Scheduling: which tile a CTA takes, and in which order it visits the tiles of the other side.

Sources: Qiang et al., 2026, "DASH: Deterministic Attention Scheduling for High-throughput
Reproducible LLM Training", for the shift schedule; the waves are ours.
"""

# Gluon's aggregates need evaluated annotations: no `from __future__ import annotations` here.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashattn.kernels.constants import SECTION_HEADS
from flashattn.kernels.hopper.compat import aggregate
from flashattn.kernels.hopper.mask import Mask

LINEAR, ASCENDING, DESCENDING = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)


@aggregate
class Shape:
    """The sizes and the mask that every role needs.

    ``group`` is the number of query heads of a key head, or of a GQA split of it. ``mask`` is that
    of the first batch, and the strides are between batches in its bounds of rows, if any.
    """

    group: gl.tensor
    mask: Mask
    keys_stride: gl.tensor | gl.constexpr
    queries_stride: gl.tensor | gl.constexpr

    @gluon.constexpr_function
    def __init__(self, group, mask, keys_stride=None, queries_stride=None):
        """Store the fields."""
        self.group = group
        self.mask = mask
        self.keys_stride = gl.constexpr(None) if keys_stride is None else keys_stride
        self.queries_stride = gl.constexpr(None) if queries_stride is None else queries_stride

    @gluon.jit
    def mask_of(self, batch):
        """Return the mask of a batch."""
        return self.mask.of_batch(batch, self.keys_stride, self.queries_stride)


@aggregate
class TileScheduler:
    """The tiles of all heads in the order in which CTAs take them.

    LINEAR goes head by head. The other orders go by sections of heads, whose K and V stay in the L2
    cache: in a section the first blocks of all heads come first (ASCENDING), or the last ones
    (DESCENDING). Under a mask the longest come first, so the last CTAs have the least work (LPT).
    """

    tiles: gl.tensor
    blocks: gl.tensor
    heads: gl.tensor
    section_heads: gl.tensor
    order: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, tiles, blocks, heads, section_heads, order):
        """Store the fields; ``tiles`` counts all heads, ``blocks`` one head."""
        self.tiles = tiles
        self.blocks = blocks
        self.heads = heads
        self.section_heads = section_heads
        self.order = gl.constexpr(order)

    @gluon.jit
    def section(self, tile):
        """Return (first head, heads, index within) of a tile's section."""
        start = tile // (self.section_heads * self.blocks) * self.section_heads
        heads = gl.minimum(self.section_heads, self.tiles // self.blocks - start)
        return start, heads, tile - start * self.blocks

    @gluon.jit
    def tile_coord(self, tile):
        """Return (block, batch, head) of a tile."""
        if self.order == LINEAR:
            block, row = tile % self.blocks, tile // self.blocks
        else:
            start, heads, within = self.section(tile)
            block, row = within // heads, start + within % heads
            if self.order == DESCENDING:
                block = self.blocks - 1 - block
        return block, row // self.heads, row % self.heads

    @gluon.jit
    def batches(self):
        """Return the number of batches."""
        return self.tiles // (self.blocks * self.heads)


@gluon.jit
def one_tile_each(blocks, heads, ORDER: gl.constexpr):
    """Return the scheduler of a launch with one CTA per tile and the portable kernels' sections."""
    return TileScheduler(gl.num_programs(0), blocks, heads, gl.to_tensor(SECTION_HEADS), ORDER)


@aggregate
class ShiftSchedule:
    """The order in which the CTA of a key tile visits query tiles: the shift schedule.

    A wave is the key tiles of a head that run at once. Its first CTA starts at the last query tile,
    each other CTA ``stagger`` tiles from the one before, and after tile 0 they wrap around. So they
    stay that far apart, or less if there are few query tiles, and none waits for another to start.
    Under a mask all CTAs visit the query tiles from last to first.
    """

    begin: gl.tensor
    count: gl.tensor
    rank: gl.tensor
    stagger: gl.tensor
    masked: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, begin, count, rank, stagger, masked):
        """Store the fields: the wave's first key tile, its number of key tiles, this one's rank."""
        self.begin = begin
        self.count = count
        self.rank = rank
        self.stagger = stagger
        self.masked = gl.constexpr(masked)

    @gluon.jit
    def query_tile(self, n, end):
        """Return the n-th query tile to visit, of ``end``."""
        if self.masked:
            i = end - 1 - n
        else:
            i = self.rank * gl.minimum(self.stagger * self.count, end) // self.count - 1 - n
            i = gl.where(i < 0, i + end, i)
        return i

    @gluon.jit
    def visits_before(self, i, end):
        """Return how many key tiles of the head visit query tile i before this one; no mask."""
        first = gl.minimum(self.stagger * self.count, end)
        first = gl.minimum(gl.cdiv((i + 1) * self.count, first), self.count)
        before = self.begin + self.rank - first
        return gl.where(self.rank < first, before + self.count, before)


@gluon.jit
def shift_schedule(scheduler, tile, wave, MASKED: gl.constexpr):
    """Return the order of visits of a tile; ``wave`` is (tiles that run at once, stagger)."""
    wave_size, stagger = wave
    start, heads, within = scheduler.section(tile)
    begin = tile // wave_size * wave_size - start * scheduler.blocks - within % heads
    first = gl.maximum(gl.cdiv(begin, heads), 0)
    end = gl.minimum(gl.cdiv(begin + wave_size, heads), scheduler.blocks)
    return ShiftSchedule(first, end - first, within // heads - first, stagger, MASKED)
