"""Asynchronous copies of tiles between tensors and shared memory; fences and semaphores."""

from __future__ import annotations

from collections.abc import Sequence

from flashattn.emulate.barriers import Barrier
from flashattn.emulate.memory import Descriptor, Pointer, Shared
from flashattn.emulate.schedule import here


def load_tile(descriptor: Descriptor, at: Sequence[int], barrier: Barrier, tile: Shared) -> None:
    """Start loading a tile, with 0 outside of the tensor; until it lands, its memory is NaN."""
    tile.wipe()

    def land() -> None:
        x, place = descriptor.within(at)
        tile.own.zero_()
        tile.own.view(descriptor.block_shape)[place] = x
        tile.outer.copy_(tile.own)
        barrier.land(descriptor.block_type.nbytes)

    here().schedule.later(land)


class Store:
    """A store in flight: it reads its tile, and later writes to memory.

    Args:
        descriptor: descriptor of the tensor.
        at: coordinates of the first element.
        tile: tile in shared memory.
        add: whether to add to the tensor.
    """

    def __init__(
        self, descriptor: Descriptor, at: Sequence[int], tile: Shared, *, add: bool
    ) -> None:
        """Start the store."""
        self.read = self.written = False
        self._descriptor, self._at, self._tile, self._add = descriptor, at, tile, add
        self._schedule = here().schedule
        self._schedule.later(self._read)
        here().stores.append(self)

    def _read(self) -> None:
        self._x = self._tile.outer.reshape(self._descriptor.block_shape).clone()
        self.read = True
        self._schedule.later(self._write)

    def _write(self) -> None:
        x, place = self._descriptor.within(self._at)
        x.copy_(x + self._x[place] if self._add else self._x[place])
        self.written = True


def store_tile(descriptor: Descriptor, at: Sequence[int], tile: Shared) -> None:
    """Start storing a tile to memory."""
    Store(descriptor, at, tile, add=False)


def add_tile(descriptor: Descriptor, at: Sequence[int], tile: Shared) -> None:
    """Start adding a tile to memory."""
    Store(descriptor, at, tile, add=True)


def store_wait(pending: int) -> None:
    """Wait until all stores of these warps but the last ``pending`` have read their tiles."""
    stores = here().stores
    awaited = stores[: len(stores) - pending]
    here().pause(lambda: all(store.read for store in awaited))


def fence_async_shared() -> None:
    """Make these warps' stores to shared memory visible to copies and products."""
    unfenced = here().unfenced
    for publish in unfenced:
        publish()
    unfenced.clear()


def wait_eq(counter: Pointer, value: int) -> None:
    """Wait until a counter equals a value."""
    cell = counter.cell
    here().pause(lambda: cell.item() == value)


def fence_acquire() -> None:
    """Do nothing: stores are in memory when they are written."""


def arrive_inc(counter: Pointer) -> None:
    """Wait until all stores of these warps are in memory, then increment a counter."""
    stores = list(here().stores)
    here().pause(lambda: all(store.written for store in stores))
    counter.add(1)
