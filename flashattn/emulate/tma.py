"""Asynchronous copies of tiles between tensors and shared memory; fences and semaphores."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

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
    """A store in flight: it reads its tile, and later writes to memory."""

    read = written = False


def store_tile(
    descriptor: Descriptor, at: Sequence[int], tile: Shared, *, add: bool = False
) -> None:
    """Start storing a tile to memory, or adding it."""
    store, schedule = Store(), here().schedule

    def read() -> None:
        store.read = True
        schedule.later(partial(write, tile.outer.reshape(descriptor.block_shape).clone()))

    def write(x: torch.Tensor) -> None:
        target, place = descriptor.within(at)
        target.copy_(target + x[place] if add else x[place])
        store.written = True

    schedule.later(read)
    here().stores.append(store)


add_tile = partial(store_tile, add=True)


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
