"""Pipelines: stages of shared memory that one warp fills by TMA and warpgroups read."""

# Gluon's aggregates look at annotations as they are, so they cannot be postponed here.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flashattn.kernels.hopper.compat import aggregate, load_tile
from flashattn.kernels.hopper.registers import anew


@aggregate
class Ring:
    """Slots for tiles [1, 1, rows, columns], and for each whether it is full and whether empty.

    The n-th tile lies in slot n % slots. A barrier's phase is a bit that flips each time that all
    have arrived; a new barrier lets those pass who wait for phase 1.
    """

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    slots: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, tiles, full, empty, slots):
        """Hold on to them."""
        self.tiles = tiles
        self.full = full
        self.empty = empty
        self.slots = gl.constexpr(slots)

    @gluon.jit
    def wait(self, n):
        """Wait until the n-th tile's slot is empty."""
        mbarrier.wait(self.empty.index(n % self.slots), ((n // self.slots) & 1) ^ 1)

    @gluon.jit
    def load(self, n, descriptor, batch, head, row):
        """Let the n-th tile come; its slot is empty."""
        slot = n % self.slots
        tile = self.tiles.index(slot)
        mbarrier.expect(self.full.index(slot), descriptor.block_type.nbytes)
        load_tile(descriptor, [batch, head, row, 0], self.full.index(slot), tile)

    @gluon.jit
    def put(self, n, descriptor, batch, head, row):
        """Let the n-th tile come as soon as its slot is empty."""
        self.wait(n)
        self.load(n, descriptor, batch, head, row)

    @gluon.jit
    def take(self, n):
        """Wait for the n-th tile and return it, [rows, columns]."""
        self.come(n)
        return self.tile(n)

    @gluon.jit
    def come(self, n):
        """Wait for the n-th tile."""
        mbarrier.wait(self.full.index(n % self.slots), (n // self.slots) & 1)

    @gluon.jit
    def tile(self, n):
        """Return the n-th tile, which is there, [rows, columns]."""
        tile = self.tiles.index(n % self.slots)
        return tile.reshape([tile.shape[2], tile.shape[3]])

    @gluon.jit
    def free(self, n):
        """Say that this warpgroup has read the n-th tile."""
        mbarrier.arrive(self.empty.index(n % self.slots), count=1)


@gluon.jit
def new_ring(descriptor, SLOTS: gl.constexpr, READERS: gl.constexpr, TILES: gl.constexpr = 1):
    """Return a ring of a descriptor's tiles; what a slot has is free when all READERS say so."""
    tiles = gl.allocate_shared_memory(
        descriptor.dtype, [TILES * SLOTS] + descriptor.block_shape, descriptor.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=READERS)
    return Ring(tiles, full, empty, SLOTS)


@aggregate
class Queue:
    """Numbers that one warp hands to several warpgroups, two under way at once."""

    numbers: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, numbers, full, empty):
        """Hold on to them."""
        self.numbers = numbers
        self.full = full
        self.empty = empty

    @gluon.jit
    def give(self, n, number):
        """Hand over the n-th number."""
        mbarrier.wait(self.empty.index(n % 2), ((n // 2) & 1) ^ 1)
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        self.numbers.index(n % 2).store(gl.full([1], number, gl.int32, layout))
        mbarrier.arrive(self.full.index(n % 2), count=1)

    @gluon.jit
    def take(self, n):
        """Wait for the n-th number and return it."""
        mbarrier.wait(self.full.index(n % 2), (n // 2) & 1)
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        number = gl.max(self.numbers.index(n % 2).load(layout), 0)
        mbarrier.arrive(self.empty.index(n % 2), count=1)
        return number


@gluon.jit
def new_queue(READERS: gl.constexpr):
    """Return an empty queue."""
    numbers = gl.allocate_shared_memory(gl.int32, [2, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=READERS)
    return Queue(numbers, full, empty)


@aggregate
class Numbered:
    """A ring of tiles [1, 1, rows, columns] and of numbers [1, rows], which come and go together.

    Slots and phases are a ``Ring``'s.
    """

    tiles: gl.shared_memory_descriptor
    numbers: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    slots: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, tiles, numbers, full, empty, slots):
        """Hold on to them."""
        self.tiles = tiles
        self.numbers = numbers
        self.full = full
        self.empty = empty
        self.slots = gl.constexpr(slots)

    @gluon.jit
    def put(self, n, x, x_numbers, batch, head, heads, row):
        """Let the n-th tile come as soon as its slot is empty."""
        slot = n % self.slots
        mbarrier.wait(self.empty.index(slot), ((n // self.slots) & 1) ^ 1)
        full = self.full.index(slot)
        mbarrier.expect(full, x.block_type.nbytes + x_numbers.block_type.nbytes)
        load_tile(x, [batch, head, row, 0], full, self.tiles.index(slot))
        load_tile(x_numbers, [batch * heads + head, row], full, self.numbers.index(slot))

    @gluon.jit
    def take(self, n):
        """Wait for the n-th tile and return it, [rows, columns], and its numbers, [rows]."""
        slot = n % self.slots
        mbarrier.wait(self.full.index(slot), (n // self.slots) & 1)
        tile, numbers = self.tiles.index(slot), self.numbers.index(slot)
        return tile.reshape([tile.shape[2], tile.shape[3]]), numbers.reshape([numbers.shape[1]])

    @gluon.jit
    def free(self, n):
        """Say that this warpgroup has read the n-th tile."""
        mbarrier.arrive(self.empty.index(n % self.slots), count=1)


@gluon.jit
def new_numbered(x, x_numbers, SLOTS: gl.constexpr, READERS: gl.constexpr):
    """Return a ring of these descriptors' tiles; one is free when READERS warpgroups say so."""
    tiles = gl.allocate_shared_memory(x.dtype, [SLOTS] + x.block_shape, x.layout)
    numbers = gl.allocate_shared_memory(
        x_numbers.dtype, [SLOTS] + x_numbers.block_shape, x_numbers.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=READERS)
    return Numbered(tiles, numbers, full, empty, SLOTS)


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


@aggregate
class Parts:
    """A ring whose slots hold the parts of a tile, which come and go together."""

    ring: Ring
    count: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, ring, count):
        """Hold on to it."""
        self.ring = ring
        self.count = gl.constexpr(count)

    @gluon.jit
    def put(self, n, descriptor, batch, head, row):
        """Let the n-th tile of a head, in parts, come as soon as its slot is empty."""
        self.ring.wait(n)
        slot = n % self.ring.slots
        full = self.ring.full.index(slot)
        mbarrier.expect(full, self.count * descriptor.block_type.nbytes)
        for i in gl.static_range(self.count):
            at = [batch, head * self.count + i, row, 0]
            load_tile(descriptor, at, full, self.ring.tiles.index(slot * self.count + i))

    @gluon.jit
    def part(self, at):
        """Return a part of a tile, [rows, columns], by its place among all."""
        tile = self.ring.tiles.index(at)
        return tile.reshape([tile.shape[2], tile.shape[3]])

    @gluon.jit
    def take(self, n):
        """Wait for the n-th tile and return its parts."""
        self.ring.come(n)
        return self.parts(n)

    @gluon.jit
    def parts(self, n):
        """Return the parts of the n-th tile, which has come."""
        if self.count == 2:
            at = n % self.ring.slots * 2
            parts = self.part(at), self.part(at + 1)
        else:
            at = anew(n % self.ring.slots * 3)
            parts = self.part(at), self.part(at + 1), self.part(at + 2)
        return parts

    @gluon.jit
    def free(self, n):
        """Say that this warpgroup has read the n-th tile."""
        self.ring.free(n)


@gluon.jit
def new_parts(descriptor, SLOTS: gl.constexpr, READERS: gl.constexpr, PARTS: gl.constexpr):
    """Return a ring of a descriptor's tiles; all parts are free when READERS warpgroups say so."""
    return Parts(new_ring(descriptor, SLOTS, READERS, PARTS), PARTS)
