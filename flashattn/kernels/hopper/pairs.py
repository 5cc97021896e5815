"""Pairs: a ring whose slots hold tiles of two tensors, and a number for each of their rows."""

# Gluon's aggregates look at annotations as they are, so they cannot be postponed here.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flashattn.kernels.hopper.compat import aggregate, load_tile


@aggregate
class Pairs:
    """A ring of tiles of two tensors and of a number a row of each; both are freed together.

    The first of a pair is awaited apart from the second. A slot's numbers are [1, rows].
    """

    tiles: gl.shared_memory_descriptor
    others: gl.shared_memory_descriptor
    numbers: gl.shared_memory_descriptor
    other_numbers: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    others_full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    slots: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, tiles, others, numbers, other_numbers, full, others_full, empty, slots):
        """Hold on to them."""
        self.tiles = tiles
        self.others = others
        self.numbers = numbers
        self.other_numbers = other_numbers
        self.full = full
        self.others_full = others_full
        self.empty = empty
        self.slots = gl.constexpr(slots)

    @gluon.jit
    def put(self, n, x, x_numbers, other, other_numbers, batch, head, heads, row):
        """Let the n-th pair come as soon as its slot is empty."""
        slot = n % self.slots
        mbarrier.wait(self.empty.index(slot), ((n // self.slots) & 1) ^ 1)
        line = batch * heads + head
        full, tile = self.full.index(slot), self.tiles.index(slot)
        mbarrier.expect(full, x.block_type.nbytes + x_numbers.block_type.nbytes)
        load_tile(x, [batch, head, row, 0], full, tile)
        load_tile(x_numbers, [line, row], full, self.numbers.index(slot))
        full, tile = self.others_full.index(slot), self.others.index(slot)
        mbarrier.expect(full, other.block_type.nbytes + other_numbers.block_type.nbytes)
        load_tile(other, [batch, head, row, 0], full, tile)
        load_tile(other_numbers, [line, row], full, self.other_numbers.index(slot))

    @gluon.jit
    def await_first(self, n):
        """Wait for the n-th pair's first half."""
        mbarrier.wait(self.full.index(n % self.slots), (n // self.slots) & 1)

    @gluon.jit
    def await_second(self, n):
        """Wait for the n-th pair's second half."""
        mbarrier.wait(self.others_full.index(n % self.slots), (n // self.slots) & 1)

    @gluon.jit
    def first(self, n):
        """Return the n-th pair's first tile, [rows, columns], and its numbers, [rows]."""
        tile, numbers = self.tiles.index(n % self.slots), self.numbers.index(n % self.slots)
        return tile.reshape([tile.shape[2], tile.shape[3]]), numbers.reshape([numbers.shape[1]])

    @gluon.jit
    def second(self, n):
        """Return the n-th pair's second tile, [rows, columns], and its numbers, [rows]."""
        slot = n % self.slots
        tile, numbers = self.others.index(slot), self.other_numbers.index(slot)
        return tile.reshape([tile.shape[2], tile.shape[3]]), numbers.reshape([numbers.shape[1]])

    @gluon.jit
    def free(self, n):
        """Say that this warpgroup has read the n-th pair."""
        mbarrier.arrive(self.empty.index(n % self.slots), count=1)


@gluon.jit
def new_pairs(x, x_numbers, other, other_numbers, SLOTS: gl.constexpr, READERS: gl.constexpr):
    """Return a ring of pairs of these descriptors' tiles, free when READERS warpgroups say so."""
    tiles = gl.allocate_shared_memory(x.dtype, [SLOTS] + x.block_shape, x.layout)
    others = gl.allocate_shared_memory(other.dtype, [SLOTS] + other.block_shape, other.layout)
    numbers = gl.allocate_shared_memory(
        x_numbers.dtype, [SLOTS] + x_numbers.block_shape, x_numbers.layout
    )
    more = gl.allocate_shared_memory(
        other_numbers.dtype, [SLOTS] + other_numbers.block_shape, other_numbers.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    others_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(others_full.index(i), count=1)
        mbarrier.init(empty.index(i), count=READERS)
    return Pairs(tiles, others, numbers, more, full, others_full, empty, SLOTS)
