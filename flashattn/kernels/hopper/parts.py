"""Parts: tiles of fp32 cut into two or three of bf16, see ``portable.bf16x3``; and their products.

As the portable kernels do it: the lesser products first, the greatest to their sum, each in a sum
of its own, which is then added in fp32.
"""

# Gluon's aggregates look at annotations as they are, so they cannot be postponed here.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashattn.kernels.constants import HIGH_BITS
from flashattn.kernels.hopper.columns import ROWS
from flashattn.kernels.hopper.compat import aggregate, load_tile
from flashattn.kernels.hopper.ring import Ring, anew, new_ring


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


@gluon.jit
def high(x):
    """Return the first 8 bits of each number."""
    return (x.to(gl.int32, bitcast=True) & HIGH_BITS).to(gl.float32, bitcast=True)


@gluon.jit
def operand(x, LAYOUT: gl.constexpr):
    """Return a part as an operand of a product."""
    return gl.convert_layout(x.to(gl.bfloat16), LAYOUT, assert_trivial=True)


@gluon.jit
def cut(x, LAYOUT: gl.constexpr, PARTS: gl.constexpr):
    """Return operands of a product whose sum is x, in fp32: see ``primitives.cut``."""
    a = high(x)
    rest = x - a
    rest = gl.where(rest == rest, rest, 0.0)  # inf - inf
    if PARTS == 2:
        parts = operand(a, LAYOUT), operand(rest, LAYOUT)
    else:
        b = high(rest)
        parts = operand(a, LAYOUT), operand(b, LAYOUT), operand(rest - b, LAYOUT)  # type: ignore[assignment]
    return parts


@gluon.jit
def product(a, b, LAYOUT: gl.constexpr, PARTS: gl.constexpr):
    """Return the product of a [64, k] and b [k, columns], both cut."""
    WIDTH: gl.constexpr = b[0].shape[1]
    acc = gl.zeros([ROWS, WIDTH], gl.float32, LAYOUT)
    if PARTS == 2:
        acc = warpgroup_mma(a[0], b[1], acc, use_acc=False, is_async=True)
    else:
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
def transposed(x, PARTS: gl.constexpr):
    """Return a tile that is cut with its rows as columns."""
    if PARTS == 2:
        turned = x[0].permute((1, 0)), x[1].permute((1, 0))
    else:
        turned = x[0].permute((1, 0)), x[1].permute((1, 0)), x[2].permute((1, 0))  # type: ignore[assignment]
    return turned
