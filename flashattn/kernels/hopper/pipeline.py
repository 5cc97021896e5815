"""Pipelines: stages of shared memory that a producer warp fills by TMA and consumers read.

An mbarrier that no role uses must not be initialized: Triton gives its memory to other tiles, and
the GPU still writes to it when another process takes its turn (docs/hopper.md).
"""

# Gluon's aggregates need evaluated annotations: no `from __future__ import annotations` here.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flashattn.kernels.hopper.compat import aggregate, load_tile
from flashattn.kernels.hopper.mask import clear_empty, has_empty
from flashattn.kernels.hopper.registers import opaque


@aggregate
class SplitTile:
    """A tile [rows, D_LO + D_HI] in shared memory, in two pieces."""

    low: gl.shared_memory_descriptor
    high: gl.shared_memory_descriptor
    dtype: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, low, high, dtype):
        """Store the fields."""
        self.low = low
        self.high = high
        self.dtype = gl.constexpr(dtype)

    @gluon.jit
    def slice(self, start: gl.constexpr, size: gl.constexpr, dim: gl.constexpr):
        """Return the D_LO columns from 0, or the D_HI from D_LO, as a tile in one piece does."""
        gl.static_assert(dim == 1)
        piece = self.low if start == 0 else self.high
        gl.static_assert(piece.shape[1] == size)
        return piece


@aggregate
class SharedTiles:
    """Tiles [1, 1, rows, columns] in shared memory.

    If high is not None, it has the second pieces of the tiles (see ``SplitTile``).
    """

    tiles: gl.shared_memory_descriptor
    high: gl.shared_memory_descriptor | gl.constexpr

    @gluon.constexpr_function
    def __init__(self, tiles, high):
        """Store the fields."""
        self.tiles = tiles
        self.high = gl.constexpr(None) if high is None else high

    @gluon.jit
    def tile(self, n):
        """Return the n-th tile, [rows, columns]."""
        tile = self.tiles.index(n)
        tile = tile.reshape([tile.shape[2], tile.shape[3]])
        if self.high is not None:
            high = self.high.index(n)
            tile = SplitTile(tile, high.reshape([high.shape[2], high.shape[3]]), tile.dtype)
        return tile


@gluon.jit
def new_shared_tiles(tile, COUNT: gl.constexpr, high=None):
    """Allocate COUNT tiles of a descriptor; ``high`` is that of their second pieces, or None."""
    tiles = gl.allocate_shared_memory(tile.dtype, [COUNT] + tile.block_shape, tile.layout)
    others = None
    if high is not None:
        others = gl.allocate_shared_memory(high.dtype, [COUNT] + high.block_shape, high.layout)
    return SharedTiles(tiles, others)


