"""Exchange: what each of two warpgroups computed, for both, two tiles of each at once."""

# Gluon's aggregates look at annotations as they are, so they cannot be postponed here.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from flashattn.kernels.hopper.compat import aggregate


@aggregate
class Exchange:
    """Tiles [rows, columns], for each whether it is full and whether the other has read it.

    The n-th of a warpgroup lies in slot n % 2 of its own. Phases are a ``Ring``'s.
    """

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, tiles, full, empty):
        """Hold on to them."""
        self.tiles = tiles
        self.full = full
        self.empty = empty

    @gluon.jit
    def put(self, n, warpgroup, x):
        """Store the n-th tile of a warpgroup, which is this one, as soon as there is room."""
        at = (n & 1) * 2 + warpgroup
        mbarrier.wait(self.empty.index(at), ((n >> 1) & 1) ^ 1)
        self.tiles.index(at).store(x)
        fence_async_shared()

    @gluon.jit
    def announce(self, n, warpgroup):
        """Say that the n-th tile of a warpgroup is there."""
        mbarrier.arrive(self.full.index((n & 1) * 2 + warpgroup), count=1)

    @gluon.jit
    def wait(self, n, warpgroup):
        """Wait for the n-th tile of a warpgroup."""
        mbarrier.wait(self.full.index((n & 1) * 2 + warpgroup), (n >> 1) & 1)

    @gluon.jit
    def tile(self, n, warpgroup):
        """Return the n-th tile of a warpgroup."""
        return self.tiles.index((n & 1) * 2 + warpgroup)

    @gluon.jit
    def free(self, n, warpgroup):
        """Say that the n-th tile of the other warpgroup was read."""
        mbarrier.arrive(self.empty.index((n & 1) * 2 + warpgroup), count=1)


@gluon.jit
def new_exchange(dtype: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Return an empty exchange of tiles for products."""
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    tiles = gl.allocate_shared_memory(dtype, [4, ROWS, COLUMNS], layout)
    full = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(4):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    return Exchange(tiles, full, empty)
