"""Ring: tiles in shared memory that one warp fills and several warpgroups read, in their turn."""

# Gluon's aggregates look at annotations as they are, so they cannot be postponed here.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flashattn.kernels.hopper.compat import aggregate, load_tile

ANEW = gl.constexpr("mov.b32 $0, $1;")


@gluon.jit
def anew(x):
    """Return x, of which the compiler does not know that it is x.

    What lies in one place all through a loop has addresses that a thread would keep in registers,
    one for each 16 columns that are multiplied; from a place that looks new it computes them again.
    """
    return gl.inline_asm_elementwise(ANEW, "=r,r", [gl.to_tensor(x)], gl.int32, False, 1)


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
