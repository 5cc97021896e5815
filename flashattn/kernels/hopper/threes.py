"""Threes: tiles of fp32 cut into three of bf16, see ``kernels.cut``; and what is multiplied so.

As the portable kernels do it: the five lesser products first, the greatest to their sum, each in a
sum of its own, which is then added in fp32.
"""

# Gluon's aggregates look at annotations as they are, so they cannot be postponed here.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashattn.kernels.hopper.compat import aggregate, load_tile
from flashattn.kernels.hopper.ring import Ring, new_ring
from flashattn.kernels.primitives import HIGH_BITS


@aggregate
class Threes:
    """A ring whose slots hold three tiles each, which come and go together."""

    ring: Ring

    @gluon.constexpr_function
    def __init__(self, ring):
        """Hold on to it."""
        self.ring = ring

    @gluon.jit
    def put(self, n, descriptor, batch, head, row):
        """Let the n-th tile of a head, which has three, come as soon as its slot is empty."""
        self.ring.wait(n)
        slot = n % self.ring.slots
        full = self.ring.full.index(slot)
        mbarrier.expect(full, 3 * descriptor.block_type.nbytes)
        for i in gl.static_range(3):
            at = [batch, head * 3 + i, row, 0]
            load_tile(descriptor, at, full, self.ring.tiles.index(slot * 3 + i))

    @gluon.jit
    def part(self, n, i):
        """Return a part of the n-th tile, [rows, columns]."""
        tile = self.ring.tiles.index(n % self.ring.slots * 3 + i)
        return tile.reshape([tile.shape[2], tile.shape[3]])

    @gluon.jit
    def take(self, n):
        """Wait for the n-th tile and return its parts."""
        self.ring.come(n)
        return self.part(n, 0), self.part(n, 1), self.part(n, 2)

    @gluon.jit
    def free(self, n):
        """Say that this warpgroup has read the n-th tile."""
        self.ring.free(n)


@gluon.jit
def new_threes(descriptor, SLOTS: gl.constexpr, READERS: gl.constexpr):
    """Return a ring of a descriptor's tiles; three are free when READERS warpgroups say so."""
    return Threes(new_ring(descriptor, SLOTS, READERS, 3))


@gluon.jit
def high(x):
    """Return the first 8 bits of each number."""
    return (x.to(gl.int32, bitcast=True) & HIGH_BITS).to(gl.float32, bitcast=True)


@gluon.jit
def cut(x, LAYOUT: gl.constexpr):
    """Return three operands of a product whose sum is x, in fp32."""
    a = high(x)
    rest = x - a
    rest = gl.where(rest == rest, rest, 0.0)  # inf - inf
    b = high(rest)
    return (
        gl.convert_layout(a.to(gl.bfloat16), LAYOUT, assert_trivial=True),
        gl.convert_layout(b.to(gl.bfloat16), LAYOUT, assert_trivial=True),
        gl.convert_layout((rest - b).to(gl.bfloat16), LAYOUT, assert_trivial=True),
    )


@gluon.jit
def product(a, b, LAYOUT: gl.constexpr):
    """Return the product of a [64, k] and b [k, columns], both cut."""
    COLUMNS: gl.constexpr = b[0].shape[1]
    acc = gl.zeros([64, COLUMNS], gl.float32, LAYOUT)
    acc = warpgroup_mma(a[1], b[1], acc, use_acc=False, is_async=True)
    acc = warpgroup_mma(a[0], b[2], acc, is_async=True)
    acc = warpgroup_mma(a[2], b[0], acc, is_async=True)
    acc = warpgroup_mma(a[0], b[1], acc, is_async=True)
    acc = warpgroup_mma(a[1], b[0], acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    acc = gl.where(acc == acc, acc, 0.0)  # inf * 0, of numbers whose product is inf
    acc = warpgroup_mma(a[0], b[0], acc, is_async=True)
    return warpgroup_mma_wait(0, deps=[acc])


@gluon.jit
def transposed(x):
    """Return a tile that is cut with its rows as columns."""
    return x[0].permute((1, 0)), x[1].permute((1, 0)), x[2].permute((1, 0))
