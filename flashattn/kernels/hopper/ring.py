"""Ring: tiles in shared memory that one warp fills and several warpgroups read, in their turn."""

# Gluon's aggregates look at annotations as they are, so they cannot be postponed here.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flashattn.kernels.hopper.compat import aggregate, load_tile


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
    def put(self, n, descriptor, batch, head, row):
        """Let the n-th tile come as soon as its slot is empty."""
        slot = n % self.slots
        mbarrier.wait(self.empty.index(slot), ((n // self.slots) & 1) ^ 1)
        tile = self.tiles.index(slot)
        mbarrier.expect(self.full.index(slot), descriptor.block_type.nbytes)
        load_tile(descriptor, [batch, head, row, 0], self.full.index(slot), tile)

    @gluon.jit
    def take(self, n):
        """Wait for the n-th tile and return it, [rows, columns]."""
        slot = n % self.slots
        mbarrier.wait(self.full.index(slot), (n // self.slots) & 1)
        tile = self.tiles.index(slot)
        return tile.reshape([tile.shape[2], tile.shape[3]])

    @gluon.jit
    def free(self, n):
        """Say that this warpgroup has read the n-th tile."""
        mbarrier.arrive(self.empty.index(n % self.slots), count=1)


@gluon.jit
def new_ring(descriptor, SLOTS: gl.constexpr, READERS: gl.constexpr):
    """Return a ring of a descriptor's tiles; one is free when READERS warpgroups say so."""
    tiles = gl.allocate_shared_memory(
        descriptor.dtype, [SLOTS] + descriptor.block_shape, descriptor.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=READERS)
    return Ring(tiles, full, empty, SLOTS)