@aggregate
class Pipeline:
    """Stages for tiles [1, 1, rows, columns], each with a full and an empty barrier.

    The n-th load fills stage n % stages. A barrier's phase is a bit that flips each time all
    arrivals are in; a wait for phase 1 of a new barrier returns at once.

    A stage holds all bf16 terms of an fp32 tile. If row_stats is not None, a stage also holds a
    number for each row of its tile: [1, rows] in fp32, or its bf16 terms [1, rows, columns]. If
    high is not None, it has the second pieces of the tiles.
    """

    tiles: gl.shared_memory_descriptor
    high: gl.shared_memory_descriptor | gl.constexpr
    row_stats: gl.shared_memory_descriptor | gl.constexpr
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor | gl.constexpr
    stages: gl.constexpr
    terms: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, tiles, high, row_stats, full, empty, stages, terms):
        """Store the fields."""
        self.tiles = tiles
        self.high = gl.constexpr(None) if high is None else high
        self.row_stats = gl.constexpr(None) if row_stats is None else row_stats
        self.full = full
        self.empty = gl.constexpr(None) if empty is None else empty
        self.stages = gl.constexpr(stages)
        self.terms = gl.constexpr(terms)

    @gluon.jit
    def producer_acquire(self, n):
        """Wait until the n-th load's stage is empty."""
        mbarrier.wait(self.empty.index(n % self.stages), ((n // self.stages) & 1) ^ 1)

    @gluon.jit
    def producer_commit(self, n, tile, batch, head, row, row_stats=None, stats_row=0, high=None):
        """Start the n-th load into its empty stage; the load completes the stage's full barrier."""
        stage = n % self.stages
        full = self.full.index(stage)
        size: gl.constexpr = self.terms * tile.block_type.nbytes
        stats_size: gl.constexpr = 0 if row_stats is None else row_stats.block_type.nbytes
        high_size: gl.constexpr = 0 if high is None else high.block_type.nbytes
        mbarrier.expect(full, size + stats_size + high_size)
        for i in gl.static_range(self.terms):
            at = [batch, head * self.terms + i, row, 0]
            load_tile(tile, at, full, self.tiles.index(stage * self.terms + i))
        if high is not None:
            load_tile(high, [batch, head, row, tile.block_shape[3]], full, self.high.index(stage))
        if row_stats is not None:
            if len(row_stats.block_shape) == 2:
                load_tile(row_stats, [stats_row, row], full, self.row_stats.index(stage))
            else:
                load_tile(row_stats, [stats_row, row, 0], full, self.row_stats.index(stage))

    @gluon.jit
    def load(self, n, tile, batch, head, row, row_stats=None, stats_row=0, high=None):
        """Start the n-th load as soon as its stage is empty."""
        self.producer_acquire(n)
        self.producer_commit(n, tile, batch, head, row, row_stats, stats_row, high)

    @gluon.jit
    def consumer_wait(self, n):
        """Wait for the n-th tile and return it."""
        mbarrier.wait(self.full.index(n % self.stages), (n // self.stages) & 1)
        return self.tile(n)

    @gluon.jit
    def consumer_release(self, n):
        """Release the n-th tile's stage, as every consumer warpgroup must."""
        mbarrier.arrive(self.empty.index(n % self.stages), count=1)

    @gluon.jit
    def tile(self, n):
        """Return the n-th tile, [rows, columns], or a tuple of its terms, without a wait."""
        if self.high is not None:
            tile = SharedTiles(self.tiles, self.high).tile(n % self.stages)
        elif self.terms == 1:
            tile = self.term(n % self.stages)
        elif self.terms == 2:
            at = n % self.stages * 2
            tile = self.term(at), self.term(at + 1)  # type: ignore[assignment]
        else:
            at = opaque(n % self.stages * 3)
            tile = self.term(at), self.term(at + 1), self.term(at + 2)  # type: ignore[assignment]
        return tile

    @gluon.jit
    def clear_empty(self, n, bounds, rows, start):
        """Wait for the n-th tile, which begins at row ``start``, and clear its empty rows."""
        tile = self.consumer_wait(n)
        if self.high is None:
            clear_empty(tile, bounds, rows, start)
        else:
            clear_empty(tile.low, bounds, rows, start)
            clear_empty(tile.high, bounds, rows, start)

    @gluon.jit
    def term(self, at):
        """Return a tile [rows, columns] by its index among all terms of all stages."""
        tile = self.tiles.index(at)
        return tile.reshape([tile.shape[2], tile.shape[3]])

    @gluon.jit
    def stats(self, n):
        """Return the row statistics of the n-th tile, [rows] or [rows, columns]."""
        stats = self.row_stats.index(n % self.stages)
        if len(stats.shape) == 2:
            stats = stats.reshape([stats.shape[1]])
        else:
            stats = stats.reshape([stats.shape[1], stats.shape[2]])
        return stats


@gluon.jit
def new_pipeline(
    tile,
    STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    TERMS: gl.constexpr = 1,
    row_stats=None,
    high=None,
):
    """Return an empty pipeline for a descriptor's tiles.

    Args:
        tile: descriptor.
        STAGES: loads that may be in flight or in use.
        CONSUMERS: warpgroups that release each stage; 0 if stages have no empty barriers.
        TERMS: bf16 terms of a tile.
        row_stats: descriptor of the row statistics, or None.
        high: descriptor of the second pieces of tiles, or None.
    """
    made = new_shared_tiles(tile, TERMS * STAGES, high)
    stats = None
    if row_stats is not None:
        stats = gl.allocate_shared_memory(
            row_stats.dtype, [STAGES] + row_stats.block_shape, row_stats.layout
        )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    empty = None
    if CONSUMERS > 0:
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(STAGES):
            mbarrier.init(empty.index(i), count=CONSUMERS)
    return Pipeline(made.tiles, made.high, stats, full, empty, STAGES, TERMS)


@gluon.jit
def clear_tiles(pipelines, n, start, bounds, rows):
    """Zero the rows of the n-th tiles whose intervals in bounds are empty.

    All warpgroups may call this at once: they write the same numbers.
    """
    if bounds is not None:  # noqa: SIM102 - when compiled; the next, when run
        if has_empty(bounds, rows, start, pipelines[0].tiles.shape[3]):
            for i in gl.static_range(len(pipelines)):
                pipelines[i].clear_empty(n, bounds, rows, start)


@aggregate
class ScalarPipeline:
    """Integers that one warp sends to other roles, at most two of them in flight."""

    numbers: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, numbers, full, empty):
        """Store the fields."""
        self.numbers = numbers
        self.full = full
        self.empty = empty

    @gluon.jit
    def write(self, n, number):
        """Write the n-th number."""
        mbarrier.wait(self.empty.index(n % 2), ((n // 2) & 1) ^ 1)
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        self.numbers.index(n % 2).store(gl.full([1], number, gl.int32, layout))
        mbarrier.arrive(self.full.index(n % 2), count=1)

    @gluon.jit
    def read(self, n):
        """Wait for the n-th number and return it."""
        mbarrier.wait(self.full.index(n % 2), (n // 2) & 1)
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        number = gl.max(self.numbers.index(n % 2).load(layout), 0)
        mbarrier.arrive(self.empty.index(n % 2), count=1)
        return number


@gluon.jit
def new_scalar_pipeline(CONSUMERS: gl.constexpr):
    """Return an empty pipeline, of which CONSUMERS roles read each number."""
    numbers = gl.allocate_shared_memory(gl.int32, [2, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    return ScalarPipeline(numbers, full, empty)


@aggregate
class SharedP:
    """P in shared memory, from the warpgroup that computes it to the one that computes dS.

    There is no empty barrier. The P of ``stages`` tiles before has been read once the tile that it
    was computed from is released.
    """

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    stages: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, tiles, full, stages):
        """Store the fields."""
        self.tiles = tiles
        self.full = full
        self.stages = gl.constexpr(stages)

    @gluon.jit
    def store(self, n, p):
        """Store the n-th P."""
        self.tiles.index(n % self.stages).store(p.to(self.tiles.dtype))
        mbarrier.arrive(self.full.index(n % self.stages), count=1)

    @gluon.jit
    def load(self, n, LAYOUT: gl.constexpr):
        """Wait for the n-th P and return it, in fp32."""
        mbarrier.wait(self.full.index(n % self.stages), (n // self.stages) & 1)
        return self.tiles.index(n % self.stages).load(LAYOUT).to(gl.float32)


@gluon.jit
def new_shared_p(
    DTYPE: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr
):
    """Allocate shared memory for STAGES tiles of P [ROWS, COLUMNS]."""
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 32 if gl.float32 == DTYPE else 16, 2)
    tiles = gl.allocate_shared_memory(DTYPE, [STAGES, ROWS, COLUMNS], layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    return SharedP(tiles, full, STAGES)
