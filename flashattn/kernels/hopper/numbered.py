"""Numbered: a ring whose slots hold tiles, and a number for each of their rows."""

# Gluon's aggregates look at annotations as they are, so they cannot be postponed here.
from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashattn.kernels.hopper.compat import aggregate, load_tile


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


@dataclass(frozen=True)
class Numbers:
    """Rows of x [B * H, N], contiguous in fp32, of which [1, rows] are loaded at a time."""

    rows: int

    def describe(self, x: torch.Tensor) -> TensorDescriptor:
        """Return a descriptor of x."""
        layout = gl.NVMMASharedLayout(0, 32, 2)
        return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, self.rows], layout)
